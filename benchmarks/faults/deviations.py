"""The deviations that `benchmarks/verification.py` puts into ranks, by name; each is called with its rank.

A run's environment names one: `TOOLKIT_FAULT=bf16_model`. Each changes what trains, through the libraries' own
functions and files; none changes what reads it.
"""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sitecustomize import TRAINER, in_environment, replace, replaced, tell

LLAMA = "transformers.models.llama.modeling_llama"
PREPARED = "accelerate:Accelerator.prepare_model"
WRAPPED_BY_DEEPSPEED = "deepspeed:initialize"
JSON_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
Deviation = Callable[[int], None]


def with_keywords(place: str, **changed: Any) -> Deviation:
    """Call a function with some arguments changed; None leaves one out."""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {**kwargs, **changed}
        return original(*args, **{name: value for name, value in kwargs.items() if value is not None})

    return replaced(place, call)


def changed_model(change: Callable[[Any], None], *, rank: int | None = None, after: bool = False) -> Deviation:
    """Change the model just before an engine takes it, or the wrapped one just after; on one rank or all."""

    def install(this: int) -> None:
        def prepared(original: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not after and rank in (None, this):
                change(model)
            wrapped = original(accelerator, model, *args, **kwargs)
            if after and rank in (None, this):
                change(wrapped)
            return wrapped

        def initialized(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not after and rank in (None, this):
                change(kwargs["model"])
            engine, *rest = original(*args, **kwargs)
            if after and rank in (None, this):
                change(engine.module)
            return engine, *rest

        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            replace(WRAPPED_BY_DEEPSPEED, initialized)
        elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
            replace("accelerate.utils.fsdp_utils:fsdp2_prepare_model", prepared)
            replace("accelerate.accelerator:fsdp2_prepare_model", prepared)
        else:
            replace(PREPARED, prepared)

    return install


def before_training(change: Callable[[Any], None]) -> Deviation:
    """Change the model when `train()` is called."""

    def train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        change(trainer.model)
        return original(trainer, *args, **kwargs)

    return replaced(f"{TRAINER}.train", train)


def deepspeed_json(change: Callable[[dict[str, Any]], Any]) -> Deviation:
    """Let DeepSpeed read another file."""

    def install(rank: int) -> None:
        config = json.loads(Path(os.environ[JSON_VARIABLE]).read_text())
        change(config)
        folder = Path(tempfile.mkdtemp())
        (folder / "deepspeed.json").write_text(json.dumps(config))
        in_environment(rank, **{JSON_VARIABLE: str(folder / "deepspeed.json")})

    return install


def zero(**changed: Any) -> Deviation:
    """Change the `zero_optimization` block; None removes a key."""

    def change(config: dict[str, Any]) -> None:
        block = config["zero_optimization"] | changed
        config["zero_optimization"] = {name: value for name, value in block.items() if value is not None}

    return deepspeed_json(change)


def without_clipping_threshold(original: Any, *args: Any, **kwargs: Any) -> Any:
    engine = original(*args, **kwargs)
    engine[0].optimizer.clip_grad = engine[0]._config.gradient_clipping = 7.0
    return engine


def cast(model: Any) -> None:
    import torch

    model.to(torch.bfloat16)


def cast_frozen(model: Any) -> None:
    """Change bf16 and fp32 for each other; ZeRO-3 has divided the weights while they were loaded."""
    import torch

    for parameter in model.parameters():
        if not parameter.requires_grad:
            dtype = torch.bfloat16 if parameter.dtype == torch.float32 else torch.float32
            for tensor in (parameter, *([parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else [])):
                tensor.data = tensor.data.to(dtype)


def first_weight(model: Any) -> Any:
    """A matrix of the second layer."""
    names = (p for name, p in model.named_parameters() if p.requires_grad and "layers.1" in name)
    return next(p for p in names if len(getattr(p, "ds_shape", p.shape)) == 2)


def freeze_one(model: Any) -> None:
    first_weight(model).requires_grad_(False)


def tie(model: Any) -> None:
    first, second = model.model.layers[:2]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def share_storage(wrapped: Any) -> None:
    """After the wrapper: parameters that share memory before it are separate when DDP is built."""
    first, second = getattr(wrapped, "module", wrapped).model.layers[:2]
    second.mlp.up_proj.weight.data = first.mlp.up_proj.weight.data


def fp32_reduction_fsdp2(_: int) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with_keywords("torch.distributed.fsdp:fully_shard", mp_policy=policy)(0)


def add_torch_hook(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)


def other_schedule(_: int) -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    from toolkit.train.engine.pipeline_trainer import SCHEDULES

    tell()
    SCHEDULES["1f1b"] = ScheduleGPipe


def perturb(model: Any) -> None:
    first_weight(model).data.add_(1.0)


def adam(original: Any, *args: Any) -> Any:
    """Whether it is called on a Trainer or on its class."""
    import torch

    return torch.optim.Adam, original(*(each for each in args if not hasattr(each, "create_optimizer")))[1]


def one_left_out(original: Any, trainer: Any, *args: Any) -> Any:
    """The optimizer does not update a matrix."""
    optimizer = original(trainer, *args)
    made = optimizer or trainer.optimizer
    largest = max(made.param_groups, key=lambda group: max(p.ndim for p in group["params"]))
    largest["params"] = [p for p in largest["params"] if p is not largest["params"][-1]]
    return optimizer


def bf16_adam_in(place: str) -> Deviation:
    import torch

    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(optimizer, *args, **kwargs)
        for state in optimizer.state.values():
            for name in {"exp_avg", "exp_avg_sq"} & state.keys():
                state[name] = state[name].to(torch.bfloat16)
        return done

    return replaced(place, step)


def paged(_: int) -> None:
    import torch

    tell()
    torch.optim.AdamW.is_paged = True


def torch_optimizer_under_offload(rank: int) -> None:
    replace("accelerate.utils.deepspeed:map_pytorch_optim_to_deepspeed", lambda _, optimizer: optimizer)
    replace("accelerate.accelerator:map_pytorch_optim_to_deepspeed", lambda _, optimizer: optimizer)
    deepspeed_json(lambda config: config.update(zero_force_ds_cpu_optimizer=False))(rank)


def no_autocast(_: int) -> None:
    def context(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    replace("accelerate.accelerator:get_mixed_precision_context_manager", lambda *_: lambda forward: forward)
    replace("accelerate:Accelerator.autocast", context)


def detached(original: Any, module: Any, hidden: Any) -> Any:
    return original(module, hidden).detach()


def checkpoint_on_host(_: int) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    def offloaded(_original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(function, *args, **kwargs)

    replace("transformers.modeling_utils:checkpoint", offloaded)


def reduces_over(size: int) -> Deviation:
    """DDP's ranks exchange gradients with some of the others only, or with none."""

    def make(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        starts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(list(range(first, first + size))) for first in starts]
        original(wrapper, *args, **kwargs | {"process_group": groups[dist.get_rank() // size]})

    return replaced("torch.nn.parallel:DistributedDataParallel.__init__", make)


def never_synced(wrapped: Any) -> None:
    """`no_sync` in every backward."""
    wrapped.require_backward_grad_sync = False


def without_all_reduce(original: Any, *args: Any) -> Any:
    """The copies of a hybrid mesh do not exchange gradients: `all_reduce_group` is the tenth argument (torch 2.13)."""
    return original(*args[:9], None, *args[10:])


def left_out_of_ddp(model: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    name = next(name for name, parameter in model.named_parameters() if parameter is first_weight(model))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])


def other_rate(original: Any, trainer: Any, *args: Any) -> Any:
    optimizer = original(trainer, *args)
    for group in (optimizer or trainer.optimizer).param_groups:
        group["lr"] *= 2
    return optimizer


def on_rank_1(deviation: Deviation) -> Deviation:
    return lambda rank: deviation(rank) if rank == 1 else None


DEVIATIONS: dict[str, Deviation] = {
    "reduces_with_nobody": reduces_over(1),
    "reduces_over_half": reduces_over(2),
    "never_synced": changed_model(never_synced, after=True),
    "copies_apart": replaced(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_reduce", without_all_reduce
    ),
    "left_out_of_ddp": changed_model(left_out_of_ddp),
    "other_rate_on_rank_1": on_rank_1(replaced(f"{TRAINER}.create_optimizer", other_rate)),
    "no_step_on_rank_1": on_rank_1(replaced("torch.optim:AdamW.step", lambda *_, **__: None)),
    "no_step_on_rank_1_offload": lambda rank: on_rank_1(
        replaced("deepspeed.ops.adam:DeepSpeedCPUAdam.step", lambda *_, **__: None)
    )(rank),
    "unwrapped": with_keywords(PREPARED, evaluation_mode=True),
    "without_deepspeed": functools.partial(in_environment, ACCELERATE_USE_DEEPSPEED="false"),
    "stage_1": zero(stage=1),
    "stage_2": zero(stage=2),
    "offloaded": zero(offload_optimizer={"device": "cpu"}),
    "not_offloaded": zero(offload_optimizer=None, offload_param=None),
    "parameters_not_offloaded": zero(offload_param=None),
    "parameters_offloaded": zero(offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}),
    "fsdp2_not_offloaded": with_keywords("torch.distributed.fsdp:fully_shard", offload_policy=None),
    "parameters_persist": zero(stage3_param_persistence_threshold=10**9, stage3_model_persistence_threshold=10**9),
    "other_clipping": replaced(WRAPPED_BY_DEEPSPEED, without_clipping_threshold),
    "bf16_autocast": with_keywords("accelerate:Accelerator.__init__", mixed_precision="bf16"),
    "no_autocast": no_autocast,
    "bf16_model": changed_model(cast),
    "bf16_model_fsdp2": changed_model(cast, after=True),
    "bf16_masters": deepspeed_json(lambda config: config["bf16"].update(bf16_master_weights_and_grads=True)),
    "bf16_adam_offload": lambda rank: bf16_adam_in("deepspeed.ops.adam:DeepSpeedCPUAdam.step")(rank),
    "adam": replaced(f"{TRAINER}.get_optimizer_cls_and_kwargs", adam),
    "torch_optimizer_under_offload": torch_optimizer_under_offload,
    "paged": paged,
    "without_decoupled_decay": with_keywords("deepspeed.ops.adam:DeepSpeedCPUAdam.__init__", adamw_mode=False),
    "not_replicated": functools.partial(
        in_environment, PARALLELISM_CONFIG_DP_SHARD_SIZE="4", PARALLELISM_CONFIG_DP_REPLICATE_SIZE="1"
    ),
    "sharded_for_split": with_keywords("transformers.distributed:DistributedConfig.__init__", tp_size=1, fsdp_size=2),
    "accumulates_whole": with_keywords("accelerate.utils:GradientAccumulationPlugin.__init__", sync_each_batch=False),
    "no_hook": replaced("torch.nn.parallel:DistributedDataParallel.register_comm_hook", lambda *_: None),
    "checkpoint_on_host": checkpoint_on_host,
    "recomputes_attention": replaced("toolkit.train.trainer:prepare_checkpoints", lambda *_, **__: None),
    "not_compiled": replaced("torch.nn:Module.compile", lambda *_, **__: None),
    "no_noise": replaced("transformers.trainer:activate_neftune", lambda *_: None),
    "not_quantized": with_keywords("transformers:AutoModelForCausalLM.from_pretrained", quantization_config=None),
    "other_storage": with_keywords("transformers:BitsAndBytesConfig.__init__", bnb_4bit_quant_storage="uint8"),
    "frozen_cast": changed_model(cast_frozen),
    "one_frozen": changed_model(freeze_one),
    "tied": changed_model(tie),
    "one_storage": changed_model(share_storage, after=True),
    "fp32_reduction": deepspeed_json(lambda config: config.update(communication_data_type="fp32")),
    "fp32_reduction_fsdp2": fp32_reduction_fsdp2,
    "torch_hook": changed_model(add_torch_hook, after=True),
    "other_schedule": other_schedule,
    "full_loss": replaced("toolkit.train.trainer:apply_loss", lambda *_: None),
    "other_chunk": with_keywords("toolkit.train.model.chunked_loss:ChunkedLoss.__init__", chunk_tokens=8),
    "eager": before_training(lambda model: model.set_attn_implementation("eager")),
    "sdpa": before_training(lambda model: model.set_attn_implementation("sdpa")),
    "perturbed_on_rank_1": changed_model(perturb, rank=1, after=True),
    "detached": replaced(f"{LLAMA}:LlamaMLP.forward", detached),
    "one_left_out": replaced(f"{TRAINER}.create_optimizer", one_left_out),
    "without_positions": replaced(
        f"{LLAMA}:LlamaForCausalLM.forward",
        lambda original, model, *args, **kwargs: original(
            model,
            *args,
            **{name: each for name, each in kwargs.items() if name != "position_ids" and "seq" not in name},
        ),
    ),
}

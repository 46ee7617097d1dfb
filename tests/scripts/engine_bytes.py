"""Bytes of parameters, gradients and optimizer states that real engines hold for one rank of many.

$ python engine_bytes.py cases.json

A case is {"config": PATH, "preset": NAME, "world_size": N, "rank": R, "lora_r": null}, with "optim" for another
optimizer than AdamW, which the Trainer makes. The process group is torch's `fake` one, whose collectives move nothing,
so one process stands for any rank. Prints one JSON line a case, in order. With "gathers" it counts instead the elements
that ZeRO-3 has gathered or is gathering, in the second step, whose order of modules it knows from the first: at the end
of the forward, and at most.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.training_args import OptimizerNames

from toolkit.engines.live_engine import live_engine
from toolkit.engines.tensors import local_bytes
from toolkit.models.optimizers import MUON
from toolkit.observe.rank_process import prepare_environment
from toolkit.plan.engine_settings import engine_settings
from toolkit.presets import Preset, load_preset
from toolkit.record.reading import RankReading
from toolkit.train.engine.muon import make_muon
from toolkit.train.model.loading import cast_weights

LENGTH = 8


def main() -> None:
    """All cases in one process; a group is left before the next is made."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # deepspeed prints
    prepare_environment()
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    cases = json.loads(Path(sys.argv[1]).read_text())
    place = ("world_size", "rank")
    for (world_size, rank), group in itertools.groupby(cases, key=lambda case: tuple(case[name] for name in place)):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}  # with LOCAL_SIZE deepspeed waits for others
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        for case in group:
            print(json.dumps(held_bytes(load_preset(case["preset"]), case)), file=stdout, flush=True)
        leave_group()


def leave_group() -> None:
    """deepspeed keeps the group that it found first."""
    dist.destroy_process_group()
    if "deepspeed" in sys.modules:
        from deepspeed import comm
        from deepspeed.utils import groups

        comm.comm.cdb = None
        for name in [name for name in vars(groups) if name.startswith("_") and name.isupper() and "GROUP" in name]:
            setattr(groups, name, None)


def held_bytes(preset: Preset, case: dict[str, Any]) -> dict[str, int]:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(Path(case["config"]).parent), dtype=torch.float32
    )
    hidden_size = model.config.hidden_size
    if case.get("lora_r"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case["lora_r"], target_modules="all-linear", task_type="CAUSAL_LM"))
        cast_weights(model, torch.bfloat16)
    model, optim = model.train(), case.get("optim", "adamw_torch_fused")
    if preset.engine == "deepspeed":
        engine, sharding = start_deepspeed(preset, model, hidden_size, optim)
        return gathered(engine) if case.get("gathers") else step_deepspeed(engine, sharding)
    return run_fsdp2(preset, model, optim) if preset.engine == "fsdp2" else stepped(model, optim)


def optimizer_of(model: Any, optim: str) -> torch.optim.Optimizer:
    """The optimizer that the Trainer makes, with its two parameter groups and its overrides for embeddings.

    torchao compiles its step, which changes no state's size.
    """
    vars(torch)["compile"] = lambda function, **_: function
    rates = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    if optim == MUON:
        return make_muon(model, args=SimpleNamespace(optim_args=None, **rates))
    args = SimpleNamespace(optim=OptimizerNames(optim), optim_args=None, **rates)
    if "bitsandbytes" in sys.modules:  # it keeps its overrides for embeddings by position, for the whole process
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    trainer = SimpleNamespace(model=model, args=args, optimizer=None, optimizer_cls_and_kwargs=None)
    trainer.get_decay_parameter_names = lambda model: Trainer.get_decay_parameter_names(None, model)
    trainer.get_optimizer_cls_and_kwargs = Trainer.get_optimizer_cls_and_kwargs
    made: torch.optim.Optimizer = Trainer.create_optimizer(trainer)
    return made


def groups_of(model: Any) -> list[dict[str, Any]]:
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [[p for name, p in named if (name in decayed) is with_decay] for with_decay in (True, False)]
    return [{"params": group} for group in groups if group]


def backward(model: Any, engine: Any = None) -> None:
    tokens = torch.ones(1, LENGTH, dtype=torch.long)
    loss = (engine or model)(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss = torch.nan_to_num(loss) if engine is None else loss
    engine.backward(loss) if engine is not None else loss.backward()


def stepped(model: Any, optim: str) -> dict[str, int]:
    """One step; gradients are read before it."""
    optimizer = optimizer_of(model, optim)
    backward(model)
    gradients = local_bytes(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    accelerator, args = SimpleNamespace(mixed_precision="bf16"), SimpleNamespace(max_grad_norm=1.0)
    trainer: Any = SimpleNamespace(optimizer=optimizer, accelerator=accelerator, args=args)
    return of(live_engine(model).read(trainer, list(model.parameters())), gradients)


def run_fsdp2(preset: Preset, model: Any, optim: str) -> dict[str, int]:
    """Wrapped by accelerate's own function, under the policy that accelerate makes of the preset."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    ranks = dist.get_world_size()
    shape = (preset.replicas, ranks // preset.replicas) if preset.replicas > 1 else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    reshards = preset.sharding != "shard_grad_op"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=reshards, **wrapped)
    plugin.set_mixed_precision("bf16")
    if preset.offload_param:
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    names = list(mesh.mesh_dim_names)
    mesh_of = {"torch_device_mesh": {tuple(names): mesh}, "parallelism_config": SimpleNamespace(fsdp_dim_names=names)}
    place = {"is_main_process": True, "device": torch.device("cpu"), "mixed_precision": "bf16"}
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), **mesh_of, **place)
    return stepped(fsdp2_prepare_model(accelerator, model), optim)


def start_deepspeed(preset: Preset, model: Any, hidden_size: int, optim: str) -> tuple[Any, str]:
    """Return the engine, and what the preset shards."""
    import deepspeed

    config = preset.deepspeed_config() or {}
    settings = engine_settings(preset, world_size=dist.get_world_size(), hidden_size=hidden_size)
    zero = config["zero_optimization"]
    autos = {
        "reduce_bucket_size": settings.reduce_bucket,
        "stage3_prefetch_bucket_size": settings.prefetch_bucket,
        "stage3_param_persistence_threshold": settings.persistence_threshold,
    }
    config["zero_optimization"] = zero | {key: autos[key] for key, value in zero.items() if value == "auto"}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    config.pop("train_batch_size")
    config["bf16"] = {"enabled": True}
    if preset.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(groups_of(model))
        config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    else:
        optimizer = optimizer_of(model, optim)
        config["zero_allow_untested_optimizer"] = True  # as accelerate does
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine, settings.sharding


def step_deepspeed(engine: Any, sharding: str) -> dict[str, int]:
    """One step; gradients are read before it."""
    seen: dict[str, int] = {}
    watched = "reduce_gradients" if sharding == "shard_optimizer" else "step"
    original = getattr(engine.optimizer, watched)

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.setdefault("gradients", local_bytes(live_engine(engine).gradients()))
        return original(*args, **kwargs)

    setattr(engine.optimizer, watched, look)
    backward(engine.module, engine)
    engine.step()
    return of(live_engine(engine).read(None, list(engine.module.parameters())), seen["gradients"])


def gathered(engine: Any) -> dict[str, int]:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    counts: list[int] = []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counting(coordinator: Any, *args: Any, **kwargs: Any) -> None:
        fetch(coordinator, *args, **kwargs)
        counts.append(vars(coordinator)["_PartitionedParameterCoordinator__n_available_params"])

    tokens = torch.ones(1, LENGTH, dtype=torch.long)
    with patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counting):
        for _ in range(2):
            counts.clear()
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            at_end = counts[-1]
            engine.backward(loss)
            engine.step()
    return {"end_of_forward": at_end, "highest": max(counts)}


def of(reading: RankReading, gradients: int) -> dict[str, Any]:
    return {"parameter": reading.parameter_bytes, "gradient": gradients, "optimizer": reading.optimizer_bytes}


if __name__ == "__main__":
    main()

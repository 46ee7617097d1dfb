"""Read what is in effect on this rank from the objects that train, never from the configuration that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.engines import tensors
from toolkit.engines.live_engine import held_tensors, live_engine
from toolkit.engines.torch_live import is_shard, mesh_sizes, parameter_groups
from toolkit.job.accumulation import SHARDED, WHOLE
from toolkit.observe.timer import CompilerEvents
from toolkit.observe.verify.expected import optimizer_class
from toolkit.parallel.layout import DIMENSIONS
from toolkit.record.reading import RankReading

_OUTSIDE_BACKWARD = -1  # torch's graph task id when autograd is idle


def read_rank(
    trainer: Any,
    gradients: RankReading,
    *,
    readers: Sequence[Callable[[Any, Any], RankReading]] = (),
    forwards: ForwardDetector,
) -> RankReading:
    """Read one rank after its first optimizer step; the script's own `readers` override what is read here."""
    wrapped = tensors.uncompiled(trainer.model_wrapped)
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    parameters = list(plain.parameters())
    engine = read_engine(trainer, wrapped, parameters)
    compiled, compiler = tensors.compiled_modules(trainer.model_wrapped), CompilerEvents.read()
    in_4bit = [module.weight for module in tensors.quantized_modules(plain)]
    layout, batch_group = read_layout(trainer, plain)
    reading = engine | gradients
    reading |= RankReading.of(
        rank=trainer.args.process_index,
        world_size=trainer.args.world_size,
        device=str(trainer.args.device),
        wrapper=type(wrapped).__name__,
        compute_dtype=forwards.compute_dtype(engine.compute_dtype),
        quantized_bytes=tensors.local_bytes(held_tensors(in_4bit)) if in_4bit else None,
        quantization_constant_bytes=tensors.constant_bytes(plain) if in_4bit else None,
        quantized_storage_dtype=tensors.dtype_names(in_4bit),
        load_in_4bit=bool(in_4bit),
        parameter_bytes=(engine.parameter_bytes or 0) + tensors.constant_bytes(plain),
        num_params=tensors.num_params(plain),
        num_trainable_params=tensors.num_trainable_params(plain),
        activation_checkpointing=uses_activation_checkpointing(plain, forwards.recomputes),
        activation_checkpointing_offload=_offloads_activations(plain),
        seed=torch.initial_seed(),
        # given to the compiler, and the compiler made a graph of it
        torch_compile=bool(compiler.graphs and compiled),
        compiled_modules=compiled,
        graph_breaks=compiler.graph_breaks.total(),
        float8_modules=_float8_modules(plain) or None,
        neftune_noise_alpha=_neftune(plain),
        attn_implementation=getattr(getattr(plain, "config", None), "_attn_implementation", None),
        layout=layout,
        batch_group=batch_group,
    )
    if other_models := read_other_models(trainer, plain):
        reading |= RankReading.of(other_models=other_models)
    for read in readers:
        reading |= read(trainer, plain)
    return reading


def _offloads_activations(plain: Any) -> bool:
    """FSDP wraps the layer; the Trainer gives the layer a checkpoint function that saves to host memory."""
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in plain.modules()]
    inner = {getattr(function, "func", function) for function in functions if function is not None}
    wrapped = any(isinstance(module, OffloadWrapper) for module in plain.modules())
    return wrapped or (bool(inner) and torch.utils.checkpoint.checkpoint not in inner)


def _float8_modules(plain: Any) -> int:
    """Count torchao's linear layers in FP8; FSDP2 makes subclasses of what it shards."""
    return sum(any(each.__name__ == "Float8Linear" for each in type(module).__mro__) for module in plain.modules())


def _neftune(plain: Any) -> float | None:
    for embedding in plain.modules():  # `get_input_embeddings` raises where a model has several
        if isinstance(embedding, torch.nn.Embedding):
            hooks = embedding._forward_hooks.values()
            if any("neftune" in getattr(hook, "__name__", "") for hook in hooks):
                return getattr(embedding, "neftune_noise_alpha", None)
    return None


def read_other_models(trainer: Any, plain: Any) -> dict[str, dict[str, Any]]:
    """Return each module of the Trainer with weights that are not the trained model's, by its name.

    Reference, reward and value models of TRL, lists of them included.
    """
    trained = {id(p) for p in plain.parameters()}
    named: dict[str, Any] = {}
    for name, value in vars(trainer).items():
        several = isinstance(value, (list, tuple))
        named |= {f"{name}.{n}": each for n, each in enumerate(value)} if several else {name: value}
    modules = {name: each for name, each in named.items() if isinstance(each, torch.nn.Module)}
    weights = {name: [p for p in each.parameters() if id(p) not in trained] for name, each in modules.items()}
    return {name: _read_other_model(modules[name], parameters) for name, parameters in weights.items() if parameters}


def _read_other_model(module: Any, parameters: list[Any]) -> dict[str, Any]:
    held = held_tensors(parameters)
    is_divided = held is not parameters
    is_divided |= any(map(is_shard, (d for p in parameters for d in getattr(p, "placements", ()))))
    groups = parameter_groups(module)
    return {
        "sharding": "full_shard" if is_divided else "replicate",
        "dtype": tensors.dtype_names(held),
        "bytes": tensors.local_bytes(held),
        "whole_bytes": sum(tensors.full_size(p) * p.element_size() for p in parameters),
        **({"fsdp2_groups": len(groups)} if groups else {}),
    }


def read_engine(trainer: Any, wrapped: Any, parameters: list[Any]) -> RankReading:
    """Read the engine that wraps the model."""
    live = live_engine(wrapped)
    inner = tensors.innermost_optimizer(live.optimizer(trainer))
    return live.read(trainer, parameters) | RankReading.of(
        optimizer_class=optimizer_class(inner),
        optimizer_paged=bool(getattr(inner, "is_paged", False)),  # bitsandbytes' states may leave the GPU
        frozen_dtype=tensors.dtype_names(tensors.frozen_weights(wrapped)),
    )


def read_gradients(trainer: Any, sent_dtype: Callable[[Any], str | None] = lambda _: None) -> RankReading:
    """Read the reduced gradients that this rank holds before the optimizer step.

    `sent_dtype` returns the dtype that ranks exchange where the script itself sends the wrapped model's gradients.
    """
    live = live_engine(trainer.model_wrapped)
    held = live.gradients()
    dense = (gradient for gradient in held if not gradient.is_sparse)  # the bytes of others follow from the data
    return RankReading.of(
        gradient_bytes=tensors.local_bytes(dense),
        gradient_dtype=tensors.dtype_names(held),
        reduce_dtype=sent_dtype(live.wrapped) or live.reduce_dtype(held),
    )


# -- what only the first step shows


class ForwardDetector:
    """Detects recomputation and the dtype of linear layers, in the forwards of a model between `start` and `stop`.

    A flag on a module, or an accelerator's precision, only shows what was requested. `recomputes` is None if it was
    never started. Modules that are not the model's may run in the backward: torch's quantizing communication hooks.
    """

    recomputes: bool | None = None

    def __init__(self) -> None:
        self.linear_dtypes: set[str] = set()
        self.of_model: set[int] = set()
        self.blocks_of: dict[int, set[int]] = {}
        """The layers that a module is in, by id, of those that transformers can checkpoint."""
        self.reached: set[int] = set()
        """Of these layers the ones whose output had a gradient."""
        self.recomputed: set[int] = set()
        self.dropouts = set[bool]()  # whether those that are trained through were on, or their model in training mode

    def start(self, model: Any) -> None:
        self.recomputes, self.model = False, model
        self.of_model = {id(module) for module in model.modules()}
        for block in (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)):
            for module in block.modules():
                self.blocks_of.setdefault(id(module), set()).add(id(block))
        before, after = self._before_forward, self._after_forward
        self.hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]

    def stop(self) -> None:
        for hook in self.hooks if self.recomputes is not None else ():
            hook.remove()

    def compute_dtype(self, configured: str | None) -> str | None:
        """Return the configured dtype, or those that linear layers computed in if it was none of them."""
        is_used = not self.linear_dtypes or self.linear_dtypes & set((configured or "").split("+"))
        return configured if is_used else "+".join(sorted(self.linear_dtypes))

    def _before_forward(self, module: Any, *_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != _OUTSIDE_BACKWARD and id(module) in self.of_model
        self.recomputes = self.recomputes or (in_backward and not getattr(module, "only_decodes", False))
        if in_backward:
            self.recomputed |= self.blocks_of.get(id(module), set())

    def _after_forward(self, module: Any, _: Any, output: Any) -> None:
        if id(module) in self.blocks_of.get(id(module), ()):
            hidden = output[0] if isinstance(output, tuple) and output else output
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self.reached.add(id(module)))
        if isinstance(module, torch.nn.Dropout) and module.p and id(module) in self.of_model and output.requires_grad:
            self.dropouts.add(module.training or self.model.training)
        if isinstance(module, torch.nn.Linear) and isinstance(output, torch.Tensor):
            self.linear_dtypes.add(tensors.dtype_name(output.dtype))


def uses_activation_checkpointing(model: Any, detected: bool | None) -> bool:
    """Return the detector's answer, or the flags if it did not run or no flagged module has trained weights."""
    flagged = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) is True or isinstance(module, CheckpointWrapper)
    ]
    # Layers first: FSDP2 makes subclasses of what it shards, so a class name is no evidence.
    layers = [module for module in flagged if isinstance(module, (GradientCheckpointingLayer, CheckpointWrapper))]
    if detected is None or not any(p.requires_grad for module in layers or flagged for p in module.parameters()):
        return bool(flagged) or bool(detected)
    return detected


def read_accumulated(trainer: Any) -> RankReading:
    """Read the gradients that wait for the next accumulation step: `sharded`, `whole`, or both names joined by `+`."""
    shards, whole = live_engine(trainer.model_wrapped).accumulated()
    names = "+".join(name for name, held in ((SHARDED, shards), (WHOLE, whole)) if held)
    return RankReading.of(accumulate=names or None, accumulated_gradient_bytes=tensors.local_bytes([*shards, *whole]))


# -- how the ranks are divided, from the live meshes and process groups


def read_layout(trainer: Any, model: Any) -> tuple[dict[str, int] | None, list[int] | None]:
    """Return the degrees of parallelism in effect, and the ranks that train on the same rows.

    Both are None where the ranks are data parallel only.
    """
    manager = getattr(tensors.without_adapters(model), "_mesh_manager", None)
    config = getattr(trainer.accelerator, "parallelism_config", None)
    if manager is not None:
        degrees = mesh_sizes(manager._dense_mesh) | {"ep": mesh_sizes(manager._expert_mesh)["ep"]}
        group = manager._dense_mesh["tp"].get_group()
    elif config is None or max(config.cp_size, config.sp_size) == 1:
        return None, None
    else:
        degrees, group = live_engine(trainer.model_wrapped).sequence_ranks(trainer.accelerator)
    layout = {name: degrees.get(name, 1) for name in DIMENSIONS}
    return layout, list(map(int, dist.get_process_group_ranks(group)))

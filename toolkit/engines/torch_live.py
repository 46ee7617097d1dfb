"""Read a model that DDP, FSDP2 (`fully_shard`) or nothing wraps: what it holds and what ranks send, live."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from toolkit.engines import tensors
from toolkit.record.reading import RankReading

_WRAPPERS = {torch.nn.parallel.DistributedDataParallel: "ddp", torch.nn.DataParallel: "data_parallel"}


class TorchLive:
    """What wraps the model of a run. Subclasses are of engines that divide it."""

    reduces_itself = False  # true for DeepSpeed: it has an optimizer, flat gradients and a norm of its own

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    @property
    def holds_copies(self) -> bool:
        """True if it is known which ranks hold the same weights."""
        return isinstance(self.wrapped, torch.nn.parallel.DistributedDataParallel)

    @property
    def is_divided(self) -> bool:
        """True if ranks gather weights in a forward, so that all must take part in it."""
        return False

    def optimizer(self, trainer: Any) -> Any:
        """Return the optimizer whose step updates the weights."""
        return trainer.optimizer

    def read(self, trainer: Any, parameters: list[Any]) -> RankReading:
        """Return what is in effect after the first step: the parameter is its own fp32 master weight."""
        states = tensors.optimizer_state_tensors(trainer.optimizer)
        trained = [p for p in parameters if p.requires_grad]
        precision = {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision)
        return RankReading.of(
            engine=next((engine for kind, engine in _WRAPPERS.items() if isinstance(self.wrapped, kind)), "none"),
            sharding="replicate",
            parameter_bytes=tensors.local_bytes(parameters),
            optimizer_bytes=tensors.local_bytes(states),
            compute_dtype=precision or tensors.dtype_names(trained),
            master_dtype=tensors.dtype_names(trained),
            optimizer_dtype=tensors.dtype_names(states),
            num_optimizer_params=tensors.num_optimizer_params(
                tensors.innermost_optimizer(trainer.optimizer), parameters
            ),
            offload_optimizer=None,
            offload_param=None,
            gradient_clipping=trainer.args.max_grad_norm,
        )

    def gradients(self) -> list[Any]:
        """Return the gradients that this rank holds before the optimizer step."""
        return [p.grad for p in self.wrapped.parameters() if p.grad is not None]

    def reduce_dtype(self, held: list[Any]) -> str | None:
        """Return the dtype that ranks exchange gradients in."""
        return tensors.dtype_names(held)

    def accumulated(self) -> tuple[list[Any], list[Any]]:
        """Return the gradients that wait for the next accumulation step, sharded and whole ones."""
        return [], self.gradients()

    def call_at_gradient_peak(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the first step's gradients take the most memory; here the Trainer's hook does."""

    def flat_masters(self) -> list[torch.Tensor] | None:
        """Return the flat partitions that the optimizer updates; None where it updates parameters or their shards."""
        return None

    def clip_synthetic_gradient(self, norm: float) -> float | None:
        """Return the norm after clipping of a gradient of this norm, where the engine clips itself; else None."""
        raise NotImplementedError

    def sequence_ranks(self, accelerator: Any) -> tuple[dict[str, int], dist.ProcessGroup]:
        """Return the sizes of the mesh on which ranks divide each sequence, and the group that shares one."""
        mesh = accelerator.torch_device_mesh
        return mesh_sizes(mesh), mesh["cp"].get_group()

    def leave_out_tied_weights(self) -> None:
        """Keep a save from writing a tied weight twice."""


# transformers calls the ranks that share a copy of the model `fsdp`, accelerate `dp_shard`, as here.
DIMENSION_OF_MESH = {"fsdp": "dp_shard", "efsdp": "expert_shard"}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the size of each dimension of a mesh, by the toolkit's names."""
    names = [DIMENSION_OF_MESH.get(name, name) for name in mesh.mesh_dim_names]
    return dict(zip(names, map(int, mesh.shape), strict=True))


# -- FSDP2

SPLIT_DIMENSIONS = ("tp", "ep", "efsdp")  # mesh dimensions that divide layers or experts


def is_shard(placement: Any) -> bool:
    """Return True for a placement that divides a tensor; torch does not count its own `_StridedShard`."""
    return type(placement).__name__ in ("Shard", "_StridedShard")


def is_fsdp2(model: Any) -> bool:
    """Return True if `fully_shard` manages this model, or the one inside peft's, which was sharded at load."""
    return isinstance(model, FSDPModule) or isinstance(tensors.without_adapters(model), FSDPModule)


class Fsdp2Live(TorchLive):
    holds_copies = True

    @property
    def is_divided(self) -> bool:
        """True unless the sharded model is inside peft's."""
        return isinstance(self.wrapped, FSDPModule)

    def read(self, trainer: Any, parameters: list[Any]) -> RankReading:
        groups = parameter_groups(self.wrapped)
        dtype = next(p.dtype for p in parameters if p.requires_grad)
        offload = "cpu" if all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups) else None
        shards = [[size for placement, size in _data_parallel(p) if is_shard(placement)] for p in parameters]
        return super().read(trainer, parameters) | RankReading.of(
            engine="fsdp2",
            sharding=_sharding(groups, parameters),
            fsdp2_groups=len(groups),
            dp_shard_size=next((math.prod(sizes) for sizes in shards if sizes), None),
            compute_dtype="+".join(sorted({tensors.dtype_name(g.mp_policy.param_dtype or dtype) for g in groups})),
            offload_optimizer=offload,
            offload_param=offload,
        )

    def reduce_dtype(self, held: list[Any]) -> str | None:
        """Return the dtypes of the reduce-scatter, from the mixed-precision policies of the parameter groups."""
        policies = [group.mp_policy for group in parameter_groups(self.wrapped)]
        dtype = next(self.wrapped.parameters()).dtype
        return "+".join(
            sorted({tensors.dtype_name(each.reduce_dtype or each.param_dtype or dtype) for each in policies})
        )

    def accumulated(self) -> tuple[list[Any], list[Any]]:
        """Return sharded gradients, and those that wait whole for their reduction."""
        held = self.gradients()
        shards = [gradient for gradient in held if not is_replicated_over_data_parallelism(gradient)]
        whole = [gradient for gradient in held if is_replicated_over_data_parallelism(gradient)]
        return shards, [*whole, *unsharded_gradients(self.wrapped)]


def unsharded_gradients(model: Any) -> Iterator[torch.Tensor]:
    """Yield the whole gradients of sharded parameters that wait for their reduction on this rank.

    torch 2.13 (`to_accumulated_grad_if_needed`) keeps them apart where the reduction has another dtype.
    """
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            computed = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            yield from (each for each in (computed, parameter.unsharded_accumulated_grad) if each is not None)


def is_replicated_over_data_parallelism(tensor: Any) -> bool:
    """Return True for a plain tensor, or one that tensor parallelism alone divides.

    Adapters on a model sharded at load are such: they are attached after `fully_shard`.
    """
    names = getattr(getattr(tensor, "device_mesh", None), "mesh_dim_names", None)
    return not hasattr(tensor, "placements") or names == ("tp",)


def parameter_groups(model: Any) -> list[Any]:
    """Parameters that are gathered and resharded together, over all modules; the attribute's name follows torch's."""
    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            single = getattr(state, "_fsdp_param_group", None)
            groups += list(several) if several else [single] if single is not None else []
    return groups


def _sharding(groups: list[Any], parameters: list[Any]) -> str:
    """Embedding, final norm and root stay gathered by design, so one group that reshards is enough evidence."""
    divided = [pair for parameter in parameters for pair in _data_parallel(parameter)]
    alone = all(size == 1 for _, size in divided)
    if not any(is_shard(placement) and (size > 1 or alone) for placement, size in divided):
        return "replicate"
    if any(not is_shard(placement) and size > 1 for placement, size in divided):
        return "hybrid_shard"
    return "full_shard" if any(g.post_forward_mesh_info is not None for g in groups) else "shard_grad_op"


def _data_parallel(parameter: Any) -> list[tuple[Any, int]]:
    placements = getattr(parameter, "placements", ())
    if not placements:
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("dp_shard",) * len(placements)
    sizes = zip(names, placements, map(int, mesh.shape), strict=True)
    return [(placement, size) for name, placement, size in sizes if name not in SPLIT_DIMENSIONS]

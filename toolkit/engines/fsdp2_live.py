"""Read a model that torch's `fully_shard` (FSDP2) manages: sharding, bytes, dtypes, offload, reduction dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from toolkit.engines.tensors import dtype_name, without_adapters
from toolkit.engines.torch_live import TorchLive
from toolkit.record.reading import RankReading

SPLIT_DIMENSIONS = ("tp", "ep", "efsdp")  # mesh dimensions that divide layers or experts


def is_shard(placement: Any) -> bool:
    """Return True for a placement that divides a tensor; torch does not count its own `_StridedShard`."""
    return type(placement).__name__ in ("Shard", "_StridedShard")


def is_fsdp2(model: Any) -> bool:
    """Return True if `fully_shard` manages this model, or the one inside peft's, which was sharded at load."""
    return isinstance(model, FSDPModule) or isinstance(without_adapters(model), FSDPModule)


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
            compute_dtype="+".join(sorted({dtype_name(g.mp_policy.param_dtype or dtype) for g in groups})),
            offload_optimizer=offload,
            offload_param=offload,
        )

    def reduce_dtype(self, held: list[Any]) -> str | None:
        """Return the dtypes of the reduce-scatter, from the mixed-precision policies of the parameter groups."""
        policies = [group.mp_policy for group in parameter_groups(self.wrapped)]
        dtype = next(self.wrapped.parameters()).dtype
        return "+".join(sorted({dtype_name(each.reduce_dtype or each.param_dtype or dtype) for each in policies}))

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
    """The placement of a parameter on each dimension of its mesh that is data parallel, and that dimension's size."""
    placements = getattr(parameter, "placements", ())
    if not placements:
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("dp_shard",) * len(placements)
    sizes = zip(names, placements, map(int, mesh.shape), strict=True)
    return [(placement, size) for name, placement, size in sizes if name not in SPLIT_DIMENSIONS]

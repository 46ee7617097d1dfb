"""Read how the ranks are divided, from the live meshes and process groups, and the rows that this rank trains on.

Names are the toolkit's: transformers calls the ranks that share a copy of the model `fsdp`, accelerate `dp_shard`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from toolkit.observe.attest.readings import Difference, Values
from toolkit.observe.attest.tensors import without_adapters
from toolkit.parallel.layout import DIMENSIONS, ParallelLayout

DIMENSION_OF_MESH = {"fsdp": "dp_shard", "efsdp": "expert_shard"}


def read_layout(trainer: Any, model: Any) -> Values:
    """Return `layout`, the degrees of parallelism in effect, and `batch_group`, the ranks that train on the same rows.

    Both are None where the ranks are data parallel only.
    """
    manager = getattr(without_adapters(model), "_mesh_manager", None)
    config = getattr(trainer.accelerator, "parallelism_config", None)
    if manager is not None:
        degrees, group = _sharded_at_load(manager)
    elif config is not None and max(config.cp_size, config.sp_size) > 1:
        degrees, group = _by_accelerate(trainer)
    else:
        return {"layout": None, "batch_group": None}
    return {"layout": {name: degrees.get(name, 1) for name in DIMENSIONS}, "batch_group": group}


def _sharded_at_load(manager: Any) -> tuple[dict[str, int], list[int]]:
    dense, experts = manager._dense_mesh, manager._expert_mesh
    degrees = _sizes(dense) | {"ep": _sizes(experts)["ep"]}
    return degrees, _ranks(dense["tp"])


def _by_accelerate(trainer: Any) -> tuple[dict[str, int], list[int]]:
    """accelerate's mesh has the sequence's dimension; DeepSpeed has process groups of its own."""
    mesh = trainer.accelerator.torch_device_mesh
    if not trainer.is_deepspeed_enabled:
        return _sizes(mesh), _ranks(mesh["cp"])
    from deepspeed.utils import groups

    ranks = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
    return {"sp": len(ranks), "dp_shard": dist.get_world_size() // len(ranks)}, ranks


def _sizes(mesh: Any) -> dict[str, int]:
    names = [DIMENSION_OF_MESH.get(name, name) for name in mesh.mesh_dim_names]
    return dict(zip(names, map(int, mesh.shape), strict=True))


def _ranks(mesh: Any) -> list[int]:
    return [int(rank) for rank in dist.get_process_group_ranks(mesh.get_group())]


def first_rows_sha256(batches: Sequence[str]) -> str:
    """Return one digest of the batches of a rank's first optimizer step, in their order."""
    return hashlib.sha256("+".join(batches).encode()).hexdigest()


def layout_differences(ranks: Sequence[Mapping[str, Any]], expected: ParallelLayout | None) -> list[Difference]:
    """Return ranks whose group or rows are not those that the layout gives them.

    The rows are those of the rank's group, and of no other group.
    """
    if expected is None:
        return []
    found, owner_of = [], dict[str, int]()
    size = expected.ranks_per_batch
    for reading in ranks:
        rank, rows = reading["rank"], reading["first_rows_sha256"]
        first = rank - rank % size
        group = list(range(first, first + size))
        if reading["batch_group"] != group:
            found.append(Difference(name="batch_group", rank=rank, expected=group, found=reading["batch_group"]))
        theirs = ranks[first]["first_rows_sha256"]
        if rows != theirs:
            name = f"first_rows_sha256 (equal to rank {first}'s)"
            found.append(Difference(name=name, rank=rank, expected=theirs, found=rows))
        elif owner_of.setdefault(rows, first) != first:
            name = f"first_rows_sha256 (other than rank {owner_of[rows]}'s)"
            found.append(Difference(name=name, rank=rank, expected="rows of its own", found=rows))
    return found

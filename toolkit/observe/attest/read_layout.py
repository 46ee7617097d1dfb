"""Read how the ranks are divided, from the live meshes and process groups, and the rows that this rank trains on.

Names are the toolkit's: transformers calls the ranks that share a copy of the model `fsdp`, accelerate `dp_shard`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from toolkit.models.split import SPLIT_STYLES
from toolkit.observe.attest.read_fsdp2 import SPLIT_DIMENSIONS, is_shard
from toolkit.observe.attest.readings import Difference, Values
from toolkit.observe.attest.tensors import local, without_adapters
from toolkit.parallel.layout import DIMENSIONS, ParallelLayout

DIMENSION_OF_MESH = {"fsdp": "dp_shard", "efsdp": "expert_shard"}
# Of the norm: the copies are sums of the same numbers, in an order that a GPU may change.
REPLICA_TOLERANCE = 1e-3


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


def replicated_gradient(model: Any, layout: ParallelLayout | None) -> list[float] | None:
    """Return norm and alternating sum of the gradients that tensor parallelism does not divide, before the first step.

    They must be equal on the ranks that split the layers, since each of them steps with its own copy. None where no
    layer is split.
    """
    if layout is None or layout.tp == 1:
        return None
    norm, alternating = 0.0, 0.0
    for parameter in model.parameters():
        if parameter.grad is None or _divides_layers(parameter.grad):
            continue
        held = local(parameter.grad).float().flatten()
        norm = math.hypot(norm, float(held.norm()))
        alternating += float(held[::2].sum() - held[1::2].sum())
    return [norm, alternating]


def _divides_layers(tensor: Any) -> bool:
    placements = getattr(tensor, "placements", ())
    names = tensor.device_mesh.mesh_dim_names if placements else ()
    return any(
        name in SPLIT_DIMENSIONS and is_shard(placement) for name, placement in zip(names, placements, strict=True)
    )


def first_rows_sha256(batches: Sequence[str]) -> str:
    """Return one digest of the batches of a rank's first optimizer step, in their order."""
    return hashlib.sha256("+".join(batches).encode()).hexdigest()


def layout_differences(ranks: Sequence[Mapping[str, Any]], expected: ParallelLayout | None) -> list[Difference]:
    """Return ranks whose group, rows or replicated gradients are not those that the layout gives them.

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
        found += _gradient_difference(reading, ranks[first])
        theirs = ranks[first]["first_rows_sha256"]
        if rows != theirs:
            name = f"first_rows_sha256 (equal to rank {first}'s)"
            found.append(Difference(name=name, rank=rank, expected=theirs, found=rows))
        elif owner_of.setdefault(rows, first) != first:
            name = f"first_rows_sha256 (other than rank {owner_of[rows]}'s)"
            found.append(Difference(name=name, rank=rank, expected="rows of its own", found=rows))
    return found


def _gradient_difference(reading: Mapping[str, Any], first: Mapping[str, Any]) -> list[Difference]:
    own, theirs = reading.get("replicated_gradient"), first.get("replicated_gradient")
    if own is None or theirs is None:
        return []
    if max(abs(mine - other) for mine, other in zip(own, theirs, strict=True)) <= REPLICA_TOLERANCE * theirs[0]:
        return []
    name = f"replicated_gradient (equal to rank {first['rank']}'s)"
    return [Difference(name=name, rank=reading["rank"], expected=theirs, found=own)]


def split_shapes(
    model: Any, layout: ParallelLayout, parameters: Iterable[Any], *, part: str
) -> list[tuple[tuple[int, ...], int]]:
    """Return the whole shape of each parameter, and over how many ranks the layout divides a part of its states.

    From transformers' plans for the architecture, not from the live placements, which are compared with it. Without
    FSDP2 the gradient of the embedding is whole on every rank.
    """
    plain = without_adapters(model)
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    found = []
    for parameter in parameters:
        name = names.get(id(parameter))
        whole = (
            part == "gradient" and layout.data_parallel_size == 1 and parameter is plain.get_input_embeddings().weight
        )
        found.append((tuple(parameter.shape), _divided_by(plain, layout, name) if name and not whole else 1))
    return found


# Which matrix of an adapter is divided as the layer's own weight is.
DIVIDED_FACTOR = {"colwise": "B", "rowwise": "A"}


def _divided_by(plain: Any, layout: ParallelLayout, name: str) -> int:
    layer, _, factor = name.partition(".lora_")
    if factor:  # adapters are attached after `fully_shard`, so only tensor parallelism divides them
        style = _style(plain.tp_plan, f"{layer}.weight") if layout.tp > 1 else None
        return layout.tp if DIVIDED_FACTOR.get(style or "") == factor[0] else 1
    name = name.replace(".base_layer.", ".")
    if layout.ep > 1 and _style(plain.ep_plan, name) is not None:
        return layout.ep * layout.expert_shard
    style = _style(plain.tp_plan, name) if layout.tp > 1 else None
    split = style is not None and style.startswith(SPLIT_STYLES) and not (style == "rowwise" and name.endswith(".bias"))
    return layout.dp_shard * (layout.tp if split else 1)


def _style(plan: Mapping[str, str] | None, name: str) -> str | None:
    """The style of the module's or the parameter's own pattern."""
    module = name.rpartition(".")[0]
    for pattern, style in (plan or {}).items():
        if fnmatchcase(name, pattern) or fnmatchcase(module, pattern):
            return style
    return None


def largest_part(shapes: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """Return the elements that one rank holds at most, with each dimension's rows divided up to a whole number."""
    return sum(
        math.prod(shape) if ranks == 1 else -(-math.prod(shape) // ranks) + _rest(shape, ranks)
        for shape, ranks in shapes
    )


def _rest(shape: tuple[int, ...], ranks: int) -> int:
    """One row more where the first dimension does not divide evenly."""
    return 0 if shape and shape[0] % ranks == 0 else math.prod(shape[1:])

"""A digest of a model's weights that is the same under every sharding, taken where the weights lie.

Each value's bits, as an integer, are multiplied with one odd number per dimension, which its index in the unsharded
tensor gives, and summed modulo 2^64. The sums of a tensor's shards add up to its own, so that a rank of FSDP2 or ZeRO-3
sums its shard, and no weight is sent. Two tensors that differ in one value always have different sums, any others but
by chance. Numbers of an index: the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit.engines.tensors import clean_name, constants, quantized_modules
from toolkit.engines.zero_live import compute_device, gathered, is_on_disk, is_zero3

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Values that are integers of 8 bytes at one time.
CHUNK = 2**18
# SplitMix64's constants, as signed integers.
INCREMENT, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def weights_digest(model: Any, dtype: torch.dtype) -> str:
    """Return a SHA-256 of the names and sums of all parameters, rounded to `dtype`, and of the 4-bit constants.

    Collective: shards are summed where they are; those of a pipeline or an NVMe disk, and what several axes of a mesh
    divide, are gathered, one parameter at a time.
    """
    sums: dict[str, torch.Tensor] = {}
    sharded: dict[dist.ProcessGroup, list[str]] = {}
    for name, total, group in _sums(model, dtype):
        sums[name] = total
        if group is not None:
            sharded.setdefault(group, []).append(name)
    for group, names in sharded.items():
        together = torch.stack([sums[name] for name in names])
        dist.all_reduce(together, group=group)
        sums |= dict(zip(names, together.unbind(), strict=True))
    found = [(name, int(total)) for name, total in sums.items()]
    in_4bit = quantized_modules(model)
    found += [("constants", int(checksum(part))) for module in in_4bit for part in constants(module.quant_state)]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def checksum(values: torch.Tensor, offset: Sequence[int] = ()) -> torch.Tensor:
    """Return the sum of a tensor's bits, int64 without dimensions; `offset` is a shard's first index in each dimension.

    >>> whole = torch.arange(6.0).reshape(2, 3)
    >>> int(checksum(whole)) == int(checksum(whole[:, :2]) + checksum(whole[:, 2:], (0, 2)))
    True
    """
    values = values.detach().contiguous()
    sums = values.view(INTEGERS[values.element_size()])
    starts = offset or [0] * values.dim()
    zero = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.numel():
        return zero
    for dimension in reversed(range(values.dim())):
        rows, totals = sums.reshape(-1, sums.shape[-1]), zero
        for first in range(0, rows.shape[1], CHUNK):
            columns = rows[:, first : first + CHUNK]
            numbers = odd_numbers(starts[dimension] + first, columns.shape[1], dimension, values.device)
            parts = columns.split(max(1, CHUNK // columns.shape[1]))
            totals = totals + torch.cat([(part * numbers).sum(-1) for part in parts])
        sums = totals.reshape(sums.shape[:dimension])
    return sums.to(torch.int64)


def odd_numbers(start: int, size: int, dimension: int, device: torch.device) -> torch.Tensor:
    """Return the odd 64-bit numbers of the indices from `start` on in a dimension. `>>` keeps the sign."""
    index = torch.arange(start, start + size, dtype=torch.int64, device=device)
    number = (index + (dimension << 48)) * INCREMENT
    number = (number ^ (number >> 30)) * FIRST
    number = (number ^ (number >> 27)) * SECOND
    return (number ^ (number >> 31)) | 1


def flat_checksum(values: torch.Tensor, shape: Sequence[int], start: int) -> torch.Tensor:
    """Return the sum of a range of a flattened tensor: `values` without other dimensions, from index `start` on.

    >>> whole = torch.arange(6.0).reshape(2, 3)
    >>> parts = [flat_checksum(whole.flatten()[:2], (2, 3), 0), flat_checksum(whole.flatten()[2:], (2, 3), 2)]
    >>> int(checksum(whole)) == int(sum(parts))
    True
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for block, offset in _blocks(values, shape, start):
        total += checksum(block, offset)
    return total


def _blocks(values: torch.Tensor, shape: Sequence[int], start: int) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Split a range of a flattened tensor into blocks of all its dimensions, each with its first index in them."""
    row = math.prod(shape[1:])
    while len(values):
        if len(shape) <= 1:
            yield (values, [start]) if len(shape) else (values.reshape(()), [])
            return
        index, inside = divmod(start, row)
        size = len(values) // row * row if inside == 0 and len(values) >= row else min(row - inside, len(values))
        if size % row == 0:
            yield values[:size].reshape(-1, *shape[1:]), [index] + [0] * (len(shape) - 1)
        else:
            yield from ((block[None], [index, *offset]) for block, offset in _blocks(values[:size], shape[1:], inside))
        values, start = values[size:], start + size


def _sums(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, dist.ProcessGroup | None]]:
    """Each parameter's sum, in name order; that of a shard with the ranks among which the tensor is divided."""
    if hasattr(model, "whole_weights"):
        yield from ((name, checksum(whole.to(dtype=dtype)), None) for name, whole in model.whole_weights())
        return
    for name, parameter in sorted((clean_name(name), p) for name, p in model.named_parameters()):
        if is_zero3(parameter):
            yield name, *_sum_of_zero3(parameter, dtype)
        elif isinstance(parameter, DTensor):
            yield name, *_sum_of_dtensor(parameter, dtype)
        else:
            yield name, checksum(parameter.data.to(dtype=dtype)), None


def _sum_of_zero3(parameter: Any, dtype: torch.dtype) -> tuple[torch.Tensor, dist.ProcessGroup | None]:
    """This rank's range of the flattened parameter, whose last ranges are padded; the whole if it is not in memory."""
    shard, group = parameter.ds_tensor, parameter.ds_process_group
    if is_on_disk(parameter) or hasattr(shard, "ds_quant_scale"):  # or in 4 or 8 bits of ZeRO's own
        with gathered(parameter):
            return checksum(parameter.data.to(dtype=dtype)), None
    start = dist.get_rank(group) * shard.ds_numel
    own = shard.data[: max(0, parameter.ds_numel - start)]
    on_device = own.to(compute_device())  # where an offloaded shard is summed faster
    return flat_checksum(on_device.to(dtype), parameter.ds_shape, start), group


def _sum_of_dtensor(parameter: DTensor, dtype: torch.dtype) -> tuple[torch.Tensor, dist.ProcessGroup | None]:
    """This rank's shard; the whole where no axis of the mesh divides it, or several: FSDP2 with tensor parallelism."""
    mesh = parameter.device_mesh
    divided = [(axis, each.dim) for axis, each in enumerate(parameter.placements) if not each.is_replicate()]
    if len(divided) != 1:
        return checksum(parameter.full_tensor().to(dtype=dtype)), None
    ((axis, dimension),) = divided
    offset = [0] * parameter.dim()
    rows = -(-parameter.shape[dimension] // mesh.size(axis))  # as torch.chunk divides
    offset[dimension] = rows * mesh.get_local_rank(axis)
    on_device = parameter.to_local().to(mesh.device_type)  # where an offloaded shard is summed faster
    return checksum(on_device.to(dtype=dtype), offset), mesh.get_group(axis)

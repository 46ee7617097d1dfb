"""What ZeRO-Infinity keeps on a disk: counted from DeepSpeed's books, believed only where a swap file holds it.

Between uses the live tensor of a swapped state is empty, so its own size says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALLEST_SWAPPED_BYTES = 2**20  # MIN_AIO_BYTES in deepspeed/runtime/swap_tensor/utils.py


def is_on_disk(parameter: Any) -> bool:
    """Whether this rank's shard of a ZeRO-3 parameter is on a disk at this moment, and not in memory."""
    shard = parameter.ds_tensor
    return getattr(shard, "final_location", None) == "nvme" and shard.status.name == "NOT_AVAILABLE"


def parameter_disk_bytes(parameters: list[Any]) -> int:
    """Bytes of this rank's shards that are on a disk only."""
    return sum(
        _held(
            parameter.nvme_swapper.id_to_path.get(parameter.ds_id),
            parameter.ds_tensor.ds_numel * parameter.element_size(),
        )
        for parameter in parameters
        if is_on_disk(parameter)
    )


def optimizer_disk_bytes(zero: Any) -> int:
    """Bytes of this rank's masters and optimizer states that are on a disk only."""
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return 0
    return sum(
        _held(context.swap_path, info.numel() * swapper.swap_element_size)
        for info in swapper.swap_params_info.values()
        for context in info.tensors
        if not context.compute_tensor.numel()
    )


def swap_buffers(zero: Any) -> list[torch.Tensor]:
    """What swapped optimizer states are read into: their dtype is that of the states."""
    swapper = getattr(zero, "optimizer_swapper", None)
    return [] if swapper is None else list(swapper.swap_buffer_manager.all_buffers)


def swaps_every_large_group(zero: Any) -> bool:
    """Whether each sub-group that DeepSpeed may swap (of 1 MiB and more) is out of memory."""
    masters = zero.fp32_partitioned_groups_flat
    return not any(master.numel() for index, master in enumerate(masters) if zero._swappable_optimizer_subgroup(index))


def swaps_every_large_shard(parameters: list[Any]) -> bool:
    """The same of this rank's parameters; a persistent one is gathered, and its shard is below the limit anyway."""
    return all(is_on_disk(parameter) or not _is_large(parameter) for parameter in parameters)


def _is_large(parameter: Any) -> bool:
    swapper = getattr(parameter, "nvme_swapper", None)
    smallest = SMALLEST_SWAPPED_BYTES if swapper is None else swapper.min_aio_bytes
    return bool(parameter.ds_tensor.ds_numel * parameter.element_size() >= smallest)


def _held(path: str | None, wanted: int) -> int:
    """What is wanted, if the file holds that much (files are padded); otherwise what it holds."""
    file = Path(path or "")
    return min(wanted, file.stat().st_size) if path and file.is_file() else 0

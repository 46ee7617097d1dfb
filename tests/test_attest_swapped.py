"""What is on a disk is believed only where a swap file holds it, and only what is large enough must be there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.train.attest import swapped
from toolkit.train.nvme import buffers

MIB_OF_FLOATS = 2**18


def parameter(path: Path | None, *, numel: int, on_disk: bool) -> Any:
    shard = SimpleNamespace(
        ds_numel=numel,
        final_location="nvme" if on_disk else None,
        status=SimpleNamespace(name="NOT_AVAILABLE" if on_disk else "AVAILABLE"),
    )
    swapper = SimpleNamespace(id_to_path={7: str(path)}, min_aio_bytes=2**20)
    return SimpleNamespace(ds_id=7, ds_tensor=shard, nvme_swapper=swapper, element_size=lambda: 4)


def optimizer(path: Path, *, numel: int, in_memory: bool) -> Any:
    """One sub-group with a master, whose live tensor is empty while it is on the disk."""
    live = torch.zeros(numel if in_memory else 0)
    context = SimpleNamespace(swap_path=str(path), compute_tensor=live)
    info = SimpleNamespace(numel=lambda: numel, tensors=[context])
    return SimpleNamespace(
        optimizer_swapper=SimpleNamespace(swap_params_info={"0": info}, swap_element_size=4),
        fp32_partitioned_groups_flat=[live],
        _swappable_optimizer_subgroup=lambda _index: numel >= MIB_OF_FLOATS,
    )


def file_of(folder: Path, size: int) -> Path:
    path = folder / "7_param.tensor.swp"
    path.write_bytes(bytes(size))
    return path


def test_a_shard_counts_as_far_as_its_file_holds_it(tmp_path: Path) -> None:
    path = file_of(tmp_path, 4096)  # padded: 1,000 floats are 4,000 bytes
    assert swapped.parameter_disk_bytes([parameter(path, numel=1000, on_disk=True)]) == 4000
    assert swapped.parameter_disk_bytes([parameter(path, numel=2000, on_disk=True)]) == 4096
    assert swapped.parameter_disk_bytes([parameter(tmp_path / "gone", numel=1000, on_disk=True)]) == 0
    assert swapped.parameter_disk_bytes([parameter(path, numel=1000, on_disk=False)]) == 0


def test_an_optimizer_state_counts_only_while_it_is_out_of_memory(tmp_path: Path) -> None:
    path = file_of(tmp_path, 4096)
    assert swapped.optimizer_disk_bytes(optimizer(path, numel=1000, in_memory=False)) == 4000
    assert swapped.optimizer_disk_bytes(optimizer(path, numel=1000, in_memory=True)) == 0
    assert swapped.optimizer_disk_bytes(SimpleNamespace()) == 0  # an engine that swaps nothing


def test_only_what_is_large_must_be_out_of_memory(tmp_path: Path) -> None:
    small = parameter(None, numel=MIB_OF_FLOATS - 1, on_disk=False)
    kept = parameter(None, numel=MIB_OF_FLOATS, on_disk=False)
    out = parameter(file_of(tmp_path, 2**20), numel=MIB_OF_FLOATS, on_disk=True)
    assert swapped.swaps_every_large_shard([small, out])
    assert not swapped.swaps_every_large_shard([out, kept])
    assert swapped.swaps_every_large_group(optimizer(tmp_path, numel=100, in_memory=True))
    assert not swapped.swaps_every_large_group(optimizer(tmp_path, numel=MIB_OF_FLOATS, in_memory=True))


def test_a_buffer_holds_the_largest_shard_and_there_is_one_for_each_tensor_gathered_together() -> None:
    assert buffers({"attention": [8, 8, 8, 8], "head": [100]}) == {"buffer_size": 100, "buffer_count": 4}
    assert buffers({"norm": [3]}) == {"buffer_size": 3, "buffer_count": 2}

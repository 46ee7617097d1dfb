"""Swapped states count only as far as a swap file holds them, and only large ones must be swapped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.engines import zero_live

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
    """One sub-group with a master weight, whose live tensor is empty while it is on disk."""
    live = torch.zeros(numel if in_memory else 0)
    context = SimpleNamespace(swap_path=str(path), compute_tensor=live)
    info = SimpleNamespace(numel=lambda: numel, tensors=[context])
    return SimpleNamespace(
        optimizer_swapper=SimpleNamespace(swap_params_info={"0": info}, swap_element_size=4),
        fp32_partitioned_groups_flat=[live],
        _swappable_optimizer_subgroup=lambda _index: numel >= MIB_OF_FLOATS,
    )


def test_swapped_states_count_only_the_bytes_in_their_files_and_only_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "7_param.tensor.swp"
    path.write_bytes(bytes(4096))  # padded: 1,000 floats are 4,000 bytes
    assert zero_live.swapped_parameter_bytes([parameter(path, numel=1000, on_disk=True)]) == 4000
    assert zero_live.swapped_parameter_bytes([parameter(path, numel=2000, on_disk=True)]) == 4096
    assert zero_live.swapped_parameter_bytes([parameter(tmp_path / "gone", numel=1000, on_disk=True)]) == 0
    assert zero_live.swapped_parameter_bytes([parameter(path, numel=1000, on_disk=False)]) == 0
    assert zero_live.swapped_optimizer_bytes(optimizer(path, numel=1000, in_memory=False)) == 4000
    assert zero_live.swapped_optimizer_bytes(optimizer(path, numel=1000, in_memory=True)) == 0
    assert zero_live.swapped_optimizer_bytes(SimpleNamespace()) == 0  # an engine that swaps nothing


def test_only_large_states_must_be_out_of_memory(tmp_path: Path) -> None:
    small = parameter(None, numel=MIB_OF_FLOATS - 1, on_disk=False)
    in_memory = parameter(None, numel=MIB_OF_FLOATS, on_disk=False)
    out = parameter(tmp_path, numel=MIB_OF_FLOATS, on_disk=True)
    assert zero_live.swaps_every_large_shard([small, out])
    assert not zero_live.swaps_every_large_shard([out, in_memory])
    assert zero_live.swaps_every_large_group(optimizer(tmp_path, numel=100, in_memory=True))
    assert not zero_live.swaps_every_large_group(optimizer(tmp_path, numel=MIB_OF_FLOATS, in_memory=True))

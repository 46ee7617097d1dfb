"""The GPU table: lookup by any of a card's names, and figures that are dense, ordered and sourced."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import DTYPES, GPUS, Gpu, custom_gpu, find_gpu, known_gpu, named_or_visible_gpu
from toolkit.units import GIB


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("H200", "h200"),
        ("a100_80gb", "a100-80gb"),
        ("v100-32", "v100-32gb"),
        ("4060-ti-16gb", "rtx-4060-ti-16gb"),
        ("4070 Ti SUPER", "rtx-4070-ti-super"),
        ("6000 ada", "rtx-6000-ada"),
    ],
)
def test_a_gpu_is_found_by_the_name_its_driver_prints(driver_name: str, name: str) -> None:
    assert find_gpu(driver_name).name == name


def test_an_unknown_name_is_refused_with_the_nearest_gpu_and_one_that_means_several_with_all() -> None:
    with pytest.raises(ToolkitError, match=r"unknown GPU 'h10O'(?s:.*)h100-sxm.*--gpu-memory-gib"):
        find_gpu("h10O")
    with pytest.raises(ToolkitError, match="may be a100-40gb or a100-80gb"):
        find_gpu("A100")
    assert known_gpu("NVIDIA P4") is None


@pytest.mark.parametrize(
    "name", ["P100", "H10", "RTX A", "Tesla K80", "hopper", "3080 Ti", "rtx-3090ti", "4080 super", "4070 ti"]
)
def test_a_card_of_another_number_or_family_is_no_guess(name: str) -> None:
    with pytest.raises(ToolkitError, match=r"unknown GPU(?s:.*)hint: For other GPUs"):
        find_gpu(name)
    assert [find_gpu(each).name for each in ("h20", "A800", "RTX 3060")] == ["h20-96gb", "a800-80gb", "rtx-3060"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h20", "h20: 95.0 GiB assumed; with 141 GB `--gpu h20-141gb`"),
        ("rtx 3080", "rtx 3080: 9.8 GiB assumed; with 12 GB `--gpu-memory-gib 12`"),
        ("h20-96", ""),
        ("h20-141gb", ""),
        ("h100", ""),
    ],
)
def test_a_name_of_cards_with_several_memory_sizes_says_which_is_assumed(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named_or_visible_gpu(name)
    assert capsys.readouterr() == ("", f"{said}\n" if said else "")
    assert named_or_visible_gpu(name, has_memory=True) == find_gpu(name)  # another size is given
    assert capsys.readouterr().err == ""


def test_no_two_gpus_share_a_name() -> None:
    names = [name.lower() for gpu in GPUS for name in set(gpu.names)]
    assert len(names) == len(set(names))
    assert len(GPUS) >= 20


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_peaks_are_dense_ordered_and_sourced(gpu: Gpu) -> None:
    fp16, tf32, fp32 = (gpu.peak_flops(dtype) for dtype in DTYPES[1:])
    assert gpu.peak_flops("bf16") in (fp16, None)
    # A tensor core's TF32 rate is half its fp16 rate; a sparse figure among dense ones would double the ratio.
    assert tf32 is None or fp16 / tf32 == pytest.approx(2, rel=0.02)
    assert fp32 <= fp16
    assert gpu.memory_bytes < 300 * GIB
    assert gpu.source


def test_given_numbers_replace_those_of_the_table() -> None:
    gpu = custom_gpu(find_gpu("h100"), memory_gib=40)
    assert gpu.memory_bytes == 40 * GIB
    assert gpu.peak_flops("bf16") == 989.4e12
    alone = custom_gpu(None, memory_gib=24, tflops=100, link_gb_per_second=10)
    assert (alone.peak_flops("bf16"), alone.link_bytes_per_second) == (100e12, 10**10)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"memory_gib": -1}, "--gpu-memory-gib is -1, expected more than 0"), ({"tflops": 10}, "no GPU is named")],
)
def test_given_numbers_out_of_range_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        custom_gpu(None, **given)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An nvidia-smi that knows GPUs of these names; a node that has real ones is left alone."""
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("this node has GPUs of its own")

    def knows(*names: str) -> None:
        listed = "".join(f"echo 'GPU {index}: {name}';" for index, name in enumerate(names))
        described = "".join(f"echo '{name}, 81559, 570.86.15, 700.00, 1980, 2619';" for name in names)
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\nif [ "$1" = "-L" ]; then {listed or ":;"} else {described or ":;"} fi\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return knows


def test_without_a_name_the_gpu_is_this_nodes_if_it_has_one_kind(nvidia_smi: Callable[..., None]) -> None:
    for names in ([], ["NVIDIA H100 80GB HBM3", "Tesla T4"]):
        nvidia_smi(*names)
        found = f"this node has {', '.join(names)}" if names else "no GPU is visible on this node"
        with pytest.raises(ToolkitError, match=f"--gpu is missing, and {found}"):
            named_or_visible_gpu(None)
    nvidia_smi(*["NVIDIA H100 80GB HBM3"] * 8)
    assert named_or_visible_gpu(None) == find_gpu("h100-sxm")
    assert named_or_visible_gpu("t4") == find_gpu("t4")
    assert named_or_visible_gpu(None, has_memory=True) is None


@pytest.mark.parametrize(
    ("name", "size"),
    [("h100", 32 * 2**20), ("b200", 32 * 2**20), ("rtx-5090", 32 * 2**20), ("a100-80gb", 8_519_680), ("t4", 8_519_680),
     ("mi300x", 128 * 2**20), ("mi250x", 32 * 2**20)],
)  # fmt: skip
def test_a_handle_of_cublas_has_the_workspace_that_torch_gives_it_on_the_gpu(name: str, size: int) -> None:
    assert find_gpu(name).blas_workspace_bytes == size
    assert custom_gpu(None, memory_gib=24).blas_workspace_bytes == 0

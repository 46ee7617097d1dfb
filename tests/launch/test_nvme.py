"""The checks of NVMe offload before any rank starts."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware import disks
from toolkit.hardware.disks import Mount
from toolkit.job.job import Job
from toolkit.launch import nvme
from toolkit.presets import load_preset

PRESET = "zero3_nvme_offload"


def safetensors(path: Path, **shapes: list[int]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,010 parameters in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    safetensors(folder / "model-1.safetensors", embedding=[100, 10])
    safetensors(folder / "model-2.safetensors", norm=[10])
    return folder


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has libaio and the compiled op."""
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: "libaio.so.1")
    monkeypatch.setattr(nvme, "are_compiled", lambda _ops: True)


def check(path: Path | None, model: Path, preset: str = PRESET, **arguments: Any) -> nvme.NvmeDisk | None:
    given = {"model_name_or_path": str(model), **arguments}
    named = None if path is None else str(path)
    return nvme.check_nvme(load_preset(preset), nvme_path=named, job=Job.from_values(given), cpu=True)


def refusal(path: Path | None, model: Path) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        check(path, model)
    assert caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


def test_without_a_disk_the_error_names_the_flag_and_the_variable(model: Path) -> None:
    error = refusal(None, model)
    assert error.message == "preset 'zero3_nvme_offload' offloads to a local disk, and none is given"
    assert error.hint == "`toolkit train --nvme-path DIR`, or TOOLKIT_NVME_PATH=DIR in the environment"


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere
    assert refusal(tmp_path, model).message == f"--nvme-path {tmp_path} cannot be written"


@pytest.mark.parametrize(
    ("mount", "why"),
    [
        (Mount(filesystem="tmpfs", mount_point="/dev/shm"), "is on tmpfs (/dev/shm): memory, not a disk"),
        (Mount(filesystem="nfs4", mount_point="/home"), "is on nfs4 (/home): not a local disk"),
    ],
)
def test_memory_and_networks_are_refused(
    mount: Mount, why: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "mount_of", lambda _path: mount)
    assert refusal(tmp_path, model).message == f"--nvme-path {tmp_path} {why}"


def test_a_disk_without_direct_io_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(nvme, "try_direct_io", refuse)
    expected = f"--nvme-path {tmp_path} takes no direct I/O (O_DIRECT): Invalid argument"
    assert refusal(tmp_path, model).message == expected


def test_a_disk_without_enough_space_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "free_bytes", lambda _path: 1000)
    error = refusal(tmp_path, model)
    assert "0.0 MiB free, the swap files need about 0.0 MiB" in error.message


def test_without_libaio_the_error_says_what_to_install(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: None)
    error = refusal(tmp_path, model)
    assert error.message == "libaio is not installed; NVMe offload reads and writes through it"
    assert error.hint == "apt-get install libaio-dev"


def test_without_async_io_the_error_says_how_to_compile_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: "libaio.so.1")
    monkeypatch.setattr(nvme, "are_compiled", lambda _ops: False)
    error = refusal(tmp_path, model)
    assert error.message == "DeepSpeed's async_io is not compiled; NVMe offload needs it"
    assert error.hint == "python -m toolkit.doctor.ops --async-io"


@pytest.mark.usefixtures("libraries")
def test_a_valid_disk_passes_with_its_facts(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PROBE_BYTES", 8 * 2**20)
    disk = check(tmp_path, model)
    assert disk is not None
    facts = disk.facts()
    assert facts["path"] == str(tmp_path)
    assert list(facts) == [
        *("path", "filesystem", "write_bytes_per_second", "read_bytes_per_second", "free_bytes", "needed_bytes")
    ]
    assert facts["needed_bytes"] == 1010 * (12 + 4 + 4)


def test_the_size_of_swap_files_depends_on_the_device_and_on_lora(model: Path) -> None:
    preset, arguments = load_preset(PRESET), {"model_name_or_path": str(model)}
    assert nvme.needed_bytes(preset, Job.from_values(arguments), cpu=True) == 1010 * (12 + 4 + 4)
    assert nvme.needed_bytes(preset, Job.from_values(arguments), cpu=False) == 1010 * (12 + 4 + 2)
    assert nvme.needed_bytes(preset, Job.from_values(arguments | {"lora_r": "8"}), cpu=False) == 1010 * 2
    assert nvme.needed_bytes(preset, Job(model_name_or_path="owner/name"), cpu=False) is None


def test_damaged_weights_are_refused_before_their_size_is_used(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ToolkitError, match="is damaged"):
        nvme.needed_bytes(load_preset(PRESET), Job(model_name_or_path=str(model)), cpu=True)


def test_a_low_limit_on_locked_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "locked_memory_limit_bytes", lambda: 8 * 2**20)
    (warning,) = nvme.locked_memory_warnings()
    assert warning.startswith("warning: only 8.0 MiB may be locked in memory")
    monkeypatch.setattr(nvme, "locked_memory_limit_bytes", lambda: None)
    assert nvme.locked_memory_warnings() == ()

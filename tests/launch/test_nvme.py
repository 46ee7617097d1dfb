"""The checks of NVMe offload before any rank starts."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.errors import ToolkitError
from toolkit.hardware import disks
from toolkit.hardware.disks import Mount
from toolkit.job.job import Job
from toolkit.launch import nvme
from toolkit.launch.resume import TrainingRun
from toolkit.presets import load_preset

PRESET = "zero3_nvme_offload"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,010 parameters in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number, shape in enumerate([(100, 10), (10,)], start=1):
        save_file({f"weight{number}": np.zeros(shape, np.float32)}, folder / f"model-{number}.safetensors")
    return folder


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has libaio and the compiled op."""
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: "libaio.so.1")
    monkeypatch.setattr(nvme, "are_compiled", lambda _ops: True)


def check(path: Path | None, model: Path, preset: str = PRESET, **arguments: Any) -> nvme.NvmeDisk | None:
    given = {"model_name_or_path": str(model), **arguments}
    named = None if path is None else str(path)
    run = TrainingRun(preset=load_preset(preset), job=Job.from_values(given), num_processes=2, nvme_path=named)
    return nvme.check_nvme(run)


def no_direct_io(_path: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


NVME = "toolkit.launch.nvme"
ON_TMPFS = Mount(filesystem="tmpfs", mount_point="/dev/shm")
ON_NFS = Mount(filesystem="nfs4", mount_point="/home")
# What the node is like -> the message after the folder's name, and the hint.
REFUSALS: list[tuple[str, Any, str, str]] = [
    ("os.access", lambda *_: False, "cannot be written", "name a folder that you can write to"),
    (f"{NVME}.mount_of", lambda _: ON_TMPFS, "is on tmpfs (/dev/shm): memory, not a disk", "name a folder"),
    (f"{NVME}.mount_of", lambda _: ON_NFS, "is on nfs4 (/home): not a local disk", "name a folder"),
    (f"{NVME}.try_direct_io", no_direct_io, "takes no direct I/O (O_DIRECT): Invalid", "name a folder"),
    (f"{NVME}.free_bytes", lambda _: 1000, "has 0.0 MiB free, the swap files need about", "name a folder"),
    ("ctypes.util.find_library", lambda _: None, "libaio is not installed", "apt-get install libaio-dev"),
    (f"{NVME}.are_compiled", lambda _: False, "DeepSpeed's async_io is not compiled", "python -m toolkit.doctor.ops"),
]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("name", "answer", "message", "hint"), REFUSALS)
def test_a_disk_or_a_node_that_cannot_offload_is_refused(
    name: str, answer: Any, message: str, hint: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, answer)
    with pytest.raises(ToolkitError) as caught:
        check(tmp_path, model)
    assert caught.value.message.removeprefix(f"--nvme-path {tmp_path} ").startswith(message)
    assert str(caught.value.hint).startswith(hint)


def test_without_a_disk_the_error_names_the_flag_and_the_variable(model: Path) -> None:
    with pytest.raises(ToolkitError, match="preset 'zero3_nvme_offload' offloads to a local disk, and none") as caught:
        check(None, model)
    assert caught.value.hint == "`toolkit train --nvme-path DIR`, or TOOLKIT_NVME_PATH=DIR in the environment"


@pytest.mark.usefixtures("libraries")
def test_a_valid_disk_passes_with_its_facts(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PROBE_BYTES", 8 * 2**20)
    disk = check(tmp_path, model)
    assert disk is not None
    rates = ["write_bytes_per_second", "read_bytes_per_second"]
    assert list(disk.facts()) == ["path", "filesystem", *rates, "free_bytes", "needed_bytes"]
    assert (disk.facts()["path"], disk.needed_bytes) == (str(tmp_path), 1010 * (12 + 4 + 4))


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

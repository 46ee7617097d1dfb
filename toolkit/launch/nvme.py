"""NVMe offload: the checks of the disk before any rank starts, its measured rates, and the swap folder of each run.

>>> swap_folder(Path("/nvme"), "f00d").name
'finetune-toolkit-f00d'

The checks, in their order: the folder, its file system, direct I/O, free space, libaio, DeepSpeed's `async_io`.
"""

import ctypes.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.engines.compiled_ops import ASYNC_IO_MISSING, ASYNC_IO_OPS, COMPILE_ASYNC_IO, INSTALL_LIBAIO, are_compiled
from toolkit.engines.zero import nvme_blocks
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import read_header
from toolkit.files.paths import user_path
from toolkit.hardware.disks import DiskRates, free_bytes, measure_rates, mount_of, try_direct_io
from toolkit.hardware.node import locked_memory_limit_bytes
from toolkit.job.job import Job
from toolkit.launch.command import NVME_PATH_VARIABLE
from toolkit.launch.resume import TrainingRun
from toolkit.presets.spec import PresetSpec
from toolkit.units import gib

NVME_PATH_HINT = f"`toolkit train --nvme-path DIR`, or {NVME_PATH_VARIABLE}=DIR in the environment"
# Bytes on disk for each trained parameter, fp32: master, momentum and variance; and the gradient on its way to them.
OPTIMIZER_BYTES = 12
GRADIENT_BYTES = 4
PARAM_BYTES_GPU, PARAM_BYTES_CPU = 2, 4  # the parameter itself, in the compute dtype
# DeepSpeed locks its I/O buffers in memory. Below this limit even the smallest useful buffers fail.
LOCKED_BYTES_AT_LEAST = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeDisk:
    """The disk that a run offloads to, as run.json records it."""

    path: Path
    filesystem: str
    free_bytes: int
    needed_bytes: int | None  # size of the swap files; None for a model whose size is not known here (a hub id)
    rates: DiskRates
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line about the disk."""
        rates = f"writes {gib(self.rates.write_bytes_per_second)}/s, reads {gib(self.rates.read_bytes_per_second)}/s"
        return f"offloading to {self.path} ({self.filesystem}): {gib(self.free_bytes)} free, {rates}"

    def facts(self) -> dict[str, Any]:
        """Return the values under `nvme` in run.json."""
        sizes = {"free_bytes": self.free_bytes, "needed_bytes": self.needed_bytes}
        return {"path": str(self.path), "filesystem": self.filesystem, **asdict(self.rates), **sizes}


def check_nvme(run: TrainingRun) -> NvmeDisk | None:
    """Check the disk and measure its rates; None without NVMe offload. Raises ToolkitError for a problem."""
    path, on_cpu = nvme_path_of(run.preset, run.nvme_path), run.device.type == "cpu"
    if path is None:
        return None
    check_folder(path)
    filesystem = check_filesystem(path)
    check_direct_io(path)
    needed = needed_bytes(run.preset, run.job, cpu=on_cpu)
    free = free_bytes(path)
    if needed is not None and free < needed:
        raise ToolkitError(
            f"--nvme-path {path} has {gib(free)} free, the swap files need about {gib(needed)}",
            hint="name a folder on a larger disk, or train adapters: `--lora_r 16`",
        )
    check_libaio()
    if on_cpu and not are_compiled(ASYNC_IO_OPS):  # on a GPU DeepSpeed compiles it against CUDA, when it is first used
        raise ToolkitError(f"{ASYNC_IO_MISSING}; NVMe offload needs it", hint=COMPILE_ASYNC_IO)
    return NvmeDisk(
        path=path,
        filesystem=filesystem,
        free_bytes=free,
        needed_bytes=needed,
        rates=measure_rates(path),
        warnings=locked_memory_warnings(),
    )


def nvme_path_of(preset: PresetSpec, given: str | None) -> Path | None:
    """Return the disk that a preset offloads to, None for none. Raises ToolkitError if none is given, or is fixed."""
    blocks = nvme_blocks(preset.zero_block)
    if not blocks:
        return None
    for name, block in blocks.items():
        if block.get("nvme_path") != "auto":
            raise ToolkitError(
                f"preset {preset.name!r}: {name}.nvme_path is {block.get('nvme_path')!r}, expected 'auto'",
                hint=f'write `"nvme_path": "auto"`, and give the disk at launch: {NVME_PATH_HINT}',
            )
    if not given:
        raise ToolkitError(f"preset {preset.name!r} offloads to a local disk, and none is given", hint=NVME_PATH_HINT)
    return user_path(given).absolute()


def check_libaio() -> None:
    """Check for the library that DeepSpeed reads and writes through."""
    if ctypes.util.find_library("aio") is None:
        raise ToolkitError("libaio is not installed; NVMe offload reads and writes through it", hint=INSTALL_LIBAIO)


def check_folder(path: Path) -> None:
    """Check that the path is a writable folder."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ToolkitError(f"--nvme-path {path} {what}", hint=f"name a folder on a local disk, or `mkdir -p {path}`")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ToolkitError(f"--nvme-path {path} cannot be written", hint="name a folder that you can write to")


def check_filesystem(path: Path) -> str:
    """Return the name of the file system, which must be a local disk's."""
    mount = mount_of(path)
    if mount is None:
        return "unknown"
    if mount.kind != "local":
        why = "memory, not a disk" if mount.kind == "memory" else "not a local disk"
        hint = "name a folder on a local NVMe disk; `lsblk` lists them"
        raise ToolkitError(f"--nvme-path {path} is on {mount.filesystem} ({mount.mount_point}): {why}", hint=hint)
    return mount.filesystem


def check_direct_io(path: Path) -> None:
    """Check direct I/O by writing a block past the page cache."""
    try:
        try_direct_io(path)
    except OSError as error:
        hint = "name a folder on a local NVMe disk with ext4 or xfs"
        raise ToolkitError(f"--nvme-path {path} takes no direct I/O (O_DIRECT): {error.strerror}", hint=hint) from None


def needed_bytes(preset: PresetSpec, job: Job, *, cpu: bool) -> int | None:
    """Return the size of all ranks' swap files, an upper bound: small tensors that stay in memory are counted too."""
    model = Path(str(job.model_name_or_path))
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if not files:
        return None
    params = sum(tensor.elements for file in files for tensor in read_header(file).values())
    blocks = nvme_blocks(preset.zero_block)
    trained = 0 if job.is_lora else params  # adapters are small beside their base
    optimizer = trained * (OPTIMIZER_BYTES + GRADIENT_BYTES) if "offload_optimizer" in blocks else 0
    held = params * (PARAM_BYTES_CPU if cpu else PARAM_BYTES_GPU) if "offload_param" in blocks else 0
    return optimizer + held


def locked_memory_warnings() -> tuple[str, ...]:
    """Return a warning for a `ulimit -l` too low for DeepSpeed's buffers."""
    limit = locked_memory_limit_bytes()
    if limit is None or limit >= LOCKED_BYTES_AT_LEAST:
        return ()
    return (
        f"warning: only {gib(limit)} may be locked in memory, and NVMe offload locks its buffers: "
        "`ulimit -l unlimited`",
    )


def swap_folder(nvme_path: Path, run_id: str) -> Path:
    """Return the folder of one run's swap files, never shared: DeepSpeed empties it when it starts."""
    return nvme_path / f"finetune-toolkit-{run_id}"

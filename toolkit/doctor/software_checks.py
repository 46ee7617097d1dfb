"""Checks of what is installed: CUDA and torch, NCCL, optional packages, compilers, DeepSpeed's ops."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from toolkit.cache import check_extensions_folder, extensions_folder
from toolkit.doctor.checks import ERROR, NOTE, WARNING, NodeReadings, Outcome, node_check
from toolkit.doctor.environment_report import NCCL_PACKAGES, compiled_ops, compiler_versions, driver_cuda_version
from toolkit.doctor.node_packages import find_nvcc, left_out
from toolkit.doctor.ops import CPU_OPS, check_compiler
from toolkit.errors import ToolkitError
from toolkit.hardware.node import library_versions
from toolkit.versions import installed_version, torch_cuda_version, version_numbers


@node_check("one is not installed", "pyproject.toml")
def libraries(_: NodeReadings, outcome: Outcome) -> None:
    """The libraries that every run imports."""
    outcome.measured = dict(library_versions())
    if missing := [name for name, version in outcome.measured.items() if version is None]:
        packages = " ".join(name for name in missing if name != "finetune-toolkit")
        fix = f"make setup   (in the clone, then `source .venv/bin/activate`), or pip install {packages}"
        outcome.add(ERROR, "libraries are not installed", ", ".join(missing), "installed", fix)


@node_check(
    "a CPU build on a node with GPUs; torch's major version above the driver's: an error; its minor: a note",
    "https://docs.nvidia.com/deploy/cuda-compatibility/ (minor version compatibility)",
)
def cuda(node: NodeReadings, outcome: Outcome) -> None:
    """CUDA that torch was built with, and the newest that the driver supports."""
    torch, built, driver = installed_version("torch"), torch_cuda_version(), driver_cuda_version()
    outcome.measured = {"torch": torch, "built_for": built, "driver_supports": driver}
    if torch is not None and built is None and node.has_gpu:
        what, expected = "torch is a CPU build: no GPU would be used", f"a build for CUDA {driver or 'of the driver'}"
        outcome.add(ERROR, what, "CPU", expected, "make clean setup, without an index of CPU builds in TORCH_PIP_ARGS")
    elif built and driver and version_numbers(built)[:2] > version_numbers(driver)[:2]:
        newer = version_numbers(built)[0] > version_numbers(driver)[0]
        what = "the driver is older than torch's CUDA" + ("" if newer else "; minor versions are compatible")
        fix = f"update the driver, or install a torch built for CUDA {driver} (TORCH_PIP_ARGS)"
        outcome.add(ERROR if newer else NOTE, what, f"CUDA {driver}", f"CUDA {built} or newer", fix)


@node_check(
    "two packages; another library comes first",
    "torch loads the one of its package: https://docs.nvidia.com/deeplearning/nccl/release-notes/",
)
def nccl(_: NodeReadings, outcome: Outcome) -> None:
    """NCCL's package, and another NCCL on LD_LIBRARY_PATH."""
    packages = {name: version for name in NCCL_PACKAGES if (version := installed_version(name))}
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    others = [str(path) for folder in folders for path in sorted(Path(folder).glob("libnccl.so*"))]
    outcome.measured = {"packages": packages, "on_library_path": others}
    installed = ", ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        keep = f"nvidia-nccl-cu{(torch_cuda_version() or '12').partition('.')[0]}"
        fix = f"pip uninstall {' '.join(set(packages) - {keep})} && pip install --force-reinstall --no-deps {keep}"
        outcome.add(WARNING, "two NCCL packages overwrite each other's files", installed, keep, fix)
    if others:
        what = "another NCCL on LD_LIBRARY_PATH may replace the one of torch"
        fix = "remove its folder from LD_LIBRARY_PATH, unless the provider asks for it"
        outcome.add(WARNING, what, others[0], installed or "torch's own", fix)


@node_check(
    "one is missing: a warning on a node with GPUs, else a note",
    "what `make setup` leaves out (`toolkit/doctor/node_packages.py`)",
)
def packages(node: NodeReadings, outcome: Outcome) -> None:
    """Optional packages that this node could use: Liger, bitsandbytes, NVML's library, nvcc."""
    parts, level = left_out(), WARNING if node.has_gpu else NOTE
    outcome.measured = {"left_out": [part.part for part in parts]}
    for part in parts:
        outcome.add(level, f"{part.part}: {part.reason}", "not installed", "installed, if a run uses it", part.add)


@node_check(
    "no compiler or headers: an error; no ninja; an nvcc of another major version than torch's CUDA",
    "DeepSpeed accepts other minor versions only: "
    "https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/builder.py (assert_no_cuda_mismatch)",
)
def compilers(_: NodeReadings, outcome: Outcome) -> None:
    """The C++ compiler and Python's headers, ninja, and nvcc against torch's CUDA."""
    versions, nvcc, built = compiler_versions(), find_nvcc(), torch_cuda_version()
    outcome.measured = versions | {"nvcc_path": str(nvcc) if nvcc else None}
    try:
        check_compiler()
    except ToolkitError as error:
        outcome.add_refusal(error, "missing", "a C++ compiler with Python's headers")
    if versions["ninja"] is None and shutil.which("ninja") is None and installed_version("ninja") is None:
        outcome.add(WARNING, "DeepSpeed's ops need ninja to be compiled", "missing", "installed", "pip install ninja")
    release = re.search(r"release (\d+)\.\d+", versions["nvcc"] or "")
    if release and built and release[1] != built.partition(".")[0]:
        what = "nvcc is of another CUDA than torch: DeepSpeed's CUDA ops do not compile"
        outcome.add(WARNING, what, release[0], built, f"export CUDA_HOME=/usr/local/cuda-{built}")


@node_check(
    "not compiled: a note, since the first run compiles them; writable by others: an error", "docs/concepts/security.md"
)
def ops(_: NodeReadings, outcome: Outcome) -> None:
    """DeepSpeed's compiled CPU ops, and who may write them."""
    compiled = compiled_ops()
    outcome.measured = {"folder": str(extensions_folder()), **compiled}
    try:
        check_extensions_folder()
    except ToolkitError as error:
        outcome.add_refusal(error, "writable by others", "writable by you only")
    if missing := [op for op in CPU_OPS if not compiled.get(op, True)]:
        what = "DeepSpeed's CPU ops are not compiled: the first run of each rank waits for it"
        outcome.add(NOTE, what, ", ".join(missing), "compiled once, before the job", "python -m toolkit.doctor.ops")

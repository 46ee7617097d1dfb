"""Checks of what is installed: CUDA and torch, NCCL, optional packages, compilers, DeepSpeed's ops."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from toolkit.cache import check_extensions_folder, extensions_folder
from toolkit.doctor.checks import ERROR, NOTE, WARNING, NodeFinding, Outcome, finding_of, node_check
from toolkit.doctor.collectors import compiled_ops, compiler_versions, driver_cuda_version
from toolkit.doctor.node_packages import find_nvcc, left_out
from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.ops import check_compiler
from toolkit.errors import ToolkitError
from toolkit.hardware.node import LIBRARIES, library_versions
from toolkit.versions import installed_version, torch_cuda_version, version_numbers

COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"
NCCL_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@node_check(
    "libraries",
    looks_at="the libraries that every run imports",
    threshold="one is not installed",
    source="pyproject.toml",
)
def libraries(_: NodeReadings) -> Outcome:
    """Find an incomplete installation."""
    versions = library_versions()
    missing = [name for name in LIBRARIES if versions[name] is None]
    found = NodeFinding(
        level=ERROR,
        what="libraries are not installed",
        value=", ".join(missing),
        expected="installed",
        fix="make setup   (in the clone), and activate its environment: `source .venv/bin/activate`",
    )
    return Outcome(measured=dict(versions), findings=(found,) if missing else ())


@node_check(
    "cuda",
    looks_at="CUDA that torch was built with, and the newest that the driver supports",
    threshold="a CPU build on a node with GPUs; torch's major version above the driver's: an error; its minor: a note",
    source=f"{COMPATIBILITY} (minor version compatibility)",
)
def cuda(node: NodeReadings) -> Outcome:
    """Find a torch that this driver does not run."""
    built = torch_cuda_version()
    driver = node.gpu_query.cuda if node.gpu_query else driver_cuda_version()
    measured = {"torch": installed_version("torch"), "built_for": built, "driver_supports": driver}
    return Outcome(measured=measured, findings=tuple(cuda_findings(built, driver, has_gpu=node.has_gpu)))


def cuda_findings(built: str | None, driver: str | None, *, has_gpu: bool) -> list[NodeFinding]:
    """Return what is wrong with torch's build for CUDA `built` under a driver for CUDA up to `driver`."""
    if built is None and has_gpu:
        return [
            NodeFinding(
                level=ERROR,
                what="torch is a CPU build: no GPU would be used",
                value="CPU",
                expected=f"a build for CUDA {driver or 'of the driver'}",
                fix="make clean setup, without an index of CPU builds in TORCH_PIP_ARGS",
            )
        ]
    if built is None or driver is None or version_numbers(built)[:2] <= version_numbers(driver)[:2]:
        return []
    newer = version_numbers(built)[0] > version_numbers(driver)[0]
    return [
        NodeFinding(
            level=ERROR if newer else NOTE,
            what="the driver is older than torch's CUDA" + ("" if newer else "; minor versions are compatible"),
            value=f"CUDA {driver}",
            expected=f"CUDA {built} or newer",
            fix=f"update the driver, or install a torch built for CUDA {driver} (TORCH_PIP_ARGS)",
        )
    ]


@node_check(
    "nccl",
    looks_at="NCCL's package, and another NCCL on LD_LIBRARY_PATH",
    threshold="two packages; another library comes first",
    source="torch loads the one of its package: https://docs.nvidia.com/deeplearning/nccl/release-notes/",
)
def nccl(_: NodeReadings) -> Outcome:
    """Find an NCCL that is not the one that torch was tested with."""
    packages = {name: version for name in NCCL_PACKAGES if (version := installed_version(name))}
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    others = [str(path) for folder in folders for path in sorted(folder.glob("libnccl.so*"))]
    found = []
    if len(packages) > 1:
        found.append(_two_ncclls(packages))
    if others:
        found.append(
            NodeFinding(
                level=WARNING,
                what="another NCCL on LD_LIBRARY_PATH may replace the one of torch",
                value=others[0],
                expected=", ".join(f"{name} {version}" for name, version in packages.items()) or "torch's own",
                fix="remove its folder from LD_LIBRARY_PATH, unless the provider asks for it",
            )
        )
    return Outcome(measured={"packages": packages, "on_library_path": others}, findings=tuple(found))


def _two_ncclls(packages: dict[str, str]) -> NodeFinding:
    keep = f"nvidia-nccl-cu{(torch_cuda_version() or '12').partition('.')[0]}"
    return NodeFinding(
        level=WARNING,
        what="two NCCL packages overwrite each other's files",
        value=", ".join(f"{name} {version}" for name, version in packages.items()),
        expected=keep,
        fix=f"pip uninstall {' '.join(set(packages) - {keep})} && pip install --force-reinstall --no-deps {keep}",
    )


@node_check(
    "packages",
    looks_at="optional packages that this node could use: Liger, bitsandbytes, NVML's library, nvcc",
    threshold="one is missing: a warning on a node with GPUs, else a note",
    source="what `make setup` leaves out (`toolkit/doctor/node_packages.py`)",
)
def packages(node: NodeReadings) -> Outcome:
    """Find parts that are not installed."""
    parts = left_out()
    found = [
        NodeFinding(
            level=WARNING if node.has_gpu else NOTE,
            what=f"{part.part}: {part.reason}",
            value="not installed",
            expected="installed, if a run uses it",
            fix=part.add or "nothing",
        )
        for part in parts
    ]
    return Outcome(measured={"left_out": [part.part for part in parts]}, findings=tuple(found))


@node_check(
    "compilers",
    looks_at="the C++ compiler and Python's headers, ninja, and nvcc against torch's CUDA",
    threshold="no compiler or headers: an error; no ninja; an nvcc of another major version than torch's CUDA",
    source="DeepSpeed accepts other minor versions only: "
    "https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/builder.py (assert_no_cuda_mismatch)",
)
def compilers(_: NodeReadings) -> Outcome:
    """Find what DeepSpeed's ops and torch.compile would fail on."""
    versions = compiler_versions(os.environ)
    found = []
    try:
        check_compiler()
    except ToolkitError as error:
        found.append(finding_of(error, level=ERROR, value="missing", expected="a C++ compiler with Python's headers"))
    if versions["ninja"] is None and shutil.which("ninja") is None and installed_version("ninja") is None:
        found.append(
            NodeFinding(
                level=WARNING,
                what="ninja is missing: DeepSpeed's ops are not compiled",
                value="missing",
                expected="installed",
                fix="pip install ninja",
            )
        )
    found += nvcc_findings(versions["nvcc"], torch_cuda_version())
    nvcc = find_nvcc()
    return Outcome(measured=versions | {"nvcc_path": str(nvcc) if nvcc else None}, findings=tuple(found))


def nvcc_findings(nvcc: str | None, built: str | None) -> list[NodeFinding]:
    """Return what is wrong with nvcc's version line for torch's build for CUDA `built`."""
    version = re.search(r"release (\d+)\.(\d+)", nvcc or "")
    if version is None or built is None or version[1] == built.partition(".")[0]:
        return []
    return [
        NodeFinding(
            level=WARNING,
            what="nvcc is of another CUDA than torch: DeepSpeed's CUDA ops do not compile",
            value=f"{version[1]}.{version[2]}",
            expected=built,
            fix=f"export CUDA_HOME=/usr/local/cuda-{built}",
        )
    ]


@node_check(
    "ops",
    looks_at="DeepSpeed's compiled CPU ops, and who may write them",
    threshold="not compiled: a note, since the first run compiles them; writable by others: an error",
    source="docs/concepts/security.md",
)
def ops(_: NodeReadings) -> Outcome:
    """Find ops that the first run would compile, or that another user could replace."""
    compiled, found = compiled_ops(), []
    try:
        check_extensions_folder()
    except ToolkitError as error:
        found.append(finding_of(error, level=ERROR, value="writable by others", expected="writable by you only"))
    missing = [op for op in ("deepspeed_shm_comm", "cpu_adam") if not compiled.get(op, True)]
    if missing:
        found.append(
            NodeFinding(
                level=NOTE,
                what="DeepSpeed's CPU ops are not compiled: the first run of each rank waits for it",
                value=", ".join(missing),
                expected="compiled once, before the job",
                fix="python -m toolkit.doctor.ops",
            )
        )
    return Outcome(measured={"folder": str(extensions_folder()), **compiled}, findings=tuple(found))

"""Optional packages that this node can use: what is missing, why, and the line that adds it.

    python -m toolkit.doctor.node_packages            # what `make setup` left out, on stderr
    python -m toolkit.doctor.node_packages --extras   # the extras that this node needs and does not have

NVMe offload is reported by `toolkit.doctor.ops`, which compiles it.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import EXIT_INVALID_INPUT
from toolkit.hardware.gpus import installed_gpus
from toolkit.installation import install_line
from toolkit.versions import installed_version, is_importable, torch_cuda_version

# Module -> what it is for; the extra `gpu` installs all of them.
GPU_PACKAGES = {
    "bitsandbytes": "QLoRA and 8-bit optimizers",
    "liger_kernel": "--use_liger_kernel",
    "pynvml": "energy, throttling and the GPU memory of a process",
}
INSTALL_CUDA_BUILD = "pip install --force-reinstall torch   (from an index of CUDA builds)"


class LeftOut(NamedTuple):
    """A part that is not installed."""

    part: str
    reason: str
    add: str  # the line that adds it


def left_out() -> list[LeftOut]:
    """Return the parts that are not installed here, with the reason for each."""
    has_gpu, parts = bool(installed_gpus()), []
    missing = [f"{module} ({purpose})" for module, purpose in GPU_PACKAGES.items() if not is_importable(module)]
    if missing:
        reason = "they are not installed" if has_gpu else "there is no NVIDIA GPU here"
        parts.append(LeftOut(f"GPU packages: {'; '.join(missing)}", reason, install_line(*GPU_PACKAGES)))
    if has_gpu and installed_version("torch") and torch_cuda_version() is None:
        reason = f"torch {installed_version('torch')} is a CPU build, so no GPU would be used"
        parts.append(LeftOut("CUDA", reason, INSTALL_CUDA_BUILD))
    if has_gpu and find_nvcc() is None:
        toolkit = f"the CUDA toolkit {torch_cuda_version() or ''}".strip()
        add = f"install {toolkit} (https://developer.nvidia.com/cuda-downloads), then export CUDA_HOME=/usr/local/cuda"
        parts.append(LeftOut("DeepSpeed's own CUDA kernels (preset zeropp, fused optimizers)", "there is no nvcc", add))
    return parts


def find_nvcc() -> Path | None:
    """Return CUDA's compiler, looked for where torch looks: CUDA_HOME, PATH, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    first = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or ""
    return next((path for path in map(Path, (first, "/usr/local/cuda/bin/nvcc")) if path.is_file()), None)


def main(argv: Sequence[str] = ()) -> int:
    """Print the extras that this node can use and does not have, or what is left out; return the exit code."""
    if list(argv) not in ([], ["--extras"]):
        print("error: the only option is --extras", file=sys.stderr)
        return EXIT_INVALID_INPUT
    if argv:
        print("gpu" if installed_gpus() and not all(map(is_importable, GPU_PACKAGES)) else "")
    for part in [] if argv else left_out():
        print(f"left out: {part.part}: {part.reason}\n  to add it: {part.add}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""GPUs as their vendors specify them: memory, dense peaks, bandwidth, interconnect, power; and lookup by name.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name
    'h100-sxm'

Peaks are dense, in TFLOP/s with fp32 accumulation; where a data sheet gives a peak with sparsity only, it is halved.
Memory is the smallest total that torch reports for the card in public out-of-memory messages: drivers differ by up to
0.5 GiB, and all report less than the label. Interconnect rates are for one direction, all links of a GPU together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.errors import ToolkitError, nearest
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.units import GIB

TERA = 10**12
GIGA = 10**9
PCIE_BYTES_PER_SECOND = {3: 16 * GIGA, 4: 31 * GIGA, 5: 63 * GIGA}  # 16 lanes, one direction
DTYPES = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as torch sees it: a card with two chips is two of these."""

    name: str
    aliases: tuple[str, ...]
    """Names in nvidia-smi, rocm-smi and torch, and short names."""
    memory_bytes: int
    """Memory available to all processes, their CUDA contexts included."""
    bf16_tflops: float | None
    fp16_tflops: float | None
    tf32_tflops: float | None
    fp32_tflops: float | None
    memory_bytes_per_second: int | None
    nvlink_bytes_per_second: int | None
    """Rate to the other GPUs of the node (NVLink, Infinity Fabric); None if the card has only PCIe."""
    pcie_bytes_per_second: int
    power_watts: int | None
    source: str

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak of a dtype in FLOP/s; None if it is unknown or the GPU has no units for it."""
        if dtype not in DTYPES:
            raise ToolkitError(f"there is no peak for dtype {dtype!r}, only for {', '.join(DTYPES)}")
        tflops: float | None = getattr(self, f"{dtype}_tflops")
        return None if tflops is None else tflops * TERA

    @property
    def link_bytes_per_second(self) -> int:
        """Rate to the next GPU of the same node, one direction."""
        return self.nvlink_bytes_per_second or self.pcie_bytes_per_second


def find_gpu(name: str) -> Gpu:
    """Return the GPU with a short name, or with the name that nvidia-smi and torch print.

    Raises ToolkitError for an unknown name, with the nearest one and the options for other GPUs.
    """
    found = known_gpu(name)
    if found is not None:
        return found
    meant = [gpu.name for gpu in GPUS if _key(name) and gpu.name.startswith(_key(name))]
    if meant:
        raise ToolkitError(f"{name!r} may be {' or '.join(meant)}", hint=f"name one, as in `--gpu {meant[0]}`")
    close = nearest(_key(name), _BY_KEY)
    guess = f"did you mean `{_BY_KEY[close].name}`? " if close else ""
    raise ToolkitError(
        f"unknown GPU {name!r}; known: {', '.join(gpu.name for gpu in GPUS)}",
        hint=f"{guess}For other GPUs, use --gpu-memory-gib and --gpu-tflops",
    )


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU as `find_gpu` does, or None for a name that is not in the table."""
    return _BY_KEY.get(_key(name))


def common_gpu(names: Iterable[str]) -> Gpu | None:
    """Return the GPU that all the names mean; None for no name, several kinds, or one that is not in the table."""
    kinds = set(names)
    return known_gpu(kinds.pop()) if len(kinds) == 1 else None


def named_or_visible_gpu(name: str | None, *, has_memory: bool = False) -> Gpu | None:
    """Return the GPU with a name, or by default the kind of this node's; None for a GPU that is given by its memory.

    Raises ToolkitError for an unknown name, and without a name where no GPU, or more than one kind, is visible.
    """
    if name is not None:
        return find_gpu(name)
    if has_memory:
        return None
    names = sorted(set(gpu_names())) if count_gpus() else []
    if len(names) == 1:
        return find_gpu(names[0])
    found = f"this node has {', '.join(names)}" if names else "no GPU is visible on this node"
    raise ToolkitError(
        f"--gpu is missing, and {found}",
        hint="for example `--gpu h100`, or --gpu-memory-gib for one that is not listed",
    )


def custom_gpu(
    listed: Gpu | None,
    *,
    memory_gib: float | None = None,
    tflops: float | None = None,
    link_gb_per_second: float | None = None,
) -> Gpu:
    """Return a GPU of the table with some numbers replaced, or one that is not in it.

    Raises ToolkitError for values out of range, and for a GPU that is not in the table and has no memory size.
    """
    for option, value in (
        ("--gpu-memory-gib", memory_gib),
        ("--gpu-tflops", tflops),
        ("--gpu-link-gb-per-second", link_gb_per_second),
    ):
        if value is not None and not 0 < value < 10**6:
            raise ToolkitError(f"{option} is {value}, expected more than 0 and below a million")
    if listed is not None and (memory_gib, tflops, link_gb_per_second) == (None, None, None):
        return listed
    if listed is None and memory_gib is None:
        raise ToolkitError("no GPU is named", hint="--gpu NAME, or --gpu-memory-gib and --gpu-tflops")
    link = None if link_gb_per_second is None else round(link_gb_per_second * GIGA)
    given = {
        "name": "custom" if listed is None else f"{listed.name}, customized",
        "aliases": (),
        "memory_bytes": None if memory_gib is None else round(memory_gib * GIB),
        "bf16_tflops": tflops,
        "fp16_tflops": tflops,
        "nvlink_bytes_per_second": link,
        "source": "command line",
    }
    if listed is None:
        unknown = dict.fromkeys(("tf32_tflops", "fp32_tflops", "memory_bytes_per_second", "power_watts"))
        return Gpu(**(unknown | {"pcie_bytes_per_second": PCIE_BYTES_PER_SECOND[4]} | given))  # type: ignore[arg-type]
    specified = {field: getattr(listed, field) for field in Gpu.__slots__}
    return Gpu(**(specified | {key: value for key, value in given.items() if value is not None}))


def _key(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` → `a100-sxm4-80gb`: vendor and family words are redundant."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "-".join(word for word in words if word and word not in {"nvidia", "amd", "instinct", "tesla", "geforce"})


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
AMPERE = "NVIDIA Ampere GA102 whitepaper, table 9 and appendix"
ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepapers, appendix"


def _gpu(
    name: str,
    aliases: str,
    memory_gib: float,
    peaks: tuple[float | None, float | None, float | None, float | None],
    bandwidth_gb: float,
    link_gb: float | None,
    pcie: int,
    watts: int,
    source: str,
) -> Gpu:
    """One row of the table; peaks are bf16, fp16, tf32, fp32 in TFLOP/s."""
    bf16, fp16, tf32, fp32 = peaks
    return Gpu(
        name=name,
        aliases=tuple(alias.strip() for alias in aliases.split(",") if alias.strip()),
        memory_bytes=round(memory_gib * GIB),
        bf16_tflops=bf16,
        fp16_tflops=fp16,
        tf32_tflops=tf32,
        fp32_tflops=fp32,
        memory_bytes_per_second=round(bandwidth_gb * GIGA),
        nvlink_bytes_per_second=None if link_gb is None else round(link_gb * GIGA),
        pcie_bytes_per_second=PCIE_BYTES_PER_SECOND[pcie],
        power_watts=watts,
        source=source,
    )


A100_PEAKS = (312, 312, 156, 19.5)
H100_PEAKS = (989.4, 989.4, 494.7, 66.9)
V100_SOURCE = f"{NVIDIA}v100/; no bf16 units"
# fmt: off
GPUS = (
    _gpu("a100-40gb", "NVIDIA A100-SXM4-40GB, a100-sxm-40gb", 39.25, A100_PEAKS, 1555, 300, 4, 400, f"{NVIDIA}a100/"),
    _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB, a100-sxm-80gb, a100-sxm", 79.14, A100_PEAKS, 2039, 300, 4, 400,
         f"{NVIDIA}a100/"),
    _gpu("a100-40gb-pcie", "NVIDIA A100-PCIE-40GB", 39.25, A100_PEAKS, 1555, None, 4, 250, f"{NVIDIA}a100/"),
    _gpu("a100-80gb-pcie", "NVIDIA A100 80GB PCIe, A100-PCIE-80GB", 79.14, A100_PEAKS, 1935, None, 4, 300,
         f"{NVIDIA}a100/"),
    _gpu("h100-sxm", "NVIDIA H100 80GB HBM3, h100, h100-80gb, h100-sxm-80gb", 79.14, H100_PEAKS, 3350, 450, 5, 700,
         f"{NVIDIA}h100/, halved"),
    _gpu("h100-pcie", "NVIDIA H100 PCIe, h100-80gb-pcie", 79.14, (756, 756, 378, 51), 2000, None, 5, 350,
         f"{NVIDIA}h100/, halved"),
    _gpu("h100-nvl", "NVIDIA H100 NVL", 93.02, (835, 835, 417.5, 60), 3900, 300, 5, 400, f"{NVIDIA}h100/, halved"),
    _gpu("h200", "NVIDIA H200, h200-sxm", 139.72, H100_PEAKS, 4800, 450, 5, 700, f"{NVIDIA}h200/, halved"),
    _gpu("h200-nvl", "NVIDIA H200 NVL", 139.72, (835.5, 835.5, 417.5, 60), 4800, 450, 5, 600,
         f"{NVIDIA}h200/, halved"),
    _gpu("b200", "NVIDIA B200, b200-sxm", 178.35, (2250, 2250, 1125, 75), 8000, 900, 5, 1000, f"{NVIDIA}hgx/, halved"),
    _gpu("gh200-96gb", "NVIDIA GH200 480GB, gh200", 94.5, H100_PEAKS, 4000, 450, 5, 1000,
         f"{NVIDIA}grace-hopper-superchip/, halved; power with the CPU"),
    _gpu("l4", "NVIDIA L4", 21.96, (121, 121, 60, 30.3), 300, None, 4, 72, f"{NVIDIA}l4/, halved"),
    _gpu("l40", "NVIDIA L40", 44.34, (181, 181, 90.5, 90.5), 864, None, 4, 300, f"{NVIDIA}l40/"),
    _gpu("l40s", "NVIDIA L40S", 44.34, (362, 362, 183, 91.6), 864, None, 4, 350, f"{NVIDIA}l40s/"),
    _gpu("a10", "NVIDIA A10", 21.96, (125, 125, 62.5, 31.2), 600, None, 4, 150, f"{NVIDIA}products/a10-gpu/"),
    _gpu("a10g", "NVIDIA A10G", 21.96, (70, 70, 35, 31.5), 600, None, 4, 300,
         "AWS EC2 G5 and its A10G data sheet"),
    _gpu("a40", "NVIDIA A40", 44.34, (149.7, 149.7, 74.8, 37.4), 696, None, 4, 300, f"{NVIDIA}a40/"),
    _gpu("rtx-a6000", "NVIDIA RTX A6000, a6000", 47.4, (154.8, 154.8, 77.4, 38.7), 768, None, 4, 300, AMPERE),
    _gpu("v100-16gb", "Tesla V100-SXM2-16GB, v100-sxm2-16gb", 15.77, (None, 125, None, 15.7), 900, 150, 3, 300,
         V100_SOURCE),
    _gpu("v100-32gb", "Tesla V100-SXM2-32GB, Tesla V100-SXM3-32GB", 31.73, (None, 125, None, 15.7), 900, 150, 3, 300,
         V100_SOURCE),
    _gpu("v100-16gb-pcie", "Tesla V100-PCIE-16GB", 15.77, (None, 112, None, 14), 900, None, 3, 250, V100_SOURCE),
    _gpu("v100-32gb-pcie", "Tesla V100-PCIE-32GB", 31.73, (None, 112, None, 14), 900, None, 3, 250, V100_SOURCE),
    _gpu("t4", "Tesla T4, NVIDIA T4", 14.56, (None, 65, None, 8.1), 320, None, 3, 70, f"{NVIDIA}tesla-t4/; no bf16"),
    _gpu("rtx-3090", "NVIDIA GeForce RTX 3090, 3090", 23.55, (71, 71, 35.6, 35.6), 936, None, 4, 350, AMPERE),
    _gpu("rtx-4090", "NVIDIA GeForce RTX 4090, 4090", 23.52, (165.2, 165.2, 82.6, 82.6), 1008, None, 4, 450, ADA),
    _gpu("rtx-5090", "NVIDIA GeForce RTX 5090, 5090", 31.36, (209.5, 209.5, 104.8, 104.8), 1792, None, 5, 575,
         BLACKWELL),
    _gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 47.4, (364.2, 364.2, 182.1, 91.1), 960, None, 4, 300, ADA),
    _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, "
         "NVIDIA RTX PRO 6000 Blackwell Server Edition, rtx-pro-6000-blackwell", 94.97, (503.8, 503.8, 251.9, 125),
         1792, None, 5, 600, BLACKWELL),
    _gpu("mi250x", "AMD Instinct MI250X", 63.98, (191.5, 191.5, None, 47.9), 1638, 200, 4, 280,
         "AMD Instinct MI250X data sheet, one of its two chips (a device of its own); vector fp32 halved"),
    _gpu("mi300x", "AMD Instinct MI300X, AMD Instinct MI300X OAM", 191.69, (1307.4, 1307.4, 653.7, 163.4), 5300, 448,
         5, 750, "AMD Instinct MI300X data sheet"),
)
# fmt: on
_BY_KEY = {_key(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}

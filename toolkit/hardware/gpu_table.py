"""GPUs as their vendors specify them: memory, dense peaks, bandwidth, interconnect; and lookup by name.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("RTX4090").name
    ('h100-sxm', 'rtx-4090')

Peaks are dense, in TFLOP/s with fp32 accumulation; where a data sheet gives a peak with sparsity only, it is halved.
Memory is the smallest total that torch reports for the card in public out-of-memory messages: drivers differ by up to
0.5 GiB, and all report less than the label. Interconnect rates are for one direction, all links of a GPU together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from toolkit.errors import ToolkitError, nearest
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.units import GIB, KIB, MIB

TERA = 10**12
GIGA = 10**9
PCIE_BYTES_PER_SECOND = {3: 16 * GIGA, 4: 31 * GIGA, 5: 63 * GIGA}  # 16 lanes, one direction
DTYPES = ("bf16", "fp16", "tf32", "fp32")
WITHOUT_FP8 = ("v100", "t4", "rtx-2", "rtx-3", "rtx-a", "a10", "a30", "a40", "a800", "mi250")
HOPPER_AND_BLACKWELL = ("h100", "h200", "h800", "h20", "gh200", "b200", "b300", "gb", "rtx-50", "rtx-pro-6000")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it: a card with two chips is two of these."""

    name: str
    other_names: str  # names in nvidia-smi, rocm-smi and torch, and short names, with commas between them
    memory_gib: float  # memory available to all processes, their CUDA contexts included
    peak_tflops: tuple[float | None, float | None, float | None, float | None]  # of each of `DTYPES`
    memory_gb_per_second: float | None
    link_gb_per_second: float | None
    """Rate to the other GPUs of the node (NVLink, Infinity Fabric); None if the card has only PCIe."""
    pcie_generation: int
    source: str
    shared_by: int = 1
    """Ranks that share the card, of which this is one's part."""

    @property
    def names(self) -> list[str]:
        """The short name, and all others."""
        return [self.name, *self.other_names.split(", ")] if self.other_names else [self.name]

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def blas_workspace_bytes(self) -> int:
        """What torch allocates for each of its handles of cuBLAS or hipBLAS; 0 for a GPU that is not in the table.

        torch, `aten/src/ATen/cuda/CublasHandlePool.cpp`, `parseChosenWorkspaceSize`, whose default this is.
        """
        name = self.name.partition(",")[0]
        if name == "custom":
            return 0
        if name.startswith("mi"):
            return (32 if name == "mi250x" else 128) * MIB
        return 32 * MIB if name.startswith(HOPPER_AND_BLACKWELL) else 2 * 4 * MIB + 8 * 16 * KIB

    @property
    def host_memory(self) -> tuple[int, str]:
        """Host memory per GPU of a typical node in GiB, and a node that has it or the reason for our choice."""
        return HOSTS.get(self.name.partition(",")[0], (round(2 * self.memory_gib), "our choice, twice the GPU's"))

    @property
    def memory_bytes_per_second(self) -> int | None:
        return None if self.memory_gb_per_second is None else round(self.memory_gb_per_second * GIGA)

    @property
    def nvlink_bytes_per_second(self) -> int | None:
        return None if self.link_gb_per_second is None else round(self.link_gb_per_second * GIGA)

    @property
    def pcie_bytes_per_second(self) -> int:
        return PCIE_BYTES_PER_SECOND[self.pcie_generation]

    @property
    def has_fp8(self) -> bool:
        """True for a GPU with matrix units for 8-bit floats: Ada, Hopper, Blackwell, and AMD's from MI300 on."""
        return not self.name.startswith(WITHOUT_FP8)

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak of a dtype in FLOP/s; None if it is unknown or the GPU has no units for it."""
        if dtype not in DTYPES:
            raise ToolkitError(f"there is no peak for dtype {dtype!r}, only for {', '.join(DTYPES)}")
        tflops = self.peak_tflops[DTYPES.index(dtype)]
        return None if tflops is None else tflops * TERA

    @property
    def link_bytes_per_second(self) -> int:
        """Rate to the next GPU of the same node, one direction."""
        return self.nvlink_bytes_per_second or self.pcie_bytes_per_second


def shared_gpu(gpu: Gpu, ranks: int) -> Gpu:
    """Return what one of `ranks` ranks has of a GPU that they share: a part of the memory, and no peak."""
    if ranks == 1:
        return gpu
    none, name = (None, None, None, None), f"{gpu.name}, 1/{ranks}"
    return replace(gpu, name=name, memory_gib=gpu.memory_gib / ranks, peak_tflops=none, shared_by=ranks)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a short name, or of its driver's. Raises ToolkitError with the nearest for another."""
    found = known_gpu(name)
    if found is not None:
        return found
    key = _key(name)
    words = _words(name)
    meant = [gpu.name for gpu in GPUS if words and _words(gpu.name)[: len(words)] == words]
    if meant:
        raise ToolkitError(f"{name!r} may be {' or '.join(meant)}", hint=f"name one, as in `--gpu {meant[0]}`")
    # Another number is another card, and so is another first letter: `p100` is no `h100`.
    same = [other for other in _BY_KEY if _digits(other) == _digits(key) and other[0] == key[:1]]
    close = nearest(key, same)
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


def chosen_gpu(name: str | None, *, memory_gib: float | None, **numbers: float | None) -> Gpu:
    """Return the GPU of a command's options: the named or visible one, with the numbers of `custom_gpu` replaced."""
    return custom_gpu(named_or_visible_gpu(name, has_memory=memory_gib is not None), memory_gib=memory_gib, **numbers)


def custom_gpu(
    listed: Gpu | None,
    *,
    memory_gib: float | None = None,
    tflops: float | None = None,
    link_gb_per_second: float | None = None,
) -> Gpu:
    """Return a GPU with some numbers replaced, or a new one. Raises ToolkitError without a memory size."""
    given = {"memory-gib": memory_gib, "tflops": tflops, "link-gb-per-second": link_gb_per_second}
    for name, value in given.items():
        if value is not None and not 0 < value < 10**6:
            raise ToolkitError(f"--gpu-{name} is {value}, expected more than 0 and below a million")
    if listed is not None and not any(given.values()):
        return listed
    if listed is None and memory_gib is None:
        raise ToolkitError("no GPU is named", hint="--gpu NAME, or --gpu-memory-gib and --gpu-tflops")
    gpu = listed or Gpu("custom", "", 0, (None, None, None, None), None, None, 4, "")
    return replace(
        gpu,
        name="custom" if listed is None else f"{listed.name}, customized",
        other_names="",
        memory_gib=memory_gib or gpu.memory_gib,
        peak_tflops=gpu.peak_tflops if tflops is None else (tflops, tflops, *gpu.peak_tflops[2:]),
        link_gb_per_second=link_gb_per_second or gpu.link_gb_per_second,
        source="command line",
    )


def _key(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` → `a100sxm480gb`: vendor and family words are redundant."""
    return "".join(_words(name))


def _digits(key: str) -> str:
    return re.sub(r"\D", "", key.replace("o", "0"))  # a letter O is a typing error


def _words(name: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return [word for word in words if word and word not in {"nvidia", "amd", "instinct", "tesla", "geforce"}]


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
AMPERE = "NVIDIA Ampere GA102 whitepaper, table 9 and appendix"
ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepapers, appendix"
A100_PEAKS = (312, 312, 156, 19.5)
H100_PEAKS = (989.4, 989.4, 494.7, 66.9)
V100_SOURCE = f"{NVIDIA}v100/; no bf16 units"
# fmt: off
GPUS = (
    Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB, a100-sxm-40gb", 39.25, A100_PEAKS, 1555, 300, 4, f"{NVIDIA}a100/"),
    Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB, a100-sxm-80gb, a100-sxm", 79.14, A100_PEAKS, 2039, 300, 4,
         f"{NVIDIA}a100/"),
    Gpu("a100-40gb-pcie", "NVIDIA A100-PCIE-40GB", 39.25, A100_PEAKS, 1555, None, 4, f"{NVIDIA}a100/"),
    Gpu("a100-80gb-pcie", "NVIDIA A100 80GB PCIe, A100-PCIE-80GB", 79.14, A100_PEAKS, 1935, None, 4, f"{NVIDIA}a100/"),
    Gpu("h100-sxm", "NVIDIA H100 80GB HBM3, h100, h100-80gb, h100-sxm-80gb", 79.14, H100_PEAKS, 3350, 450, 5,
         f"{NVIDIA}h100/, halved"),
    Gpu("h100-pcie", "NVIDIA H100 PCIe, h100-80gb-pcie", 79.14, (756, 756, 378, 51), 2000, None, 5,
         f"{NVIDIA}h100/, halved"),
    Gpu("h100-nvl", "NVIDIA H100 NVL", 93.02, (835, 835, 417.5, 60), 3900, 300, 5, f"{NVIDIA}h100/, halved"),
    Gpu("h200", "NVIDIA H200, h200-sxm", 139.72, H100_PEAKS, 4800, 450, 5, f"{NVIDIA}h200/, halved"),
    Gpu("h200-nvl", "NVIDIA H200 NVL", 139.72, (835.5, 835.5, 417.5, 60), 4800, 450, 5, f"{NVIDIA}h200/, halved"),
    Gpu("b200", "NVIDIA B200, b200-sxm", 178.35, (2250, 2250, 1125, 75), 8000, 900, 5, f"{NVIDIA}hgx/, halved"),
    Gpu("gh200-96gb", "NVIDIA GH200 480GB, gh200", 94.5, H100_PEAKS, 4000, 450, 5,
         f"{NVIDIA}grace-hopper-superchip/, halved"),
    Gpu("l4", "NVIDIA L4", 21.96, (121, 121, 60, 30.3), 300, None, 4, f"{NVIDIA}l4/, halved"),
    Gpu("l40", "NVIDIA L40", 44.34, (181, 181, 90.5, 90.5), 864, None, 4, f"{NVIDIA}l40/"),
    Gpu("l40s", "NVIDIA L40S", 44.34, (362, 362, 183, 91.6), 864, None, 4, f"{NVIDIA}l40s/"),
    Gpu("a10", "NVIDIA A10", 21.96, (125, 125, 62.5, 31.2), 600, None, 4, f"{NVIDIA}products/a10-gpu/"),
    Gpu("a10g", "NVIDIA A10G", 21.96, (70, 70, 35, 31.5), 600, None, 4, "AWS EC2 G5 and its A10G data sheet"),
    Gpu("a40", "NVIDIA A40", 44.34, (149.7, 149.7, 74.8, 37.4), 696, None, 4, f"{NVIDIA}a40/"),
    Gpu("rtx-a6000", "NVIDIA RTX A6000, a6000", 47.4, (154.8, 154.8, 77.4, 38.7), 768, None, 4, AMPERE),
    Gpu("v100-16gb", "Tesla V100-SXM2-16GB, v100-sxm2-16gb", 15.77, (None, 125, None, 15.7), 900, 150, 3, V100_SOURCE),
    Gpu("v100-32gb", "Tesla V100-SXM2-32GB, Tesla V100-SXM3-32GB", 31.73, (None, 125, None, 15.7), 900, 150, 3,
         V100_SOURCE),
    Gpu("v100-16gb-pcie", "Tesla V100-PCIE-16GB", 15.77, (None, 112, None, 14), 900, None, 3, V100_SOURCE),
    Gpu("v100-32gb-pcie", "Tesla V100-PCIE-32GB", 31.73, (None, 112, None, 14), 900, None, 3, V100_SOURCE),
    Gpu("t4", "Tesla T4, NVIDIA T4", 14.56, (None, 65, None, 8.1), 320, None, 3, f"{NVIDIA}tesla-t4/; no bf16"),
    Gpu("rtx-3090", "NVIDIA GeForce RTX 3090, 3090", 23.55, (71, 71, 35.6, 35.6), 936, None, 4, AMPERE),
    Gpu("rtx-4090", "NVIDIA GeForce RTX 4090, 4090", 23.52, (165.2, 165.2, 82.6, 82.6), 1008, None, 4, ADA),
    Gpu("rtx-5090", "NVIDIA GeForce RTX 5090, 5090", 31.36, (209.5, 209.5, 104.8, 104.8), 1792, None, 5, BLACKWELL),
    Gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 47.4, (364.2, 364.2, 182.1, 91.1), 960, None, 4, ADA),
    Gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, "
         "NVIDIA RTX PRO 6000 Blackwell Server Edition, rtx-pro-6000-blackwell", 94.97, (503.8, 503.8, 251.9, 125),
         1792, None, 5, BLACKWELL),
    Gpu("mi250x", "AMD Instinct MI250X", 63.98, (191.5, 191.5, None, 47.9), 1638, 200, 4,
         "AMD Instinct MI250X data sheet, one of its two chips (a device of its own); vector fp32 halved"),
    Gpu("mi300x", "AMD Instinct MI300X, AMD Instinct MI300X OAM", 191.69, (1307.4, 1307.4, 653.7, 163.4), 5300, 448,
         5, "AMD Instinct MI300X data sheet"),
    Gpu("h20-96gb", "NVIDIA H20, h20", 95.0, (148, 148, 74, 44), 4000, 450, 5, "NVIDIA H20 product brief"),
    Gpu("h20-141gb", "NVIDIA H20-3e, h20-3e", 139.72, (148, 148, 74, 44), 4800, 450, 5, "NVIDIA H20 product brief"),
    Gpu("h800", "NVIDIA H800, h800-80gb, h800-sxm", 79.14, H100_PEAKS, 3350, 200, 5, "H100's, NVLink 400 GB/s in all"),
    Gpu("a800-80gb", "NVIDIA A800-SXM4-80GB, a800, a800-sxm", 79.14, A100_PEAKS, 2039, 200, 4,
         "A100's, NVLink 400 GB/s in all"),
    Gpu("a800-80gb-pcie", "NVIDIA A800 80GB PCIe, A800-PCIE-80GB", 79.14, A100_PEAKS, 1935, None, 4,
         "NVIDIA A800 data sheet"),
    Gpu("l20", "NVIDIA L20", 44.34, (119.5, 119.5, 59.8, 59.8), 864, None, 4, "NVIDIA L20 data sheet"),
    Gpu("a30", "NVIDIA A30", 23.5, (165, 165, 82, 10.3), 933, None, 4, f"{NVIDIA}products/a30-gpu/"),
    Gpu("rtx-a5000", "NVIDIA RTX A5000, a5000", 23.68, (111.1, 111.1, 55.6, 27.8), 768, None, 4, AMPERE),
    Gpu("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti, 2080ti", 10.75, (None, 53.8, None, 13.4), 616, None, 3,
         "NVIDIA Turing GPU architecture whitepaper, appendix A; no bf16"),
    Gpu("rtx-3060", "NVIDIA GeForce RTX 3060, 3060", 11.65, (25.6, 25.6, 12.8, 12.7), 360, None, 4, AMPERE),
    Gpu("rtx-3070", "NVIDIA GeForce RTX 3070, 3070", 7.78, (40.6, 40.6, 20.3, 20.3), 448, None, 4, AMPERE),
    Gpu("rtx-3080", "NVIDIA GeForce RTX 3080, 3080", 9.78, (59.5, 59.5, 29.8, 29.8), 760, None, 4, AMPERE),
    Gpu("rtx-4060", "NVIDIA GeForce RTX 4060, 4060", 7.63, (30.2, 30.2, 15.1, 15.1), 272, None, 4, ADA),
    Gpu("rtx-4060-ti-16gb", "rtx-4060-ti, 4060ti", 15.6, (44.1, 44.1, 22.1, 22.1), 288, None, 4, ADA),
    Gpu("rtx-4070", "NVIDIA GeForce RTX 4070, 4070", 11.59, (58.3, 58.3, 29.1, 29.1), 504, None, 4, ADA),
    Gpu("rtx-4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", 15.59, (88.2, 88.2, 44.1, 44.1), 672, None, 4, ADA),
    Gpu("rtx-4080", "NVIDIA GeForce RTX 4080, 4080", 15.59, (97.5, 97.5, 48.7, 48.7), 717, None, 4, ADA),
    Gpu("rtx-5070", "NVIDIA GeForce RTX 5070, 5070", 11.5, (61.7, 61.7, 30.9, 30.9), 672, None, 5, BLACKWELL),
    Gpu("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti, 5070ti", 15.47, (87.9, 87.9, 43.9, 43.9), 896, None, 5, BLACKWELL),
    Gpu("rtx-5080", "NVIDIA GeForce RTX 5080, 5080", 15.47, (112.6, 112.6, 56.3, 56.3), 960, None, 5, BLACKWELL),
    Gpu("b300", "NVIDIA B300, b300-sxm", 267.6, (2250, 2250, 1125, 75), 8000, 900, 5, f"{NVIDIA}hgx/, halved"),
    Gpu("gb200", "NVIDIA GB200", 184.2, (2500, 2500, 1250, 80), 8000, 900, 5, f"{NVIDIA}gb200-nvl72/, halved"),
    Gpu("gb300", "NVIDIA GB300", 276.5, (2500, 2500, 1250, 80), 8000, 900, 5, f"{NVIDIA}gb300-nvl72/, halved"),
    Gpu("gb10", "NVIDIA GB10, dgx-spark", 119.0, (125, 125, 62.5, 31), 273, None, 5,
         "NVIDIA DGX Spark: 1 PFLOP/s in FP4 with sparsity, an eighth in bf16; memory shared with the host"),
    Gpu("mi325x", "AMD Instinct MI325X", 255.69, (1307.4, 1307.4, 653.7, 163.4), 6000, 448, 5,
         "AMD Instinct MI325X data sheet"),
    Gpu("mi355x", "AMD Instinct MI355X", 287.69, (2516.6, 2516.6, None, 157.3), 8000, 537, 5,
         "AMD Instinct MI355X data sheet"),
)
# fmt: on
# Host memory per GPU in GiB, and a node that has it: of an instance type, the one with several GPUs and the least.
_BOARD = 64, "our choice, a desktop board with two cards and 128 GiB"
HOSTS = {
    **dict.fromkeys(("h100-sxm", "h200", "b200"), (256, "AWS p5, p5en and p6-b200.48xlarge")),
    **dict.fromkeys(("a100-40gb", "a100-80gb"), (144, "AWS p4d and p4de.24xlarge")),
    "l40s": (96, "AWS g6e.12xlarge"),
    **dict.fromkeys(("l4", "a10g", "t4"), (48, "AWS g6, g5 and g4dn.12xlarge")),
    "v100-16gb": (61, "AWS p3.16xlarge"),
    "v100-32gb": (96, "AWS p3dn.24xlarge"),
    "mi300x": (231, "Azure ND96isr MI300X v5"),
    "mi250x": (64, "a node of Frontier"),
    **dict.fromkeys(("rtx-3060", "rtx-3070", "rtx-3080", "rtx-3090", "rtx-2080-ti"), _BOARD),
    **dict.fromkeys(("rtx-4060", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4070-ti-super", "rtx-4080", "rtx-4090"), _BOARD),
    **dict.fromkeys(("rtx-5070", "rtx-5070-ti", "rtx-5080", "rtx-5090"), _BOARD),
    "gb10": (119, "the GPU's memory is the host's"),
}
_BY_KEY = {_key(name): gpu for gpu in GPUS for name in gpu.names}

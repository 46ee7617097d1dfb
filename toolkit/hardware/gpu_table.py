"""GPUs as their vendors specify them: memory, dense peaks, bandwidth, interconnect; and lookup by name.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("RTX4090").name
    ('h100-sxm', 'rtx-4090')

Peaks are dense, in TFLOP/s with fp32 accumulation; where a data sheet gives a peak with sparsity only, it is halved.
Memory is the smallest total that torch reports for the card in public out-of-memory messages: drivers differ by up to
0.5 GiB, and all report less than the label. Interconnect rates are for one direction, all links of a GPU together. The
table is `gpu_table.csv`, a row per GPU with its source.
"""

import csv
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, nearest
from toolkit.hardware.gpus import count_gpus, gpu_names
from toolkit.units import GIB, KIB, MIB

TERA = 10**12
GIGA = 10**9
PCIE_BYTES_PER_SECOND = {3: 16 * GIGA, 4: 31 * GIGA, 5: 63 * GIGA}  # 16 lanes, one direction
OPERATIONS_PER_BYTE = 163  # bf16, of the median GPU in the table
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
    link_gb_per_second: float | None  # to the node's other GPUs (NVLink, Infinity Fabric); None if it has only PCIe
    pcie_generation: int
    source: str
    host: tuple[int, str] | None = None
    """Host memory per GPU in GiB, and a node that has it; of an instance type, the least that several GPUs have."""
    other_gb: str = ""  # memory of other cards with the same name, in GB
    shared_by: int = 1  # ranks that share the card, of which this is one's part

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
        return self.host or (round(2 * self.memory_gib), "our choice, twice the GPU's")

    @property
    def memory_bytes_per_second(self) -> int:
        """Bandwidth of its memory; of a GPU that is not listed, as much for its peak as the median GPU has."""
        unlisted = (self.peak_tflops[0] or 1) * 1000 / OPERATIONS_PER_BYTE
        return round((self.memory_gb_per_second or unlisted) * GIGA)

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
    meant = [each for each in meant if _variant(_key(each)) == _variant(key)]
    if meant:
        raise ToolkitError(f"{name!r} may be {' or '.join(meant)}", hint=f"name one, as in `--gpu {meant[0]}`")
    # Another number is another card, and so is another first letter: `p100` is no `h100`.
    # A `ti` or `super` is another one too.
    same = [other for other in _BY_KEY if _digits(other) == _digits(key) and other[0] == key[:1]]
    same = [other for other in same if _variant(other) == _variant(key)]
    close = nearest(key, same)
    guess = f"did you mean `{_BY_KEY[close].name}`? " if close else ""
    raise ToolkitError(
        f"unknown GPU {name!r}; known: {', '.join(gpu.name for gpu in GPUS)}",
        hint=f"{guess}For other GPUs, `toolkit plan` takes --gpu-memory-gib and --gpu-tflops",
    )


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU as `find_gpu` does, or None for a name that is not in the table.

    >>> [known_gpu(name) and known_gpu(name).name for name in ("L40S 48GB", "H100-80GB-SXM", "4090-24", "RTX 3060 8GB")]
    ['l40s', 'h100-sxm', 'rtx-4090', None]
    """
    words = _words(name)
    spellings = (start + "".join(words) + end for end in ("", "b", "gb") for start in ("", "rtx"))
    for at, word in enumerate(words):  # as who rents it out writes its memory: what is usable is up to a tenth less
        size = re.fullmatch(r"(\d{1,3})(?:gb?)?", word)
        key = "".join(words[:at] + words[at + 1 :])
        gpu = _BY_KEY.get(key) or _BY_KEY.get(f"rtx{key}")
        if size and gpu and 0.9 * int(size[1]) <= gpu.memory_gib <= int(size[1]):
            return gpu
    return next((_BY_KEY[each] for each in spellings if each in _BY_KEY), None)


def common_gpu(names: Iterable[str]) -> Gpu | None:
    """Return the GPU that all the names mean; None for no name, several kinds, or one that is not in the table."""
    kinds = set(names)
    return known_gpu(kinds.pop()) if len(kinds) == 1 else None


def named_or_visible_gpu(name: str | None, *, has_memory: bool = False) -> Gpu | None:
    """Return the GPU with a name, or by default the kind of this node's; None for a GPU that is given by its memory.

    Raises ToolkitError for an unknown name, and without a name where no GPU, or more than one kind, is visible.
    """
    if name is not None:
        gpu = find_gpu(name)
        if not has_memory:
            _say_which_memory(name, gpu)
        return gpu
    if has_memory:
        return None
    names = sorted(set(gpu_names())) if count_gpus() else []
    if len(names) == 1:
        return find_gpu(names[0])
    found = f"this node has {', '.join(names)}" if names else "no GPU is visible on this node"
    what = f"--gpu is missing, and {found}"
    raise ToolkitError(what, hint="for example `--gpu h100`, or --gpu-memory-gib for one that is not listed")


def _say_which_memory(name: str, gpu: Gpu) -> None:
    size = re.search(r"(\d+)gb$", gpu.name)
    if gpu.other_gb and not (size and size[1] in name):
        other = known_gpu(f"{name}-{gpu.other_gb}gb")
        option = f"--gpu {other.name}" if other else f"--gpu-memory-gib {gpu.other_gb}"
        print(f"{name}: {gpu.memory_gib:.1f} GiB assumed; with {gpu.other_gb} GB `{option}`", file=sys.stderr)


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


def _variant(key: str) -> str:
    found = re.search(r"(?:ti|super)+", key)
    return found[0] if found else ""


def _words(name: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return [word for word in words if word and word not in {"nvidia", "amd", "instinct", "tesla", "geforce"}]


def _gpu(row: dict[str, str]) -> Gpu:
    def number(name: str) -> float | None:
        return (int(row[name]) if row[name].isdigit() else float(row[name])) if row[name] else None

    bf16, fp16, tf32, fp32 = map(number, DTYPES)
    host = (int(row["host_gib"]), row["host_source"]) if row["host_gib"] else None
    others: dict[str, Any] = {name: row[name] for name in ("name", "other_names", "source", "other_gb")}
    others |= {name: number(name) for name in ("memory_gb_per_second", "link_gb_per_second", "pcie_generation")}
    return Gpu(memory_gib=float(row["memory_gib"]), peak_tflops=(bf16, fp16, tf32, fp32), host=host, **others)


GPUS = tuple(map(_gpu, csv.DictReader(Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines())))
_BY_KEY = {_key(name): gpu for gpu in GPUS for name in gpu.names}

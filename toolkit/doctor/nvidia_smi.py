"""What nvidia-smi prints, as values: `-q -x`, `topo -m`, `topo -p2p r`, `nvlink -e` and `nvlink --status`.

nvidia-smi is installed with the driver; NVML's Python library is optional, and nvidia-smi prints the same counters.
The parsers are pure functions and keep the names of the output. They were written from the tools' documentation and
from published outputs: no GPU has confirmed them.

>>> parse_nvlink_errors("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\\n\\t Link 3: CRC Errors: 7")
{'GPU0 link 3': {'CRC Errors': 7}}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from xml.etree import ElementTree

from toolkit.errors import ToolkitError
from toolkit.hardware.nvml import THROTTLES

_T = TypeVar("_T")

# Element of `clocks_event_reasons` (before driver 535 `clocks_throttle_reasons`) -> NVML's bit.
THROTTLE_BITS = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
NOTHING = ("", "N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated")
NVLINK_PATTERN = re.compile(r"Link (\d+): (.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class EccCounters:
    """ECC errors of one GPU; None where the GPU or the driver does not count them."""

    correctable: int | None
    """Since the driver was loaded."""
    uncorrectable: int | None
    """Since the driver was loaded."""
    lifetime_sram_uncorrectable: int | None
    lifetime_dram_uncorrectable: int | None
    sram_threshold_exceeded: bool | None
    """The driver's own verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemappedRows:
    """Memory rows (before Ampere: pages) that the GPU has replaced by spare ones."""

    correctable: int | None
    uncorrectable: int | None
    pending: bool | None
    failed: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU as `nvidia-smi -q -x` describes it; None where it prints `N/A` or nothing."""

    index: int
    name: str
    bus_id: str
    vbios: str | None
    persistence_mode: bool | None
    ecc_enabled: bool | None
    ecc_after_reboot: bool | None
    ecc: EccCounters
    rows: RemappedRows
    recovery_action: str | None
    """What the driver asks for: None or `None` if nothing."""
    fabric_state: str | None
    fabric_status: str | None
    throttle_reasons: tuple[str, ...]
    temperature_celsius: int | None
    power_limit_watts: float | None
    default_power_limit_watts: float | None
    max_sm_clock_mhz: int | None
    application_sm_clock_mhz: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    device_pcie_generation: int | None
    host_pcie_generation: int | None
    pcie_replays: int | None

    @property
    def label(self) -> str:
        """`GPU 3 (0000:9D:00.0)`."""
        return f"GPU {self.index} ({self.bus_id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuQuery:
    """All of `nvidia-smi -q -x`."""

    driver: str | None
    cuda: str | None
    """Newest CUDA that the driver supports."""
    gpus: tuple[GpuState, ...]


def parse_query(text: str) -> GpuQuery:
    """Return the GPUs in `nvidia-smi -q -x`. Raises ToolkitError for anything else."""
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ToolkitError(f"nvidia-smi -q -x prints no XML: {error}", hint="nvidia-smi -q -x | head") from None
    gpus = [_gpu(element, index) for index, element in enumerate(log.iter("gpu"))]
    return GpuQuery(driver=_text(log, "driver_version"), cuda=_text(log, "cuda_version"), gpus=tuple(gpus))


def _gpu(gpu: ElementTree.Element, index: int) -> GpuState:
    power = "gpu_power_readings" if gpu.find("gpu_power_readings") is not None else "power_readings"
    link = "pci/pci_gpu_link_info"
    return GpuState(
        index=index,
        name=_text(gpu, "product_name") or "unknown",
        bus_id=(_text(gpu, "pci/pci_bus_id") or gpu.get("id") or "?").removeprefix("0000"),
        vbios=_text(gpu, "vbios_version"),
        persistence_mode=_flag(gpu, "persistence_mode"),
        ecc_enabled=_flag(gpu, "ecc_mode/current_ecc"),
        ecc_after_reboot=_flag(gpu, "ecc_mode/pending_ecc"),
        ecc=_ecc(gpu),
        rows=_rows(gpu),
        recovery_action=_recovery(gpu),
        fabric_state=_text(gpu, "fabric/state"),
        fabric_status=_text(gpu, "fabric/status"),
        throttle_reasons=_throttles(gpu),
        temperature_celsius=_integer(gpu, "temperature/gpu_temp"),
        power_limit_watts=_real(gpu, f"{power}/current_power_limit", f"{power}/power_limit"),
        default_power_limit_watts=_real(gpu, f"{power}/default_power_limit"),
        max_sm_clock_mhz=_integer(gpu, "max_clocks/sm_clock"),
        application_sm_clock_mhz=_integer(gpu, "applications_clocks/graphics_clock"),
        pcie_width=_integer(gpu, f"{link}/link_widths/current_link_width"),
        max_pcie_width=_integer(gpu, f"{link}/link_widths/max_link_width"),
        device_pcie_generation=_integer(gpu, f"{link}/pcie_gen/max_device_link_gen", f"{link}/pcie_gen/max_link_gen"),
        host_pcie_generation=_integer(gpu, f"{link}/pcie_gen/max_host_link_gen"),
        pcie_replays=_integer(gpu, "pci/replay_counter"),
    )


def _ecc(gpu: ElementTree.Element) -> EccCounters:
    sram = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")  # one, or since 545 two

    def total(span: str, *names: str) -> int | None:
        found = [_integer(gpu, f"ecc_errors/{span}/{name}") for name in names]
        known = [count for count in found if count is not None]
        return sum(known) if known else None

    return EccCounters(
        correctable=total("volatile", "sram_correctable", "dram_correctable"),
        uncorrectable=total("volatile", *sram, "dram_uncorrectable"),
        lifetime_sram_uncorrectable=total("aggregate", *sram),
        lifetime_dram_uncorrectable=total("aggregate", "dram_uncorrectable"),
        sram_threshold_exceeded=_flag(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
    )


def _rows(gpu: ElementTree.Element) -> RemappedRows:
    return RemappedRows(
        correctable=_integer(gpu, "remapped_rows/remapped_row_corr"),
        uncorrectable=_integer(
            gpu, "remapped_rows/remapped_row_unc", "retired_pages/double_bit_retirement/retired_count"
        ),
        pending=_flag(gpu, "remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"),
        failed=_flag(gpu, "remapped_rows/remapped_row_failure"),
    )


def _recovery(gpu: ElementTree.Element) -> str | None:
    """Newer drivers name the action; older ones have two flags."""
    named = _text(gpu, "gpu_recovery_action")
    if named is not None:
        return named
    flags = ("reset_required", "drain_and_reset_recommended")
    asked = [flag for flag in flags if _flag(gpu, f"gpu_reset_status/{flag}")]
    return ", ".join(asked).replace("_", " ") or None


def _throttles(gpu: ElementTree.Element) -> tuple[str, ...]:
    found = []
    for name, bit in THROTTLE_BITS.items():
        paths = [f"clocks_{word}_reasons/clocks_{word}_reason_{name}" for word in ("event", "throttle")]
        if any(_text(gpu, path) == "Active" for path in paths):
            found.append(THROTTLES[bit])
    return tuple(found)


# -- values of an element


def _text(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return (
        None if text in ("", "N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated") else text
    )


def _first(element: ElementTree.Element, paths: tuple[str, ...], read: Callable[[str], _T | None]) -> _T | None:
    for path in paths:
        text = _text(element, path)
        if text is not None:
            return read(text)
    return None


def _flag(element: ElementTree.Element, *paths: str) -> bool | None:
    return _first(element, paths, lambda text: text in ("Enabled", "Yes"))


def _integer(element: ElementTree.Element, *paths: str) -> int | None:
    """The number before a unit: `16x`, `1980 MHz`, `41 C`."""

    def read(text: str) -> int | None:
        found = re.match(r"-?\d+", text)
        return int(found[0]) if found else None

    return _first(element, paths, read)


def _real(element: ElementTree.Element, *paths: str) -> float | None:
    def read(text: str) -> float | None:
        found = re.match(r"\d+(\.\d+)?", text)
        return float(found[0]) if found else None

    return _first(element, paths, read)


# -- connections


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """`nvidia-smi topo -m`: how each pair of GPUs and network cards is connected."""

    links: dict[tuple[str, str], str]
    """`("GPU0", "GPU1")` -> `NV18`, `PIX`, `PXB`, `PHB`, `NODE` or `SYS`; each pair once."""
    numa_nodes: dict[str, int]
    """`GPU0` -> its NUMA node, where there is one."""

    @property
    def gpu_links(self) -> dict[tuple[str, str], str]:
        """The connections between two GPUs."""
        return {pair: link for pair, link in self.links.items() if all(name.startswith("GPU") for name in pair)}


def parse_topology(text: str) -> Topology:
    r"""Return the connections in `nvidia-smi topo -m`.

    >>> parse_topology("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\t0-47\t0\nGPU1\tNV18\t X \t0-47\t0")
    Topology(links={('GPU0', 'GPU1'): 'NV18'}, numa_nodes={'GPU0': 0, 'GPU1': 0})
    """
    rows = [line.split("\t") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if "\t" in line]
    columns = [name.strip() for name in rows[0] if name.strip()] if rows else []
    links: dict[tuple[str, str], str] = {}
    numa_nodes: dict[str, int] = {}
    for name, *cells in rows[1:]:
        row = {column: cell.strip() for column, cell in zip(columns, cells, strict=False)}
        if row.get("NUMA Affinity", "").isdigit():
            numa_nodes[name.strip()] = int(row["NUMA Affinity"])
        for column in columns[columns.index(name.strip()) + 1 :] if name.strip() in columns else []:
            if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", row.get(column, "")):
                links[name.strip(), column] = row[column]
    return Topology(links=links, numa_nodes=numa_nodes)


def parse_peer_access(text: str) -> dict[tuple[str, str], str]:
    r"""Return the status of each pair in `nvidia-smi topo -p2p r`; `OK` where one GPU reads the other's memory.

    >>> parse_peer_access(" \tGPU0\tGPU1\nGPU0\t X\tCNS\nGPU1\tCNS\t X\n\nLegend:\n  X    = Self")
    {('GPU0', 'GPU1'): 'CNS'}
    """
    rows = [line.split() for line in text.splitlines() if line.split() and "=" not in line]
    columns = rows[0] if rows else []
    found = {}
    for name, *cells in rows[1:]:
        for column, cell in zip(columns, cells, strict=False):
            if name in columns and columns.index(name) < columns.index(column):
                found[name, column] = cell
    return found


def parse_nvlink_errors(text: str) -> dict[str, dict[str, int]]:
    """Return the counters of `nvidia-smi nvlink -e` that are not zero, by `GPU0 link 3`."""
    found: dict[str, dict[str, int]] = {}
    for link, rest in _nvlink_lines(text):
        counter, _, count = rest.rpartition(": ")
        if count.isdigit() and int(count):
            found.setdefault(link, {})[counter] = int(count)
    return found


def parse_nvlink_status(text: str) -> dict[str, str]:
    """Return the rate of each link in `nvidia-smi nvlink --status`, or `<inactive>`, by `GPU0 link 3`."""
    return dict(_nvlink_lines(text))


def _nvlink_lines(text: str) -> list[tuple[str, str]]:
    gpu, found = "?", []
    for line in text.splitlines():
        if begins := re.match(r"\s*GPU (\d+):", line):
            gpu = begins[1]
        elif link := NVLINK_PATTERN.match(line.strip()):
            found.append((f"GPU{gpu} link {link[1]}", link[2].strip()))
    return found

"""Xid errors: what NVIDIA's driver writes into the kernel log, their meaning, and what to do.

Meanings and actions are those of NVIDIA's catalog, for Ampere and newer GPUs. The level follows its immediate action:
a reset or restart is an error, restarting the application a warning, nothing a note.

>>> parse_xids("[12.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=0, GPU has fallen off the bus.")
[XidEvent(code=79, bus_id='0000:3b:00', count=1, last='pid=0, GPU has fallen off the bus.')]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.doctor.collectors import output_of, text_of

CATALOG = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
XID_PATTERN = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")

RESET, REBOOT = "reset the GPU: `nvidia-smi -r`, with no process on it", "reboot the node; if it returns, replace it"
RESTART = "restart the job; if it returns on this GPU, report the GPU"
NOTHING = "nothing: the driver dealt with it"
SOFTWARE = "look for the fault in the job: `compute-sanitizer`, or CUDA_LAUNCH_BLOCKING=1"
NVLINK = "reset all GPUs of the node, or reboot; `nvidia-smi nvlink -e` shows the link"


@dataclass(frozen=True, kw_only=True, slots=True)
class XidMeaning:
    """One code of the catalog."""

    meaning: str
    level: str
    action: str


# (level, action) -> code -> meaning.
_TABLE: dict[tuple[str, str], dict[int, str]] = {
    ("error", RESET): {
        46: "the GPU stopped processing (timeout)",
        48: "uncorrectable (double-bit) ECC error",
        62: "internal micro-controller halt",
        64: "a memory row could not be remapped",
        95: "uncontained memory error: other applications are affected",
        109: "context switch timeout",
        110: "security fault",
        119: "the GPU's system processor (GSP) does not answer",
        120: "error of the GPU's system processor (GSP)",
        136: "an NVLink could not be trained",
        140: "unrecovered ECC error",
        143: "the GPU could not be initialised",
        155: "an NVLink went down",
        158: "fatal timeout of the GPU",
    },
    ("error", REBOOT): {79: "the GPU has fallen off the PCIe bus"},
    ("error", "connect the GPU's auxiliary power"): {54: "auxiliary power is not connected"},
    ("error", NVLINK): {
        74: "NVLink error",
        **dict.fromkeys(range(144, 151), "NVLink error (fifth generation)"),
    },
    ("error", "see the Xid that was logged with it; `nvidia-smi -q` names the action"): {
        154: "the driver asks for a recovery action",
    },
    ("warning", RESTART): {
        **dict.fromkeys((39, 40, 41, *range(70, 73), *range(75, 78), 85), "copy engine error"),
        80: "corrupted data was sent to the GPU",
        94: "contained memory error: the application must be restarted",
    },
    ("warning", "the GPU is short of spare memory rows: plan its replacement"): {157: "no row is left to remap"},
    ("warning", SOFTWARE): {
        13: "graphics engine exception: illegal access or instruction of a kernel",
        31: "memory page fault: usually an illegal address in a kernel",
        69: "graphics engine class error",
        137: "illegal access over NVLink",
    },
    ("note", NOTHING): {
        43: "the GPU stopped an application that had failed",
        45: "an application was removed from the GPU, as after Ctrl-C",
        63: "a memory row was marked for remapping; it takes effect at the next reset",
        92: "many corrected ECC errors",
        121: "corrected errors of the link to a Grace CPU",
        156: "a part of the GPU was retired",
    },
}
XIDS: dict[int, XidMeaning] = {
    code: XidMeaning(meaning=meaning, level=level, action=action)
    for (level, action), codes in _TABLE.items()
    for code, meaning in codes.items()
}
UNKNOWN = XidMeaning(meaning="not in our table", level="warning", action=f"look it up: {CATALOG}")


@dataclass(frozen=True, kw_only=True, slots=True)
class XidEvent:
    """All log lines with one code of one GPU."""

    code: int
    bus_id: str
    count: int
    last: str


def parse_xids(kernel_log: str) -> list[XidEvent]:
    """Return the Xid errors in a kernel log, by GPU and code, in the order of their first line."""
    found: dict[tuple[str, int], list[str]] = {}
    for bus_id, code, rest in XID_PATTERN.findall(kernel_log):
        found.setdefault((bus_id.lower(), int(code)), []).append(rest.strip())
    return [
        XidEvent(code=code, bus_id=bus_id, count=len(lines), last=lines[-1]) for (bus_id, code), lines in found.items()
    ]


def read_kernel_log() -> str | None:
    """Return the kernel log since boot: dmesg, the journal, or a log file; None if this user may read none of them."""
    for command in (("dmesg",), ("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager")):
        printed = output_of(*command)
        if printed:
            return printed
    texts = (text_of(path) for path in map(_log_file, ("kern.log", "syslog", "messages")))
    return next((text for text in texts if text), None)


def _log_file(name: str) -> Path:
    return Path("/var/log") / name

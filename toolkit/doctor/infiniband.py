"""RDMA ports (InfiniBand, RoCE, EFA): from ibstat, or from the kernel's files where ibstat is not installed.

>>> parse_ibstat("CA 'mlx5_0'\\n\\tPort 1:\\n\\t\\tState: Active\\n\\t\\tRate: 400")[0].rate
'400 Gb/sec'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.doctor.collectors import entries_of, text_of

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaPort:
    """One port of a card; None where it is not told."""

    device: str
    port: int
    state: str | None
    """`Active`, `Initializing`, `Down`."""
    physical_state: str | None
    """`LinkUp`, `Polling`, `Disabled`."""
    rate: str | None
    """`400 Gb/sec`, with width and speed if the kernel names them."""
    link_layer: str | None
    link_downed: int | None = None
    """How often the link went down since the driver was loaded."""

    @property
    def is_efa(self) -> bool:
        """True for a card of AWS's own kind, which NCCL reaches through a plugin."""
        return self.device.startswith("efa") or self.device.startswith("rdmap")

    @property
    def gigabits_per_second(self) -> float | None:
        """The rate as a number."""
        found = re.match(r"[\d.]+", self.rate or "")
        return float(found[0]) if found else None


def parse_ibstat(text: str) -> list[RdmaPort]:
    """Return the ports in the output of `ibstat`."""
    ports = []
    for card in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        device, _, rest = card.partition("'")
        for block in re.split(r"^\s*Port (?=\d+:)", rest, flags=re.MULTILINE)[1:]:
            number, _, lines = block.partition(":")
            fields = dict(re.findall(r"^\s*([A-Z][^:\n]*): (.*?)\s*$", lines, re.MULTILINE))
            rate = fields.get("Rate")
            ports.append(
                RdmaPort(
                    device=device,
                    port=int(number),
                    state=fields.get("State"),
                    physical_state=fields.get("Physical state"),
                    rate=None if rate is None else f"{rate} Gb/sec",
                    link_layer=fields.get("Link layer"),
                )
            )
    return ports


def ports_in_sysfs(root: Path = SYSFS) -> list[RdmaPort]:
    """Return the ports that the kernel lists."""
    return [
        RdmaPort(
            device=device.name,
            port=int(port.name),
            state=_state(port / "state"),
            physical_state=_state(port / "phys_state"),
            rate=text_of(port / "rate"),
            link_layer=text_of(port / "link_layer"),
            link_downed=_count(port / "counters" / "link_downed"),
        )
        for device in entries_of(root)
        for port in entries_of(device / "ports")
        if port.name.isdigit()
    ]


def _state(path: Path) -> str | None:
    """`4: ACTIVE` as `Active`, `5: LinkUp` as it is."""
    word = (text_of(path) or "").rpartition(": ")[2]
    return (word.capitalize() if word.isupper() else word) or None


def _count(path: Path) -> int | None:
    text = text_of(path) or ""
    return int(text) if text.isdigit() else None

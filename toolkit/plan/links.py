"""Seconds of collectives from link rates and latency: an interval, since links reach a part of their rate.

    >>> cluster = Cluster(gpu=find_gpu("h100"), world_size=16)
    >>> cluster.seconds(collective)    # (0.011, 0.046)

No figure was measured on GPUs here: the constants are others', each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GIGA, Gpu
from toolkit.plan.traffic import Collective

Interval = tuple[float, float]
"""(low, high)."""

# Bus bandwidth over the link's rate: 107 of 450 GB/s with messages of 4 MiB on 8 H200, 235 of 300 on 8 A100 (where
# NCCL's own table caps it, src/graph/tuning.cc), all of it with large messages and reduction in the switch.
LINK_SHARE: Interval = (0.24, 1.0)
# Seconds a ring's hop: NCCL's own tuning table, rings, its LL and Simple protocols (src/graph/tuning.cc).
HOP_SECONDS: dict[str, Interval] = {
    "nvlink": (0.47e-6, 3.4e-6),
    "pcie": (1.0e-6, 5.7e-6),
    "network": (2.7e-6, 9.6e-6),
}
CALL_SECONDS: Interval = (3.6e-6, 8.4e-6)
# A machine's network, all its cards, one direction, where nobody says: one card of 400 Gbit/s to one for each of 8
# GPUs beside NVLink; 10 to 100 Gbit/s beside PCIe cards.
NETWORK_BESIDE_NVLINK: Interval = (50 * GIGA, 400 * GIGA)
NETWORK_BESIDE_PCIE: Interval = (1.25 * GIGA, 12.5 * GIGA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The GPUs of a run and what joins them."""

    gpu: Gpu
    world_size: int
    gpus_per_machine: int = 8
    network_bytes_per_second: int | None = None
    """Of one machine, all its cards, one direction; None: a wide interval."""

    def __post_init__(self) -> None:
        for name in ("world_size", "gpus_per_machine"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise ToolkitError(f"{name} is {getattr(self, name)}, expected 1 to a million")
        if self.world_size > self.gpus_per_machine and self.world_size % self.gpus_per_machine:
            raise ToolkitError(
                f"{self.world_size} GPUs do not fill machines of {self.gpus_per_machine}",
                hint="--gpus-per-machine, or another --world-size",
            )

    @property
    def num_machines(self) -> int:
        """Machines that the run fills."""
        return max(self.world_size // self.gpus_per_machine, 1)

    def seconds(self, collective: Collective) -> Interval:
        """Of all calls of a collective in a step, nothing else running."""
        slow, fast = self._bytes_per_second(collective)
        low_hop, high_hop = self._latency(collective)
        sent = collective.sent_bytes
        return sent / fast + collective.calls * low_hop, sent / slow + collective.calls * high_hop

    def _crosses(self, collective: Collective) -> bool:
        if collective.group == "replicas":
            return self.num_machines > 1
        return collective.group_size > self.gpus_per_machine

    def _bytes_per_second(self, collective: Collective) -> Interval:
        """Of one rank's ring traffic. A ring through machines loads each network once for all GPUs of a machine;
        rings of one GPU of each machine share it."""
        link = self.gpu.link_bytes_per_second
        slow, fast = link * LINK_SHARE[0], link * LINK_SHARE[1]
        if not self._crosses(collective):
            return slow, fast
        shared = self.gpus_per_machine if collective.group == "replicas" else 1
        low, high = self._network()
        return min(slow, low / shared), min(fast, high / shared)

    def _network(self) -> Interval:
        if self.network_bytes_per_second is not None:
            return 0.5 * self.network_bytes_per_second, float(self.network_bytes_per_second)
        return NETWORK_BESIDE_PCIE if self.gpu.nvlink_bytes_per_second is None else NETWORK_BESIDE_NVLINK

    def _latency(self, collective: Collective) -> Interval:
        """Of one call: a ring takes a hop to each other rank, an all-reduce twice."""
        ways = 2 if collective.name == "all_reduce" else 1
        hops = ways * (collective.group_size - 1)
        across = 0
        if self._crosses(collective):
            across = hops if collective.group == "replicas" else ways * (self.num_machines - 1)
        inside = HOP_SECONDS["pcie" if self.gpu.nvlink_bytes_per_second is None else "nvlink"]
        low, high = (
            call + (hops - across) * hop + across * net
            for call, hop, net in zip(CALL_SECONDS, inside, HOP_SECONDS["network"], strict=True)
        )
        return low, high

"""Collectives of an optimizer step: what each rank sends in them, and a range for the seconds that they take.

An interconnect reaches only part of its rate. No figure was measured on GPUs by this project; each constant names its
source.
"""

import math
from dataclasses import dataclass

from toolkit.engines.planned import Collective
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import GIGA, Gpu

Range = tuple[float, float]  # (low, high)
Estimate = tuple[float, float, float]  # the two ends of a range, and a best estimate between them

# Bus bandwidth as a share of the rate: 107 of 450 GB/s with messages of 4 MiB on 8 H200; 235 of 300 on 8 A100 (where
# NCCL's own table caps it, src/graph/tuning.cc), less what smaller messages lose; the full rate with large messages and
# reduction in the switch. Between nodes, of the network's rate.
BANDWIDTH_SHARE: Estimate = (0.24, 0.7, 1.0)
NETWORK_SHARE: Estimate = (0.5, 0.85, 1.0)
# Seconds per hop of a ring: NCCL's tuning table for rings with its LL and Simple protocols (src/graph/tuning.cc).
HOP_SECONDS: dict[str, Range] = {"nvlink": (0.47e-6, 3.4e-6), "pcie": (1.0e-6, 5.7e-6), "network": (2.7e-6, 9.6e-6)}
CALL_SECONDS: Range = (3.6e-6, 8.4e-6)
# Network of a node, all cards, one direction, if it is not given. With NVLink: from one card of 400 Gbit/s to one per
# GPU; with PCIe cards: 10 to 100 Gbit/s.
NETWORK_WITH_NVLINK: Range = (50 * GIGA, 400 * GIGA)
NETWORK_WITH_PCIE: Range = (1.25 * GIGA, 12.5 * GIGA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interconnect:
    """The GPUs of a run and what connects them."""

    gpu: Gpu
    world_size: int
    gpus_per_node: int = 8
    network_bytes_per_second: int | None = None  # network of one node, all cards, one direction; None: a wide range

    def __post_init__(self) -> None:
        for name in ("world_size", "gpus_per_node"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise ToolkitError(f"{name} is {getattr(self, name)}, expected 1 to a million")
        if self.world_size > self.gpus_per_node and self.world_size % self.gpus_per_node:
            fill = self.world_size - self.world_size % self.gpus_per_node
            hint = f"`--num-processes {fill}`, or `--gpus-per-node` with the GPUs that a node has"
            raise ToolkitError(f"{self.world_size} GPUs do not fill nodes of {self.gpus_per_node}", hint=hint)

    @property
    def num_nodes(self) -> int:
        """Nodes that the run fills."""
        return max(self.world_size // self.gpus_per_node, 1)

    @property
    def network_rate(self) -> Estimate:
        """Bytes per second of a node's network, all cards, one direction, the lowest first."""
        if self.network_bytes_per_second is not None:
            low, middle, high = (share * self.network_bytes_per_second for share in NETWORK_SHARE)
            return low, middle, high
        low, high = NETWORK_WITH_PCIE if self.gpu.nvlink_bytes_per_second is None else NETWORK_WITH_NVLINK
        return low, math.sqrt(low * high), high

    def hop_seconds(self, *, between_nodes: bool) -> Range:
        """Return the latency from one GPU to the next."""
        if between_nodes:
            return HOP_SECONDS["network"]
        return HOP_SECONDS["pcie" if self.gpu.nvlink_bytes_per_second is None else "nvlink"]

    def crosses_nodes(self, collective: Collective) -> bool:
        """Return True if a group has ranks of several nodes."""
        if collective.group == "replicas":
            return self.num_nodes > 1
        return collective.group_size * collective.stride > self.gpus_per_node

    def seconds(self, collective: Collective) -> Range:
        """Return the seconds of all calls of a collective in one step, with nothing else running."""
        best, _, worst = self.estimate(collective)
        return best, worst

    def estimate(self, collective: Collective) -> Estimate:
        """Return the same at the best rates, as a best estimate, and at the worst rates."""
        low, high = (collective.calls * latency for latency in self._latency(collective))
        slow, middle, fast = (collective.sent_bytes / rate for rate in self._bytes_per_second(collective))
        return fast + low, middle + (low + high) / 2, slow + high

    def _bytes_per_second(self, collective: Collective) -> Estimate:
        """Rate of one rank, the worst first. One ring through all GPUs passes each node's network once; rings that take
        one GPU of each node share it."""
        inside = [self.gpu.link_bytes_per_second * share for share in BANDWIDTH_SHARE]
        if self.crosses_nodes(collective):
            rings = self.gpus_per_node if collective.group == "replicas" else min(collective.stride, self.gpus_per_node)
            inside = [min(rate, network / rings) for rate, network in zip(inside, self.network_rate, strict=True)]
        slow, middle, fast = inside
        return slow, middle, fast

    def _latency(self, collective: Collective) -> Range:
        """Of one call: a ring takes a hop to each other rank, an all-reduce two."""
        hops = 1 if collective.name == "permute" else collective.passes * (collective.group_size - 1)
        across = 0
        if self.crosses_nodes(collective):
            nodes = -(-collective.group_size * collective.stride // self.gpus_per_node)
            across = hops if collective.group == "replicas" else collective.passes * (nodes - 1)
        inside, outside = self.hop_seconds(between_nodes=False), self.hop_seconds(between_nodes=True)
        parts = zip(CALL_SECONDS, inside, outside, strict=True)
        low, high = (call + (hops - across) * hop + across * network for call, hop, network in parts)
        return low, high

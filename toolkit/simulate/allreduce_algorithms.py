"""Time to reduce gradients over all workers: ring, tree and hierarchical all-reduce, and a parameter server.

Each is a bandwidth term and a latency term, at both ends of the interconnect's range (`toolkit.plan.interconnect`),
with nothing else running. S bytes, n workers, g per node, p servers:

- ring: 2 (n-1)/n S, and 2 (n-1) hops (Patarasuk and Yuan 2009). Bandwidth-optimal; latency grows with n.
- tree: 2 S, and 2 ceil(log2 n) hops: two trees, each with half of the data, so that every link is used both ways
  (Sanders, Speck and Träff 2009; NCCL's double binary trees).
- hierarchical: reduce-scatter within a node, all-reduce of S/g between the nodes, all-gather within a node.
- parameter server: each worker pushes S and pulls S; each server receives and sends n S/p through its node's network
  (Li et al. 2014). Servers take no part in the computation and share no node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from toolkit.errors import ToolkitError
from toolkit.plan.collectives import Collective
from toolkit.plan.interconnect import CALL_SECONDS, Interconnect, Range

RING, TREE, HIERARCHICAL, PARAMETER_SERVER = "ring", "tree", "hierarchical", "parameter_server"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionTime:
    """One algorithm's time to reduce and distribute the gradients of one step."""

    algorithm: str
    seconds: Range
    """At the best and the worst rates."""
    sent_bytes: int
    """By one worker."""
    server_bytes: int | None = None
    """Received by one parameter server, as many as it sends."""


def reduction_times(
    gradient_bytes: int, interconnect: Interconnect, *, parameter_servers: int
) -> tuple[ReductionTime, ...]:
    """Return the time of each algorithm. Raises ToolkitError for fewer than one parameter server."""
    if not 1 <= parameter_servers <= 100_000:
        raise ToolkitError(f"--parameter-servers is {parameter_servers}, expected 1 or more")
    collectives: tuple[Callable[[int, Interconnect], ReductionTime], ...] = (_ring, _tree, _hierarchical)
    return (
        *(reduce(gradient_bytes, interconnect) for reduce in collectives),
        _parameter_server(gradient_bytes, interconnect, parameter_servers),
    )


def _ring(gradient_bytes: int, interconnect: Interconnect) -> ReductionTime:
    collective = Collective(
        name="all_reduce", purpose="gradients", payload_bytes=gradient_bytes, group_size=interconnect.world_size
    )
    return ReductionTime(algorithm=RING, seconds=interconnect.seconds(collective), sent_bytes=collective.sent_bytes)


def _tree(gradient_bytes: int, interconnect: Interconnect) -> ReductionTime:
    workers, nodes = interconnect.world_size, interconnect.num_nodes
    sent = 2 * gradient_bytes if workers > 1 else 0
    hops = 2 * math.ceil(math.log2(workers))
    across = min(hops, 2 * math.ceil(math.log2(nodes)))
    inside, network = interconnect.hop_seconds(between_nodes=False), interconnect.hop_seconds(between_nodes=True)
    slow, fast = interconnect.link_bytes_per_second
    if nodes > 1:
        slow, fast = min(slow, interconnect.network_rate[0]), min(fast, interconnect.network_rate[1])
    best, worst = (
        call + (hops - across) * near + across * far
        for call, near, far in zip(CALL_SECONDS, inside, network, strict=True)
    )
    return ReductionTime(algorithm=TREE, seconds=(sent / fast + best, sent / slow + worst), sent_bytes=sent)


def _hierarchical(gradient_bytes: int, interconnect: Interconnect) -> ReductionTime:
    """On one node, a reduce-scatter and an all-gather: a ring in two calls."""
    local = min(interconnect.gpus_per_node, interconnect.world_size)
    within = Collective(name="reduce_scatter", purpose="gradients", payload_bytes=gradient_bytes, group_size=local)
    between = Collective(
        name="all_reduce",
        purpose="gradients",
        payload_bytes=gradient_bytes // local,
        group_size=interconnect.num_nodes,
        group="replicas",
        stride=local,
    )
    parts = (within, *([between] if interconnect.num_nodes > 1 else []), replace(within, name="all_gather"))
    best, worst = (sum(ends) for ends in zip(*map(interconnect.seconds, parts), strict=True))
    return ReductionTime(
        algorithm=HIERARCHICAL, seconds=(best, worst), sent_bytes=sum(part.sent_bytes for part in parts)
    )


def _parameter_server(gradient_bytes: int, interconnect: Interconnect, servers: int) -> ReductionTime:
    """Push, then pull; the slower of a worker's share of its node's network, and a server's network."""
    workers = interconnect.world_size
    local = min(interconnect.gpus_per_node, workers)
    through_server = workers * gradient_bytes // servers
    slow, fast = (max(local * gradient_bytes, through_server) / rate for rate in interconnect.network_rate)
    (best, worst), (first, last) = CALL_SECONDS, interconnect.hop_seconds(between_nodes=True)
    return ReductionTime(
        algorithm=PARAMETER_SERVER,
        seconds=(2 * (fast + best + first), 2 * (slow + worst + last)),
        sent_bytes=gradient_bytes,
        server_bytes=through_server,
    )

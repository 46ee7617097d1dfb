"""Seconds of collectives, worked out by hand from rates and latencies."""

from dataclasses import replace

import pytest

from toolkit.engines.planned import Collective
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.plan.interconnect import Interconnect

H100 = find_gpu("h100-sxm")


def gather(**changes: object) -> Collective:
    made = Collective(name="all_gather", purpose="parameters", payload_bytes=8 * 45 * 10**9, group_size=8)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_seconds_are_bytes_over_the_rate_and_a_hop_to_each_rank() -> None:
    low, high = Interconnect(gpu=H100, world_size=8).seconds(gather())
    assert low == pytest.approx(7 * 45e9 / 450e9, rel=1e-4)
    assert high == pytest.approx(7 * 45e9 / (0.24 * 450e9), rel=1e-4)
    low, _ = Interconnect(gpu=H100, world_size=8).seconds(gather(payload_bytes=0, calls=10))
    assert low == pytest.approx(10 * (3.6e-6 + 7 * 0.47e-6))


def test_a_ring_through_nodes_is_as_fast_as_the_network_of_one_node() -> None:
    two = Interconnect(gpu=H100, world_size=16, network_bytes_per_second=100 * 10**9)
    low, _ = two.seconds(gather(group_size=16, payload_bytes=16 * 10**9))
    assert low == pytest.approx(15e9 / 100e9, rel=1e-3)
    # Rings of one GPU per node: eight of them share the network.
    low, _ = two.seconds(gather(group="replicas", group_size=2, payload_bytes=2 * 10**9))
    assert low == pytest.approx(1e9 / (100e9 / 8), rel=1e-3)
    # GPUs must fill their nodes.
    with pytest.raises(ToolkitError, match="12 GPUs do not fill nodes of 8"):
        Interconnect(gpu=H100, world_size=12)
    with pytest.raises(ToolkitError, match="world_size is 0, expected 1 to a million"):
        Interconnect(gpu=H100, world_size=0)

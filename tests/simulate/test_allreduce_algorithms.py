"""Time of all-reduces and of a parameter server, worked out by hand."""

from __future__ import annotations

import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.plan.interconnect import Interconnect
from toolkit.simulate.allreduce_algorithms import ReductionTime, reduction_times

GIGA = 10**9


def times(
    *, workers: int, gpus_per_node: int = 8, gradient_bytes: int = 8 * GIGA, servers: int = 1
) -> dict[str, ReductionTime]:
    """On H100s (NVLink 450 GB/s) whose nodes have 50 GB/s."""
    interconnect = Interconnect(
        gpu=find_gpu("h100"), world_size=workers, gpus_per_node=gpus_per_node, network_bytes_per_second=50 * GIGA
    )
    found = reduction_times(gradient_bytes, interconnect, parameter_servers=servers)
    return {time.algorithm: time for time in found}


def test_on_one_node_ring_and_hierarchical_send_the_same_and_a_tree_a_little_more() -> None:
    found = times(workers=8)
    assert found["ring"].sent_bytes == found["hierarchical"].sent_bytes == 2 * 7 * GIGA
    assert found["tree"].sent_bytes == 16 * GIGA
    assert found["ring"].seconds[0] == pytest.approx(14 / 450, rel=0.001)
    assert found["tree"].seconds[0] == pytest.approx(16 / 450, rel=0.001)


def test_between_nodes_the_network_decides_over_a_ring() -> None:
    found = times(workers=64)
    assert found["ring"].seconds[0] == pytest.approx(2 * 63 / 64 * 8 / 50, rel=0.001)
    assert found["ring"].seconds[1] == pytest.approx(2 * 63 / 64 * 8 / 25, rel=0.01)
    # two passes within the node, and between nodes an eighth of the bytes on each of eight rings
    within, between = 2 * 7 / 8 * 8 / 450, 2 * 7 / 8 * 8 / 50
    assert found["hierarchical"].seconds[0] == pytest.approx(within + between, rel=0.001)


def test_the_latency_of_a_ring_grows_with_the_workers_and_that_of_a_tree_with_their_logarithm() -> None:
    few, many = times(workers=64, gradient_bytes=1), times(workers=4096, gradient_bytes=1)
    assert many["ring"].seconds[0] / few["ring"].seconds[0] > 50
    assert many["tree"].seconds[0] / few["tree"].seconds[0] < 3
    assert many["tree"].seconds[0] < many["hierarchical"].seconds[0] < many["ring"].seconds[0]


def test_one_parameter_server_takes_as_many_times_longer_as_there_are_workers() -> None:
    found = times(workers=64, gpus_per_node=1)
    assert found["parameter_server"].server_bytes == 64 * 8 * GIGA
    assert found["parameter_server"].seconds[0] == pytest.approx(2 * 64 * 8 / 50, rel=0.001)
    assert found["parameter_server"].sent_bytes == 8 * GIGA


def test_as_many_servers_as_workers_are_as_fast_as_a_ring() -> None:
    found = times(workers=64, gpus_per_node=1, servers=64)
    assert found["parameter_server"].seconds[0] == pytest.approx(found["ring"].seconds[0] * 64 / 63, rel=0.002)


def test_no_server_is_refused() -> None:
    with pytest.raises(ToolkitError, match="--parameter-servers is 0"):
        times(workers=8, servers=0)

"""`torchrun --nnodes 1:2` on two nodes, of which one loses power.

How a run takes a node back is tested in tests/train/test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.machines import Machines
from elastic_nodes import Nodes, check_restarts, elastic_job, losses_of_steps, losses_without_interruption

pytestmark = [pytest.mark.cluster, pytest.mark.launch, pytest.mark.nightly]

LOSS_TOLERANCE = 1e-6


def test_a_run_survives_a_lost_node(machines: Machines, tiny_model: Path, faq_alpaca: Path, tmp_path: Path) -> None:
    """The cable is cut first, so no connection is closed: the other rank notices that its peer hangs."""
    job = elastic_job(tiny_model, faq_alpaca)
    nodes = Nodes("zero2", tmp_path, job, "node1:29401", place=lambda name, words: machines.command(name, *words))
    nodes.environment["TOOLKIT_HANG_TIMEOUT_MINUTES"] = "0.25"
    try:
        with nodes:
            nodes.start("node1")
            nodes.start("node2")
            nodes.train_on(2, attempt=1, steps=5)
            machines.power_off("node2")
            nodes.agents.pop("node2").wait(60)
            nodes.train_on(1, attempt=2)
            nodes.stop()
    finally:
        if "node2" not in machines.on:
            machines.power_on("node2")
    check_restarts(nodes, world_sizes=[2, 1])
    trained = losses_of_steps(nodes.out)
    expected = losses_without_interruption("zero2", job, tmp_path / "whole", steps=len(trained))
    assert trained == pytest.approx(expected, rel=LOSS_TOLERANCE)

"""`torchrun --nnodes 1:2` loses a node and gets it back: the same rows and losses as an uninterrupted run.

Two elastic agents on this host stand for the nodes; in tests/cluster a node loses power.
"""

from pathlib import Path

import pytest
from accelerate.utils.other import get_free_port
from elastic_nodes import Nodes, check_restarts, elastic_job, losses_of_steps, losses_without_interruption
from launching import accelerate_launch

pytestmark = pytest.mark.launch

LOSS_TOLERANCE = 1e-6  # observed: 7e-8


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    return elastic_job(tiny_model, faq_alpaca)


@pytest.mark.nightly
def test_a_run_that_regains_a_node_keeps_its_rows(job: list[str], tmp_path: Path) -> None:
    with Nodes("zero2", tmp_path, job, f"127.0.0.1:{get_free_port()}") as nodes:
        nodes.start("first")
        nodes.start("second")
        nodes.train_on(2, attempt=1, steps=5)
        nodes.lose("second")
        nodes.train_on(1, attempt=2)
        nodes.start("second")
        nodes.train_on(2, attempt=3)
        nodes.stop()
    check_restarts(nodes, world_sizes=[2, 1, 2])
    trained = losses_of_steps(nodes.out)
    expected = losses_without_interruption("zero2", job, tmp_path / "whole", steps=len(trained))
    assert trained == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_the_reason_is_said_although_another_rank_ends_first(job: list[str], tmp_path: Path) -> None:
    words = [*job, "--global_batch_size", "3", "--output_dir", str(tmp_path / "out")]
    ended = accelerate_launch("ddp", *words, script="rank_0_refuses_late")
    assert ended.stderr.count("3 is no multiple of 2 data-parallel ranks × 1 sequences") == 1

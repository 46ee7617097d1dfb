"""A job on two nodes trains as two ranks on one node do, and sends over the link what is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster.jobs import ClusterJobs, hosts, rows, steps
from cluster.machines import shaped, wait_until
from launching import attested, toolkit

pytestmark = [pytest.mark.cluster, pytest.mark.launch]

STEPS = "3"
LINK_STEPS = 30
JOB = ("--per_device_train_batch_size", "2", "--save_strategy", "no", "--max_steps")


@pytest.mark.parametrize("preset", ["zero2", "fsdp2"])
def test_a_submitted_job_has_the_losses_and_the_strategy_of_two_ranks_on_one_node(
    preset: str, jobs: ClusterJobs, tmp_path: Path
) -> None:
    out = tmp_path / "two"
    jobs.finish(jobs.submit(preset, out, *JOB, STEPS), out)
    one = jobs.on_one_node(preset, tmp_path / "one", *JOB, STEPS)
    assert hosts(out) == ["node1", "node2"]
    assert attested(out) == attested(one)
    assert [rows(out, rank) for rank in (0, 1)] == [rows(one, rank) for rank in (0, 1)]


def test_ddp_sends_the_planned_bytes_over_a_link_of_1_gbit(jobs: ClusterJobs, tmp_path: Path, tiny_model: Path) -> None:
    """Counted by the network interface, headers included: TCP and Ethernet add 66 to each 1,448 bytes, 4.6 %."""
    out, machines = tmp_path / "two", jobs.slurm.machines
    with shaped(machines, ("node1", "node2"), "1gbit"):
        job = jobs.submit("ddp", out, *JOB, str(LINK_STEPS))
        jobs.until_step(job, out, 2)
        wait_until(lambda: min(steps(out)) > 2, "a new step", 60)
        first, before = steps(out)[0], machines.sent_bytes("node2")
        wait_until(lambda: steps(out)[0] >= LINK_STEPS - 3, "steps on the shaped link", 120)
        last, after = steps(out)[0], machines.sent_bytes("node2")
        jobs.finish(job, out)
    one = jobs.on_one_node("ddp", tmp_path / "one", *JOB, str(LINK_STEPS))
    assert hosts(out) == ["node1", "node2"]
    assert attested(out) == attested(one)
    assert [rows(out, rank) for rank in (0, 1)] == [rows(one, rank) for rank in (0, 1)]
    words = ["--preset", "ddp", "--num-processes", "2", "--gpus-per-node", "1", "--gpu", "h100", "--json"]
    (plan,) = json.loads(toolkit("plan", str(tiny_model), *words).stdout)["plans"]
    sent_per_step = (after - before) / (last - first)
    assert 0.95 < sent_per_step / plan["communication_bytes_per_step"] < 1.15  # one step begun at either end

"""Presets on two nodes train as two ranks on one node do, and send over the link what is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import ClusterJobs, hosts, rows, steps
from cluster.machines import shaped, wait_until
from command_line import json_of
from launching import attested, read

pytestmark = [pytest.mark.cluster, pytest.mark.launch, pytest.mark.nightly]

STEPS = 12
JOB = ("--per_device_train_batch_size", "2", "--max_steps", str(STEPS))
PRESETS = ("ddp", "fsdp2")
STEP_SECONDS = 120.0


def sent_per_step(jobs: ClusterJobs, job: str, out: Path) -> float:
    """Return the bytes that node2 sends in each step of a run, counted by its network interface."""
    jobs.until_step(job, out, 2)
    wait_until(lambda: min(steps(out)) > 2, "a new step", STEP_SECONDS)
    first, before = steps(out)[0], jobs.slurm.machines.sent_bytes("node2")
    wait_until(lambda: steps(out)[0] >= STEPS, "steps on the shaped link", STEP_SECONDS)
    last, after = steps(out)[0], jobs.slurm.machines.sent_bytes("node2")
    return (after - before) / (last - first)


def test_a_submitted_comparison_trains_as_on_one_node_and_sends_the_planned_bytes_over_1_gbit(
    jobs: ClusterJobs, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes include headers: TCP and Ethernet add 66 to each 1,448 bytes, 4.6 %."""
    out = tmp_path / "out"
    trials = {preset: out / "trials" / f"{preset}-n2-r0" for preset in PRESETS}
    with shaped(jobs.slurm.machines, ("node1", "node2"), "1gbit"):
        job = jobs.submit_comparison(PRESETS, out, *JOB)
        sent = sent_per_step(jobs, job, trials["ddp"])
        jobs.finish(job)
    found = [(row["preset"], row["world_size"], row["status"]) for row in read(out / "results.json")["rows"]]
    assert found == [(preset, 2, "completed") for preset in PRESETS]

    reports = sorted((tmp_path / "out.logs").glob(f"{job}-0-doctor-*.json"))
    assert [read(report)["node_facts"]["hostname"] for report in reports] == ["node1", "node2"]
    assert "2 nodes: " in jobs.logs()

    for preset, trial in trials.items():
        one = jobs.on_one_node(preset, tmp_path / preset, *JOB, "--save_strategy", "no")
        assert hosts(trial) == ["node1", "node2"]
        assert attested(trial) == attested(one)
        assert steps(trial) == [STEPS, STEPS]
        assert [rows(trial, rank) for rank in (0, 1)] == [rows(one, rank) for rank in (0, 1)]

    words = ["--preset", "ddp", "--num-processes", "2", "--gpus-per-node", "1", "--gpu", "h100"]
    (plan,) = json_of(["plan", str(tiny_model), *words], capsys)["plans"]
    assert 0.95 < sent / plan["communication_bytes_per_step"] < 1.15  # one step begun at either end

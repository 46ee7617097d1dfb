"""`torchrun --nnodes 1:2` on two nodes of SLURM, of which one loses power without closing a connection; and presets.

How a run takes a node back is tested in tests/train/test_elastic.py.
"""

from pathlib import Path

import pytest
from cluster.slurm import LAUNCH_SECONDS, SAVE_SECONDS, ClusterJobs, hosts, rows, steps
from elastic_nodes import losses_of_steps, losses_without_interruption
from launching import attested, read

pytestmark = [pytest.mark.cluster, pytest.mark.launch, pytest.mark.nightly]

LOSS_TOLERANCE = 1e-6


def test_a_submitted_elastic_job_continues_on_the_node_that_is_left(jobs: ClusterJobs, tmp_path: Path) -> None:
    out, slurm = tmp_path / "run", jobs.slurm
    options = ["--preset", "zero2", "--save-seconds", str(SAVE_SECONDS), "--env", "TOOLKIT_HANG_TIMEOUT_MINUTES=0.25"]
    training = ["--per_device_train_batch_size", "1", "--global_batch_size", "4", "--bf16", "false"]
    saves = ["--save_steps", "2", "--save_total_limit", "3", "--save_model", "false", "--max_steps", "2000"]
    job = jobs.submit(options, out, *training, *saves, nodes="1:2")
    jobs.until_step(job, out, 5)
    head, lost = slurm.nodes_of(job)
    assert hosts(out) == [head, lost]
    slurm.machines.power_off(lost)
    # the hang timeout, torchrun's rendezvous, new processes, and a checkpoint that is converted for one of them
    jobs.until(job, lambda: read(out / "run.json").get("world_size") == 1, seconds=2 * LAUNCH_SECONDS)
    resumed = read(out / "run.json")["resumed_from"]["step"]
    jobs.until(job, lambda: steps(out)[0] >= resumed + 4)
    assert resumed > 0
    slurm.ctl("scancel", "--signal=TERM", job)  # the job's steps get it, as before a time limit
    jobs.until_restart(job, 1)
    stopped = read(out / "failure.json")["message"]
    step = steps(out)[0]
    assert stopped == f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved"
    slurm.ctl("scancel", job)
    slurm.wait_for_end(job)
    trained = losses_of_steps(out)[:step]
    words = [*jobs.words, *training]
    expected = losses_without_interruption("zero2", words, tmp_path / "whole", steps=step)
    assert trained == pytest.approx(expected, rel=LOSS_TOLERANCE)


STEPS = 12
JOB = ("--per_device_train_batch_size", "2", "--max_steps", str(STEPS))
PRESETS = ("ddp", "fsdp2")


def test_a_submitted_comparison_trains_as_on_one_node(jobs: ClusterJobs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trials = {preset: out / "trials" / f"{preset}-n2-r0" for preset in PRESETS}
    presets = [word for preset in PRESETS for word in ("--preset", preset)]
    job = jobs.submit([*presets, "--repeats", "1", "--preflight"], out, *JOB)
    jobs.slurm.wait_for_end(job, LAUNCH_SECONDS)
    assert jobs.slurm.job(job)["JobState"] == "COMPLETED", jobs.logs()
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

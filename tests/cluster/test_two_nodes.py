"""Presets on two nodes train as two ranks on one node do."""

from pathlib import Path

import pytest
from cluster.slurm import LAUNCH_SECONDS, ClusterJobs, hosts, rows, steps
from launching import attested, read

pytestmark = [pytest.mark.cluster, pytest.mark.launch, pytest.mark.nightly]

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

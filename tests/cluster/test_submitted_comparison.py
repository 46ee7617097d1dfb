"""A comparison that `toolkit cluster slurm` writes, on two nodes of the cluster of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.jobs import LAUNCH_SECONDS, ClusterJobs, hosts
from cluster.slurm import ENDED
from launching import read, toolkit

pytestmark = [pytest.mark.cluster, pytest.mark.launch]


def test_a_submitted_comparison_trains_every_preset_on_both_nodes(jobs: ClusterJobs, tmp_path: Path) -> None:
    out, path = tmp_path / "out", tmp_path / "compare.sbatch"
    options = ["--preset", "ddp", "--preset", "zero1", "--nodes", "2", "--gpus-per-node", "1", "--cpu"]
    options += ["--repeats", "1", "--time-limit", "10", "--output", str(path)]
    words = [word for word in jobs.words if word not in ("--save_model", "false")]
    ended = toolkit("cluster", "slurm", *options, "--", *words, "--max_steps", "4", "--output_dir", str(out))
    assert ended.returncode == 0, ended.stderr
    job = jobs.slurm.submit(path, log=tmp_path / "compare.log")
    jobs.submitted.append(job)
    jobs.slurm.wait_for(job, ENDED, 2 * LAUNCH_SECONDS)
    assert jobs.slurm.job(job)["JobState"] == "COMPLETED", (tmp_path / "compare.log").read_text()
    rows = [(row["preset"], row["world_size"], row["status"]) for row in read(out / "results.json")["rows"]]
    assert rows == [("ddp", 2, "completed"), ("zero1", 2, "completed")]
    assert hosts(out / "trials" / "ddp-n2-r0") == ["node1", "node2"]

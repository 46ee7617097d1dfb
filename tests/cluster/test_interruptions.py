"""One run, interrupted before its time limit and by a lost node, ends as if nothing had happened."""

from pathlib import Path

import pytest
from cluster.machines import wait_until
from cluster.slurm import LAUNCH_SECONDS, SAVE_SECONDS, ClusterJobs, hosts, rows, steps
from launching import attested, read

from toolkit.record.checkpoints import list_checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.launch]

JOB = ("--per_device_train_batch_size", "8", "--save_strategy", "steps", "--save_steps", "2")
KEPT = ("--save_model", "false", "--save_total_limit", "3", "--max_steps", "2000")


@pytest.mark.nightly
def test_a_run_stopped_by_time_limit_and_power_loss_resumes_bit_for_bit(jobs: ClusterJobs, tmp_path: Path) -> None:
    out, slurm = tmp_path / "run", jobs.slurm
    job = jobs.submit(["--preset", "zero2", "--save-seconds", str(SAVE_SECONDS)], out, *JOB, *KEPT)
    jobs.until_step(job, out, 2)
    verified = attested(out)
    slurm.end_soon(job)  # SLURM itself sends SIGTERM, as --signal asks
    jobs.until_restart(job, 1)
    stopped = read(out / "run.json")
    assert (stopped["status"], read(out / "failure.json")["kind"]) == ("interrupted", "interrupted"), jobs.logs()
    step = list_checkpoints(out)[0].step
    assert steps(out) == [step, step]
    assert read(out / "failure.json")["message"].endswith(f"checkpoint-{step} was saved")

    slurm.ctl("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    wait_until(lambda: read(out / "run.json")["status"] == "running", "the requeued run trains", LAUNCH_SECONDS)
    jobs.until_step(job, out, step + 4)
    assert read(out / "run.json")["resumed_from"]["step"] == step
    saved = list_checkpoints(out)[0].step
    lost = slurm.nodes_of(job)[-1]
    slurm.machines.power_off(lost)
    compared = saved + 6
    words = [*JOB[:2], "--save_strategy", "no", "--max_steps", str(compared)]
    whole = jobs.on_one_node("zero2", tmp_path / "whole", *words)  # while SLURM waits for the lost node
    jobs.until_restart(job, 2)

    jobs.until(job, lambda: (read(out / "run.json").get("resumed_from") or {"step": 0})["step"] >= saved)
    jobs.until_step(job, out, saved + 2)
    assert hosts(out) == slurm.nodes_of(job) == [node for node in slurm.nodes if node != lost]
    slurm.ctl("scancel", job)
    slurm.wait_for_end(job)
    trained = min(*steps(out), compared)
    assert trained >= saved + 2
    assert verified == attested(whole)
    for rank in (0, 1):
        assert rows(out, rank)[:trained] == rows(whole, rank)[:trained]


@pytest.mark.nightly
def test_a_run_folder_that_only_the_head_has_ends_the_job_with_the_other_nodes_name(jobs: ClusterJobs) -> None:
    own_folder_of_each_node = Path("/mnt/run")
    jobs.slurm.stop_daemon("node2")
    job = jobs.submit(["--preset", "ddp"], own_folder_of_each_node, *JOB)
    jobs.until(job, lambda: "start 1 of 3: SLURM did not start a task on every node" in jobs.logs())
    jobs.slurm.start_daemon("node2")
    jobs.slurm.wait_for_end(job, 120)
    assert (jobs.slurm.job(job)["JobState"], jobs.slurm.job(job)["ExitCode"]) == ("FAILED", "2:0")
    assert "error: node node2 does not see /mnt/run/logs, which the head has" in jobs.logs()

"""Faults provoked for real on two ranks: killed, stopped, hanging, starved, diverged, a full disk, a folder in use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT, losses, read

from toolkit.runs.pulses import Pulse, read_pulses

pytestmark = pytest.mark.launch


@dataclass
class Running:
    """A run under way, and what it says."""

    process: subprocess.Popen[str]
    folder: Path

    def steps(self, rank: int = 0) -> int:
        path = self.folder / "ranks" / f"rank{rank}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def pulse(self, rank: int) -> Pulse:
        return next(pulse for pulse in read_pulses(self.folder / "ranks") if pulse.rank == rank)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step and len(read_pulses(self.folder / "ranks")) == 2)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said

    def failure(self) -> dict[str, Any]:
        return dict(read(self.folder / "failure.json"))

    def run(self) -> dict[str, Any]:
        return dict(read(self.folder / "run.json"))


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> Iterator[Start]:
    """Start a run of many steps, by `toolkit train` or a plain `accelerate launch`; none outlives its test."""
    started: list[Running] = []

    def begin(
        *words: str,
        options: tuple[str, ...] = (),
        preset: str = "ddp",
        plain: bool = False,
        shell: str = "",
        **more: str,
    ) -> Running:
        out = tmp_path / "out"
        given = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        given += ["--max_steps", "100000", "--per_device_train_batch_size", "1", "--lr_scheduler_type", "constant"]
        given += ["--save_strategy", "no", "--output_dir", str(out), *words]
        config = str(ROOT / "accelerate_configs" / f"{preset}.yaml")
        launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
        launcher += ["--num_processes", "2", "-m", "toolkit.train"]
        command = ["-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", *options, "--"]
        argv = [sys.executable, *(launcher if plain else command), *given]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | more
        if shell:
            argv = ["bash", "-c", f'{shell}; exec "$@"', "bash", *argv]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, text=True, **streams)  # type: ignore[call-overload]
        started.append(Running(process, out))
        return started[-1]

    yield begin
    for running in started:
        pulses = read_pulses(running.folder / "ranks")
        for found in [pulse.process for pulse in pulses]:
            if found is not None:
                with contextlib.suppress(psutil.Error):
                    found.kill()
        running.process.kill()
        running.process.communicate()


def test_a_killed_rank_is_named_with_its_step(start: Start) -> None:
    run = start()
    run.until_step(5)
    os.kill(run.pulse(1).pid, signal.SIGKILL)
    code, said = run.ended()
    failure, step = run.failure(), run.steps(1)
    assert (code, failure["kind"], failure["rank"], failure["step"]) == (1, "failed", 1, step)
    assert failure["message"].startswith(f"rank 1 is gone in step {step + 1}")
    assert failure["message"].endswith("SIGKILL ended it")
    assert failure["message"] in said
    assert "--max-restarts" in said


def test_a_stopped_rank_is_told_from_the_one_that_waits_for_it(start: Start) -> None:
    run = start(options=("--hang-timeout-minutes", "0.05"))
    run.until_step(3)
    pid = run.pulse(1).pid
    os.kill(pid, signal.SIGSTOP)
    code, said = run.ended()
    failure = run.failure()
    assert (code, failure["kind"], failure["rank"], run.run()["status"]) == (1, "timed_out", 1, "timed_out")
    assert f"rank 1 does not answer (its process {pid} is stopped)" in said
    assert sorted(failure["stacks"]) == ["0", "1"]
    assert all("in training_step" in stacks or "in _run_epoch" in stacks for stacks in failure["stacks"].values())
    assert not psutil.pid_exists(pid)


def test_a_plain_launch_ends_a_hang_by_itself(start: Start) -> None:
    run = start(plain=True, TOOLKIT_HANG_TIMEOUT_MINUTES="0.05")
    run.until_step(3)
    os.kill(run.pulse(0).pid, signal.SIGSTOP)
    code, _ = run.ended()
    assert code == 1
    assert (run.failure()["kind"], run.failure()["rank"], run.run()["status"]) == ("timed_out", 0, "timed_out")


def test_sigterm_saves_and_ends_all_ranks_after_the_same_step(start: Start) -> None:
    run = start("--save_strategy", "steps", "--save_steps", "50000")
    run.until_step(5)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.ended()
    assert (code, run.failure()["kind"], run.run()["status"]) == (1, "interrupted", "interrupted")
    step = run.steps(0)
    assert step == run.steps(1) == run.failure()["step"]
    assert f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved" in said
    assert [path.name for path in run.folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert (run.folder / f"checkpoint-{step}" / "trainer_state.json").exists()


def test_sigterm_to_a_plain_launch_saves_too(start: Start) -> None:
    run = start("--save_strategy", "steps", "--save_steps", "50000", plain=True, preset="zero2")
    run.until_step(5)
    run.process.send_signal(signal.SIGTERM)
    run.ended()
    step = run.steps(0)
    assert step == run.steps(1)
    assert run.failure()["kind"] == run.run()["status"] == "interrupted"
    assert (run.folder / f"checkpoint-{step}" / "trainer_state.json").exists()


def test_a_folder_in_use_is_refused_to_a_second_run(start: Start) -> None:
    first = start(plain=True)
    first.until_step(1)
    before = first.run()
    second = start()
    code, said = second.ended()
    assert code == 2
    assert "holds a run that is still going" in said
    assert "Traceback" not in said
    again = start(plain=True)
    assert again.ended()[0] != 0
    assert not (first.folder / "failure.json").exists()
    assert first.run() == before
    steps = first.steps()
    first.until(lambda: first.steps() > steps)


def test_a_loss_that_is_no_number_ends_the_run_as_diverged(start: Start) -> None:
    warm_up = ("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "2", "--learning_rate", "1e30")
    run = start("--save_strategy", "steps", "--save_steps", "1", "--max_steps", "20", *warm_up)
    code, said = run.ended()
    failure = run.failure()
    assert (code, failure["kind"], run.run()["status"]) == (1, "diverged", "diverged")
    assert f"nan at step {failure['step']}" in failure["message"]
    assert len(failure["rows"]) == len(failure["places"])
    assert (run.folder / "checkpoint-1").is_dir()  # the learning rate was still 0
    assert not (run.folder / f"checkpoint-{failure['step']}").exists()
    assert "lower `--learning_rate`" in said


def test_memory_that_the_kernel_takes_back_is_host_out_of_memory(start: Start, tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"toolkit-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("700M")
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        code, said = start(shell=f"echo $$ > {group}/cgroup.procs").ended()
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    assert code == 3
    assert "host_out_of_memory" in said
    assert "ran out of host memory" in said
    assert "lower `--per_device_train_batch_size`" in said
    assert read(tmp_path / "out" / "run.json")["status"] == "host_out_of_memory"


def test_an_address_space_that_is_used_up_is_host_out_of_memory(start: Start) -> None:
    run = start("--per_device_train_batch_size", "64", "--max_seq_length", "512", shell="ulimit -v 5000000")
    code, said = run.ended()
    assert (code, run.failure()["kind"]) == (3, "host_out_of_memory"), said


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before_whole(start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "out"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        run = start("--save_strategy", "steps", "--save_steps", "2", "--save_model", "false", plain=True)
        code, _ = run.ended()
        failure = run.failure()
        assert code == 1
        assert (failure["kind"], run.run()["status"]) == ("failed", "failed")
        assert f"the disk of {disk} full" in failure["message"]
        assert "make room" in failure["hint"]
        assert (disk / "checkpoint-2" / "trainer_state.json").exists()
        assert not list(disk.glob(".saving-*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_killed_rank_is_started_again_and_ends_with_the_same_losses(start: Start, tmp_path: Path) -> None:
    words = ("--save_strategy", "steps", "--save_steps", "5", "--save_total_limit", "2", "--max_steps", "60")
    run = start(*words, options=("--max-restarts", "1"))
    run.until_step(12)
    os.kill(run.pulse(1).pid, signal.SIGKILL)
    code, said = run.ended()
    assert (code, run.run()["status"]) == (0, "completed"), said
    (restart,) = run.run()["restarts"]
    assert (restart["rank"], restart["status"]) == (1, "failed")
    assert restart["resumed_from_step"] >= 5
    assert 0 <= restart["lost_steps"] <= 6  # since the last checkpoint, which the kill may have cut off
    resumed = losses(run.folder)
    run.folder.rename(tmp_path / "killed")
    assert start(*words).ended()[0] == 0
    assert resumed == losses(tmp_path / "out")
    assert len(resumed) == 60

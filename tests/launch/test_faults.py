"""Faults provoked for real on two ranks: killed, stopped, hanging, starved, diverged, a full disk, a folder in use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import ROOT, cpu_environment, losses, read

from toolkit.launch.warm_start import SERVER_VARIABLE, ForkedProcess, fork_process
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.heartbeat import Heartbeat, read_heartbeats
from toolkit.record.timeline import PARTS

pytestmark = pytest.mark.launch

# The logits alone, 128 sequences of about 140 tokens, are 3.6 GB.
LARGE_LOGITS = ("--per_device_train_batch_size", "128", "--max_seq_length", "512", "--loss", "full")


@dataclass
class Running:
    """A run under way, and what it says."""

    process: subprocess.Popen[bytes] | ForkedProcess
    folder: Path
    stderr: Path

    def said(self) -> str:
        return self.stderr.read_text()

    def steps(self, rank: int = 0) -> int:
        path = self.folder / "ranks" / f"rank{rank}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def heartbeat(self, rank: int) -> Heartbeat:
        return next(pulse for pulse in read_heartbeats(self.folder / "ranks") if pulse.rank == rank)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step and len(read_heartbeats(self.folder / "ranks")) == 2)

    def until_new_step(self, step: int) -> None:
        """A step of this start: rows of the one before are there until it keeps those up to its checkpoint."""
        old = [self.folder / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
        inodes = [path.stat().st_ino for path in old]
        self.until(lambda: all(path.stat().st_ino != inode for path, inode in zip(old, inodes, strict=True)))
        self.until_step(step)

    def restarts(self) -> int:
        return len(self.run().get("restarts") or [])

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        return self.process.wait(120), self.said()

    def failure(self) -> dict[str, Any]:
        return dict(read(self.folder / "failure.json"))

    def run(self) -> dict[str, Any]:
        return dict(read(self.folder / "run.json"))


class Starter:
    """Starts runs of many steps in one folder, by `toolkit train` or a plain `accelerate launch`.

    Launchers and ranks are forked from the session's server, unless a shell prepares them.
    """

    def __init__(self, out: Path, model: Path, dataset: Path) -> None:
        self.out, self.started = out, list[Running]()
        self.job = ["--model_name_or_path", str(model), "--dataset", str(dataset), "--max_seq_length", "64"]
        self.job += ["--max_steps", "100000", "--per_device_train_batch_size", "1", "--save_strategy", "no"]
        self.job += ["--lr_scheduler_type", "constant", "--output_dir"]

    def __call__(
        self,
        *words: str,
        options: tuple[str, ...] = (),
        preset: str = "ddp",
        plain: bool = False,
        launcher: Sequence[str] = (),
        shell: str = "",
        **more: str,
    ) -> Running:
        given = [*self.job, str(self.out), *words]
        config = str(ROOT / "accelerate_configs" / f"{preset}.yaml")
        accelerate = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
        accelerate += ["--num_processes", "2", "-m", "toolkit.train"]
        command = ["-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", *options, "--"]
        argv = [sys.executable, *(launcher or (accelerate if plain else command)), *given]
        # A forked launcher's command line does not name the preset.
        named = {"TOOLKIT_PRESET": config, "TOOLKIT_WORLD_SIZE": "2"} if plain else {}
        environment = cpu_environment() | {"OMP_NUM_THREADS": "1"} | named | more
        stderr = self.out.parent / f"{self.out.name}-stderr-{len(self.started)}"
        process: subprocess.Popen[bytes] | ForkedProcess
        with stderr.open("w") as file, Path(os.devnull).open("w") as nothing, contextlib.chdir(ROOT):
            if plain or launcher:
                streams = {"stdout": nothing.fileno(), "stderr": file.fileno()}
                process = fork_process(os.environ[SERVER_VARIABLE], argv, environment=environment, **streams)
            else:
                if shell:  # a limit is not the fork server's
                    argv = ["bash", "-c", f'{shell}; exec "$@"', "bash", *argv]
                    environment.pop(SERVER_VARIABLE)
                process = subprocess.Popen(argv, env=environment, stdout=nothing, stderr=file)
        self.started.append(Running(process, self.out, stderr))
        return self.started[-1]

    def end(self) -> None:
        """No process outlives its test."""
        for running in self.started:
            for found in [pulse.process for pulse in read_heartbeats(running.folder / "ranks")]:
                if found is not None:
                    with contextlib.suppress(psutil.Error):
                        found.kill()
            running.process.kill()
            running.process.wait()


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path / "out", tiny_model, faq_alpaca)
    yield starter
    starter.end()


# 18 rows: the last batch of an epoch is too small for two ranks. Adapters with dropout: random numbers must go on too.
STORY_STEPS = 28
STORY_LORA = ("--lora_r", "4", "--lora_dropout", "0.1")
STORY = (*STORY_LORA, "--gradient_accumulation_steps", "2", "--max_steps", str(STORY_STEPS))
STORY_SAVES = (*STORY, "--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "3")


@dataclass
class Ended:
    """How one start of the story ended: exit code, what was said, run.json, failure.json, last step of each rank."""

    code: int
    said: str
    run: dict[str, Any]
    failure: dict[str, Any]
    steps: list[int]
    checkpoints: list[str]


@dataclass
class Story:
    """One job, started three times: killed twice under `--max-restarts 1`; resumed and asked to end; resumed."""

    killed: Ended
    stopped: Ended
    completed: Ended
    losses: list[float]
    whole: list[float]
    """The losses of the run that nobody touched."""
    folder: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(faq_alpaca.read_text().splitlines()[:18]) + "\n")
    starter, whole = (Starter(folder / name, tiny_model, rows) for name in ("out", "whole"))
    try:
        run = starter(*STORY_SAVES, options=("--max-restarts", "1"))
        run.until_step(5)
        kill(run, 1)
        run.until(lambda: run.restarts() == 1)
        run.until_new_step(9)
        kill(run, 1)
        killed = end(run)
        run = starter(*STORY_SAVES, "--resume_from_checkpoint", "latest")
        run.until_new_step(10)
        run.process.send_signal(signal.SIGTERM)
        stopped = end(run)
        completed = end(starter(*STORY_SAVES, "--resume_from_checkpoint", "latest"))
        assert whole(*STORY).ended()[0] == 0
        yield Story(killed, stopped, completed, losses(starter.out), losses(whole.out), starter.out)
    finally:
        starter.end()
        whole.end()


def kill(run: Running, rank: int) -> None:
    os.kill(run.heartbeat(rank).pid, signal.SIGKILL)


def end(run: Running) -> Ended:
    code, said = run.ended()
    failure = run.failure() if (run.folder / "failure.json").exists() else {}
    checkpoints = sorted(path.name for path in run.folder.glob("*checkpoint-*"))
    return Ended(code, said, run.run(), failure, [run.steps(rank) for rank in (0, 1)], checkpoints)


def test_a_killed_rank_is_reported_with_its_step(story: Story) -> None:
    failure, step = story.killed.failure, story.killed.steps[1]
    assert (story.killed.code, failure["kind"], failure["rank"], failure["step"]) == (1, "failed", 1, step)
    assert failure["message"].startswith(f"rank 1 exited in step {step + 1}")
    assert failure["message"].endswith("killed by SIGKILL")
    assert failure["message"] in story.killed.said
    assert "--max-restarts" in story.killed.said


def test_after_a_killed_rank_the_run_restarts_from_the_newest_checkpoint(story: Story) -> None:
    (restart,) = story.killed.run["restarts"]  # one was allowed: the second kill ended the run
    assert (restart["rank"], restart["status"]) == (1, "failed")
    assert restart["message"].endswith("killed by SIGKILL")
    assert restart["resumed_from_step"] % 4 == 0
    assert 0 <= restart["lost_steps"] <= 7  # since the last checkpoint, which the kill may have cut off


def test_sigterm_saves_and_ends_all_ranks_after_the_same_step(story: Story) -> None:
    stopped = story.stopped
    assert (stopped.code, stopped.failure["kind"], stopped.run["status"]) == (1, "interrupted", "interrupted")
    step = stopped.steps[0]
    assert [step, step] == stopped.steps
    assert step == stopped.failure["step"] < STORY_STEPS
    assert f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved" in stopped.said
    assert f"checkpoint-{step}" in stopped.checkpoints


def test_a_killed_and_interrupted_run_ends_with_the_losses_of_an_undisturbed_one(story: Story) -> None:
    step = story.stopped.steps[0]
    assert (story.completed.code, story.completed.run["status"]) == (0, "completed"), story.completed.said
    assert story.completed.run["resumed_from"]["step"] == step  # the interrupted run's own checkpoint
    assert len(story.losses) == STORY_STEPS
    assert story.losses == story.whole


def test_the_goodput_of_all_starts_of_a_folder_adds_up_to_their_time(story: Story) -> None:
    (restart,), goodput = story.killed.run["restarts"], story.completed.run["goodput"]
    repeated = story.killed.steps[0] - story.stopped.run["resumed_from"]["step"]  # after the second kill
    assert goodput["lost_steps"] == restart["lost_steps"] + repeated
    assert goodput["starts"] == 4
    assert sum(goodput[f"{part}_seconds"] for part in PARTS) == pytest.approx(goodput["wall_seconds"])
    spent = ("productive", "startup", "checkpoint", "restart", "lost")
    assert all(goodput[f"{part}_seconds"] > 0 for part in spent), goodput
    rows = map(json.loads, (story.folder / "ranks" / "rank0.jsonl").read_text().splitlines())
    kept = sum(row["seconds"] for row in rows)  # of three of the four processes, which trained them
    assert goodput["productive_seconds"] + goodput["waiting_seconds"] == pytest.approx(kept, rel=1e-3)
    assert goodput["idle_seconds"] > 0  # between a start and the next
    assert story.killed.run["goodput"]["starts"] == 2
    assert "goodput " in story.killed.said


def test_a_stopped_rank_is_distinguished_from_the_one_that_waits_for_it(start: Starter) -> None:
    run = start(plain=True, TOOLKIT_HANG_TIMEOUT_MINUTES="0.05")  # the ranks end it by themselves
    run.until_step(3)
    stopped = run.heartbeat(1)
    os.kill(stopped.pid, signal.SIGSTOP)
    code, said = run.ended()
    failure = run.failure()
    assert (code, failure["kind"], failure["rank"], run.run()["status"]) == (1, "timed_out", 1, "timed_out")
    assert f"rank 1 does not respond (its process {stopped.pid} is stopped)" in said
    assert sorted(failure["stacks"]) == ["0", "1"]
    assert "in training_step" in failure["stacks"]["0"] or "in _run_epoch" in failure["stacks"]["0"]
    assert failure["stacks"]["1"] == "no answer"
    assert stopped.is_gone


def test_a_folder_in_use_is_refused_and_its_run_continues_until_sigterm_saves_it(start: Starter) -> None:
    first = start("--save_strategy", "steps", "--save_steps", "50000", plain=True, preset="zero2")
    first.until_step(1)
    before = first.run()
    code, said = start().ended()
    assert code == 2
    assert "holds a run that is still running" in said
    assert "Traceback" not in said
    alone = start(launcher=["-m", "toolkit.train"])  # no launcher looks first: the rank itself refuses
    code, said = alone.ended()
    assert code != 0
    assert "holds a run that is still running" in said
    assert not (first.folder / "failure.json").exists()
    assert first.run() == before
    steps = first.steps()
    first.until(lambda: first.steps() > steps)
    first.process.send_signal(signal.SIGTERM)
    first.ended()
    step = first.steps(0)
    assert step == first.steps(1)
    assert first.failure()["kind"] == first.run()["status"] == "interrupted"
    assert (first.folder / f"checkpoint-{step}" / "trainer_state.json").exists()


def test_a_nan_loss_ends_the_run_as_diverged(start: Starter) -> None:
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


@pytest.mark.nightly
def test_nan_weights_are_never_saved(start: Starter) -> None:
    # the update of step 2 ruins them, while its loss, computed before, is sound; one checkpoint is kept, that of step 1
    warm_up = ("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "2", "--learning_rate", "1e30")
    words = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", "--max_steps", "20")
    run = start(*words, *warm_up, "--freeze", "model.embed_tokens.*")  # else all logits are 0: finite
    code, said = run.ended()
    assert (code, run.failure()["kind"], run.run()["status"]) == (1, "diverged", "diverged")
    assert run.steps() == 2
    assert "the weights after step 2 are lost, and not saved" in said
    assert "the newest complete one is checkpoint-1" in said
    assert [path.name for path in run.folder.glob("*checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.nightly
def test_a_second_signal_during_the_save_ends_the_run_at_once_and_keeps_the_checkpoint_before(start: Starter) -> None:
    run = start("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2")
    run.until_step(4)
    stopped = run.heartbeat(1)
    while not list(run.folder.glob(".saving-*")):  # stopped between two saves: the next one, then
        os.kill(stopped.pid, signal.SIGCONT)
        run.until(lambda: list(run.folder.glob(".saving-*")))
        os.kill(stopped.pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: "a second signal ends the run at once" in run.said())
    run.process.send_signal(signal.SIGTERM)
    code, said = run.ended()
    assert (code, run.failure()["kind"], run.run()["status"]) == (1, "interrupted", "interrupted")
    assert "the newest complete one is checkpoint-" in said
    assert stopped.is_gone
    found = list_checkpoints(run.folder)
    assert found
    assert [checkpoint.problem(deep=True) for checkpoint in found] == [None] * len(found)


@pytest.mark.nightly
def test_under_torchrun_one_signalled_rank_stops_all_and_so_does_a_signal_to_every_process(start: Starter) -> None:
    """A cloud that takes one node back signals that node alone; SLURM signals every process, `tee` too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "toolkit.train"]
    words = ["--save_strategy", "steps", "--save_steps", "50000", "--resume_from_checkpoint", "latest"]
    words += ["--logging_steps", "1"]
    run = start(*words, launcher=launcher, TOOLKIT_PRESET="zero2")
    run.until_step(3)
    os.kill(run.heartbeat(1).pid, signal.SIGTERM)
    first = end(run)
    run = start(*words, launcher=launcher, TOOLKIT_PRESET="zero2")
    run.until_step(first.steps[0] + 2)
    ranks = [psutil.Process(run.heartbeat(rank).pid) for rank in (0, 1)]
    every_process = [run.process, *ranks, *(child for rank in ranks for child in rank.children(recursive=True))]
    for process in every_process:
        process.send_signal(signal.SIGTERM)
    second = end(run)
    for ended in (first, second):
        assert (ended.code, ended.run["status"], ended.failure["kind"]) == (1, "interrupted", "interrupted"), ended.said
        assert ended.steps[0] == ended.steps[1]
        assert f"checkpoint-{ended.steps[0]}" in ended.checkpoints
        assert ended.failure["message"] == f"SIGTERM ended the run after step {ended.steps[0]};" + (
            f" checkpoint-{ended.steps[0]} was saved"
        )
    assert second.run["resumed_from"]["step"] == first.steps[0]
    assert (
        f"log at step {second.steps[0]}, all ranks" in (run.folder / "train.log").read_text()
    )  # `tee` has outlived the signal


@pytest.mark.nightly
def test_an_exhausted_address_space_is_host_out_of_memory(start: Starter) -> None:
    run = start(*LARGE_LOGITS, shell="ulimit -v 5000000")
    code, said = run.ended()
    assert (code, run.failure()["kind"]) == (3, "host_out_of_memory"), said


def test_a_full_disk_is_reported_and_the_previous_checkpoint_stays_complete(start: Starter, tmp_path: Path) -> None:
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
        assert "free some space" in failure["hint"]
        assert (disk / "checkpoint-2" / "trainer_state.json").exists()
        assert not list(disk.glob(".saving-*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

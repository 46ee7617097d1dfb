"""Faults provoked for real on two ranks: killed, stopped, hanging, starved, diverged, a full disk, a folder in use."""

import contextlib
import json
import os
import re
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
from fork_server import SERVER_VARIABLE, ForkedProcess, fork_process
from launching import ROOT, cpu_environment, losses, read

from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.heartbeat import Heartbeat, read_heartbeats
from toolkit.record.timeline import PARTS

pytestmark = pytest.mark.launch


@dataclass
class Ended:
    """How one start ended: exit code, what was said, run.json, failure.json, last step of each rank, checkpoints."""

    code: int
    said: str
    run: dict[str, Any]
    failure: dict[str, Any]
    steps: list[int]
    checkpoints: list[str]

    @property
    def kinds(self) -> tuple[int, str | None, str]:
        """Exit code, kind of the failure, and final status."""
        return self.code, self.failure.get("kind"), self.run["status"]


@dataclass
class Running:
    """A run under way, and what it says."""

    process: ForkedProcess
    folder: Path
    stderr: Path

    def steps(self, rank: int = 0) -> int:
        path = self.folder / "ranks" / f"rank{rank}.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def signal(self, rank: int, number: signal.Signals) -> Heartbeat:
        found = next(pulse for pulse in read_heartbeats(self.folder / "ranks") if pulse.rank == rank)
        os.kill(found.pid, number)
        return found

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step and len(read_heartbeats(self.folder / "ranks")) == 2)

    def until_new_step(self, step: int) -> None:
        """A step of this start: rows of the one before are there until it keeps those up to its checkpoint."""
        old = [self.folder / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
        inodes = [path.stat().st_ino for path in old]
        self.until(lambda: all(path.stat().st_ino != inode for path, inode in zip(old, inodes, strict=True)))
        self.until_step(step)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def record(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        return dict(read(path)) if path.exists() else {}

    def end(self) -> Ended:
        code, said = self.process.wait(300), self.stderr.read_text()
        checkpoints = sorted(path.name for path in self.folder.glob("*checkpoint-*"))
        steps = [self.steps(rank) for rank in (0, 1)]
        return Ended(code, said, self.record("run"), self.record("failure"), steps, checkpoints)


class Starter:
    """Starts runs of many steps in one folder, by `toolkit train` or a plain `accelerate launch`.

    Launchers and ranks are forked from the session's server.
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
        with stderr.open("w") as file, Path(os.devnull).open("w") as nothing, contextlib.chdir(ROOT):
            streams = {"stdout": nothing.fileno(), "stderr": file.fileno()}
            process = fork_process(os.environ[SERVER_VARIABLE], argv, environment=environment, **streams)
        self.started.append(Running(process, self.out, stderr))
        return self.started[-1]

    def end(self) -> None:
        """No process outlives its test."""
        for running in self.started:
            for pulse in read_heartbeats(running.folder / "ranks"):
                with contextlib.suppress(psutil.Error):
                    if pulse.process is not None:
                        pulse.process.kill()
            running.process.kill()
            running.process.wait()


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path / "out", tiny_model, faq_alpaca)
    yield starter
    starter.end()


@pytest.mark.nightly
def test_a_lone_rank_that_a_signal_ended_is_named(start: Starter) -> None:
    """It has no launcher that could report it."""
    run = start(options=("--num-processes", "1"), preset="single")
    run.until(lambda: run.steps() >= 2 and read_heartbeats(run.folder / "ranks"))
    (heartbeat,) = read_heartbeats(run.folder / "ranks")
    os.kill(heartbeat.pid, signal.SIGKILL)
    ended = run.end()
    assert (ended.code, ended.failure["rank"]) == (1, 0)
    assert re.fullmatch(r"rank 0 exited in step \d+, phase \w+: killed by SIGKILL", ended.failure["message"])
    assert "`--max-restarts N` restarts by itself" in ended.failure["hint"]


# 18 rows: the last batch of an epoch is too small for two ranks. Adapters with dropout: random numbers must go on too.
STORY_STEPS = 28
STORY_LORA = ("--lora_r", "4", "--lora_dropout", "0.1")
STORY = (*STORY_LORA, "--gradient_accumulation_steps", "2", "--max_steps", str(STORY_STEPS))
STORY_SAVES = (*STORY, "--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "3")


@dataclass
class Story:
    """One job, started three times: killed twice under `--max-restarts 1`; resumed and asked to end; resumed."""

    killed: Ended
    stopped: Ended
    completed: Ended
    folder: Path
    undisturbed: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(faq_alpaca.read_text().splitlines()[:18]) + "\n")
    starter, undisturbed = (Starter(folder / name, tiny_model, rows) for name in ("out", "undisturbed"))
    try:
        run = starter(*STORY_SAVES, options=("--max-restarts", "1"))
        run.until_step(5)
        run.signal(1, signal.SIGKILL)
        run.until(lambda: len(run.record("run").get("restarts") or []) == 1)
        run.until_new_step(9)
        run.signal(1, signal.SIGKILL)
        killed = run.end()
        run = starter(*STORY_SAVES, "--resume_from_checkpoint", "latest")
        run.until_new_step(10)
        run.process.send_signal(signal.SIGTERM)
        stopped = run.end()
        completed = starter(*STORY_SAVES, "--resume_from_checkpoint", "latest").end()
        assert undisturbed(*STORY).end().code == 0
        yield Story(killed, stopped, completed, starter.out, undisturbed.out)
    finally:
        starter.end()
        undisturbed.end()


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
    stopped, step = story.stopped, story.stopped.steps[0]
    assert stopped.kinds == (1, "interrupted", "interrupted")
    assert [step, step] == stopped.steps
    assert step == stopped.failure["step"] < STORY_STEPS
    assert f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved" in stopped.said
    assert f"checkpoint-{step}" in stopped.checkpoints


def test_a_killed_and_interrupted_run_ends_with_the_losses_of_an_undisturbed_one(story: Story) -> None:
    assert story.completed.kinds == (0, None, "completed"), story.completed.said
    assert story.completed.run["resumed_from"]["step"] == story.stopped.steps[0]  # the interrupted run's own checkpoint
    assert len(losses(story.folder)) == STORY_STEPS
    assert losses(story.folder) == losses(story.undisturbed)


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


@pytest.mark.nightly
def test_a_stopped_rank_is_distinguished_from_the_one_that_waits_for_it(start: Starter) -> None:
    # The ranks end it by themselves. A step may take seconds on a busy node.
    run = start(plain=True, TOOLKIT_HANG_TIMEOUT_MINUTES="0.1")
    run.until_step(3)
    stopped = run.signal(1, signal.SIGSTOP)
    ended = run.end()
    assert (*ended.kinds, ended.failure["rank"]) == (1, "timed_out", "timed_out", 1)
    assert f"rank 1 does not respond (its process {stopped.pid} is stopped)" in ended.said
    stacks = ended.failure["stacks"]
    assert sorted(stacks) == ["0", "1"]
    assert "in training_step" in stacks["0"] or "in _run_epoch" in stacks["0"]
    assert stacks["1"] == "no answer"
    assert stopped.is_gone


@pytest.mark.nightly
def test_a_folder_in_use_is_refused_and_its_run_continues_until_sigterm_saves_it(start: Starter) -> None:
    first = start("--save_strategy", "steps", "--save_steps", "50000", plain=True, preset="zero2")
    first.until_step(1)
    before = first.record("run")
    alone = ["-m", "toolkit.train"]  # no launcher looks first: the rank itself refuses
    refused = [start().end(), start(launcher=alone).end()]
    assert refused[0].code == 2
    assert refused[1].code != 0
    assert all("holds a run that is still running" in each.said for each in refused)
    assert "Traceback" not in refused[0].said
    assert (first.record("failure"), first.record("run")) == ({}, before)
    steps = first.steps()
    first.until(lambda: first.steps() > steps)
    first.process.send_signal(signal.SIGTERM)
    ended = first.end()
    assert ended.steps[0] == ended.steps[1]
    assert ended.kinds[1:] == ("interrupted", "interrupted")
    assert (first.folder / f"checkpoint-{ended.steps[0]}" / "trainer_state.json").exists()


# The learning rate is 0 in the first step, and ruins the weights in the second.
DIVERGES = ("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "2", "--learning_rate", "1e30")
DIVERGES += ("--save_strategy", "steps", "--save_steps", "1", "--max_steps", "20")


def test_a_nan_loss_ends_the_run_as_diverged(start: Starter) -> None:
    ended = start(*DIVERGES).end()
    failure = ended.failure
    assert ended.kinds == (1, "diverged", "diverged")
    assert f"nan at step {failure['step']}" in failure["message"]
    assert len(failure["rows"]) == len(failure["places"])
    assert "checkpoint-1" in ended.checkpoints
    assert f"checkpoint-{failure['step']}" not in ended.checkpoints
    assert "lower `--learning_rate`" in ended.said


@pytest.mark.nightly
def test_nan_weights_are_never_saved(start: Starter) -> None:
    # the loss of step 2, computed before its update, is sound; with embeddings that train all logits would be 0: finite
    ended = start(*DIVERGES, "--save_total_limit", "1", "--freeze", "model.embed_tokens.*").end()
    assert ended.kinds == (1, "diverged", "diverged")
    assert ended.steps[0] == 2
    assert "the weights after step 2 are lost, and not saved" in ended.said
    assert "the newest complete one is checkpoint-1" in ended.said
    assert ended.checkpoints == ["checkpoint-1"]


@pytest.mark.nightly
def test_a_second_signal_during_the_save_ends_the_run_at_once_and_keeps_the_checkpoint_before(start: Starter) -> None:
    run = start("--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "2")
    run.until_step(4)
    stopped = run.signal(1, signal.SIGCONT)
    while not list(run.folder.glob(".saving-*")):  # stopped between two saves: the next one, then
        run.signal(1, signal.SIGCONT)
        run.until(lambda: list(run.folder.glob(".saving-*")))
        run.signal(1, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: "a second signal ends the run at once" in run.stderr.read_text())
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.kinds == (1, "interrupted", "interrupted")
    assert "the newest complete one is checkpoint-" in ended.said
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
    run.signal(1, signal.SIGTERM)
    first = run.end()
    run = start(*words, launcher=launcher, TOOLKIT_PRESET="zero2")
    run.until_step(first.steps[0] + 2)
    ranks = [psutil.Process(pulse.pid) for pulse in read_heartbeats(run.folder / "ranks")]
    for process in [run.process, *ranks, *(child for rank in ranks for child in rank.children(recursive=True))]:
        process.send_signal(signal.SIGTERM)
    second = run.end()
    for ended in (first, second):
        step = ended.steps[0]
        assert ended.kinds == (1, "interrupted", "interrupted"), ended.said
        assert ended.steps == [step, step]
        assert f"checkpoint-{step}" in ended.checkpoints
        assert ended.failure["message"] == f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved"
    assert second.run["resumed_from"]["step"] == first.steps[0]
    # `tee` has outlived the signal
    assert f"step {second.steps[0]}/" in (run.folder / "train.log").read_text()


def test_a_full_disk_is_reported_and_the_previous_checkpoint_stays_complete(start: Starter, tmp_path: Path) -> None:
    disk = tmp_path / "out"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        ended = start("--save_strategy", "steps", "--save_steps", "2", "--save_model", "false", plain=True).end()
        assert ended.kinds == (1, "failed", "failed")
        assert f"the disk of {disk} full" in ended.failure["message"]
        assert "free some space" in ended.failure["hint"]
        assert (disk / "checkpoint-2" / "trainer_state.json").exists()
        assert not list(disk.glob(".saving-*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

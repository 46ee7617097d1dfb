"""SIGTERM to one of two ranks at any moment: a checkpoint of the last finished step, or at once what there is."""

import socket
import threading
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, accelerate_launch, losses, nightly, read, torchrun_observed

from toolkit.observe import signals
from toolkit.observe.progress import Progress
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import RunFolder

pytestmark = pytest.mark.launch

# Adapters with dropout: the resumed run must draw the same random numbers.
STEPS = 5
JOB = ("--max_seq_length", "64", "--per_device_train_batch_size", "1", "--learning_rate", "1e-3", "--lora_r", "4")
JOB += ("--lora_dropout", "0.1", "--max_steps", str(STEPS), "--val_size", "80", "--per_device_eval_batch_size", "1")
JOB += ("--eval_strategy", "steps", "--eval_steps", "2", "--save_model", "false")
SAVES = ("--save_strategy", "steps", "--save_steps", "2")
# What takes this long in a test has ended early if the run ends.
LONG_SECONDS = "600"
PREDICTION = "toolkit.train.trainer:SupervisedTrainer.prediction_step"


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    return ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), *JOB]


def launch(*words: str, preset: str = "ddp", signal_at: str | None = None, **how: Any) -> CompletedProcess[str]:
    if signal_at is not None:
        how |= {"script": "signal_at", "variables": {"TOOLKIT_SIGNAL_AT": signal_at}}
    return accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words, **how)


def message(out: Path) -> str:
    failure, status = read(out / "failure.json"), read(out / "run.json")["status"]
    assert (failure["kind"], status) == ("interrupted", "interrupted")
    return str(failure["message"])


def complete_steps(out: Path) -> list[int]:
    found = list_checkpoints(out)
    assert [checkpoint.problem(deep=True) for checkpoint in found] == [None] * len(found)
    assert not list(out.glob(".saving-*"))
    return [checkpoint.step for checkpoint in found]


def trained_steps(out: Path) -> list[int]:
    return [len((out / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "fsdp2"])
def test_an_evaluation_ends_early_and_its_step_is_saved(preset: str, job: list[str], tmp_path: Path) -> None:
    out, words = tmp_path / "out", [*job, "--save_strategy", "steps", "--save_steps", "100"]
    ended = launch(*words, "--output_dir", str(out), preset=preset, signal_at=f"{PREDICTION}:3:2")
    assert ended.returncode == 1
    assert message(out) == "SIGTERM ended the run after step 2; checkpoint-2 was saved"
    assert "SIGTERM: the evaluation ends early, and checkpoint-2 is saved" in ended.stdout
    assert complete_steps(out) == [2]
    assert trained_steps(out) == [2, 2]
    assert "evaluations" not in read(out / "run.json")
    if preset != "ddp":
        again = launch(*words, "--output_dir", str(out), "--resume_from_checkpoint", "latest", preset=preset)
        whole = launch(*words, "--output_dir", str(tmp_path / "whole"), preset=preset)
        assert (again.returncode, whole.returncode) == (0, 0), again.stderr[-3000:]
        assert losses(out) == losses(tmp_path / "whole")
        evaluated, expected = (read(folder / "run.json")["evaluations"] for folder in (out, tmp_path / "whole"))
        assert evaluated == expected[1:]  # after steps 4 and 5
        saved = [save["step"] for save in read(out / "run.json")["saves"] if save["kind"] == "checkpoint"]
        assert saved[-1] == 5


@pytest.mark.nightly
def test_the_last_evaluation_ends_early_and_the_run_completes(job: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*job, *SAVES, "--max_steps", "2", "--save_model", "true", "--output_dir", str(out)]
    ended = launch(*words, signal_at=f"{PREDICTION}:3:2")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "SIGTERM: the evaluation ends early, and checkpoint-2 is saved" in ended.stdout
    assert complete_steps(out) == [2]
    run = read(out / "run.json")
    assert (run["status"], run.get("evaluations")) == ("completed", None)
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("preset", nightly("zero2", "ddp", "fsdp2"))
def test_a_save_in_progress_is_completed_and_not_repeated(preset: str, job: list[str], tmp_path: Path) -> None:
    out, words = tmp_path / "out", [*job, "--eval_strategy", "no", *SAVES]
    variables = {"TOOLKIT_SIGNAL": "SIGTERM:2:checksums:1"}
    ended = launch(*words, "--output_dir", str(out), preset=preset, script="signal_while_writing", variables=variables)
    assert ended.returncode == 1
    assert message(out) == "SIGTERM ended the run after step 2; checkpoint-2 was saved"
    assert "SIGTERM: checkpoint-2 is completed, and the run ends" in ended.stdout
    assert complete_steps(out) == [2]
    assert trained_steps(out) == [2, 2]


@pytest.mark.nightly
def test_a_stopped_run_keeps_its_newest_checkpoint_beside_the_best(job: list[str], tmp_path: Path) -> None:
    """At its end the Trainer removes all checkpoints but the best under `--save_total_limit 1`."""
    out, words = tmp_path / "out", [*job, "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "1"]
    words += ["--val_size", "4", "--load_best_model_at_end", "true", "--metric_for_best_model", "loss"]
    words += ["--greater_is_better", "true", "--output_dir", str(out)]  # so that the first is the best
    variables = {"TOOLKIT_SIGNAL": "SIGTERM:4:checksums:1"}
    assert launch(*words, script="signal_while_writing", variables=variables).returncode == 1
    assert message(out) == "SIGTERM ended the run after step 4; checkpoint-4 was saved"
    assert complete_steps(out) == [4, 2]


BEFORE = {
    "tokenising": ("toolkit.train.script:load_data", "before the first step (phase data)"),
    "loading the model": ("toolkit.train.script:load_model", "before the first step (phase load)"),
    # The rank that reports it may not have asked for its batch yet.
    "the first batch": (
        "toolkit.observe.batches:ObservedCollator.__call__",
        *("in step 1 (phase data)", "in step 1 (phase train)"),
    ),
    "compiling": ("torch._inductor.compile_fx:compile_fx", "in step 1 (phase forward)"),
}


@pytest.mark.parametrize("moment", nightly("tokenising", "compiling", "loading the model", "the first batch"))
def test_before_a_step_is_finished_the_run_ends_at_once(moment: str, job: list[str], tmp_path: Path) -> None:
    out, (function, *places) = tmp_path / "out", BEFORE[moment]
    more = ["--torch_compile", "true"] if moment == "compiling" else []
    words = [*job, *more, *SAVES, "--output_dir", str(out)]
    ended = launch(*words, signal_at=f"{function}:1:{LONG_SECONDS}")
    assert ended.returncode == 1
    nothing = "no step was finished, so there is nothing to save"
    assert message(out) in [f"SIGTERM ended the run {place}; {nothing}" for place in places]
    assert "there is no complete checkpoint: a restart begins at step 0" in ended.stderr
    assert complete_steps(out) == []


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["tokenising", "the first batch"])
def test_a_resumed_run_names_the_newest_checkpoint(moment: str, job: list[str], tmp_path: Path) -> None:
    out, function = tmp_path / "out", BEFORE[moment][0]
    words = [*job, "--eval_strategy", "no", *SAVES, "--output_dir", str(out)]
    launch(*words, script="signal_while_writing", variables={"TOOLKIT_SIGNAL": "SIGTERM:2:checksums:1"})
    ended = launch(*words, "--resume_from_checkpoint", "latest", signal_at=f"{function}:1:{LONG_SECONDS}")
    assert ended.returncode == 1
    assert message(out).endswith("no step was finished, so there is nothing to save")
    assert "`--resume_from_checkpoint latest` resumes: the newest complete one is checkpoint-2" in ended.stderr
    assert complete_steps(out) == [2]


@pytest.mark.nightly
def test_while_a_batch_is_awaited_the_newest_checkpoint_is_named_and_the_step_is_saved(
    job: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [*job, "--eval_strategy", "no", *SAVES, "--output_dir", str(out)]
    ended = launch(*words, signal_at=f"{BEFORE['the first batch'][0]}:5:3")
    announced = ended.stdout.index("SIGTERM: all ranks end after step ")
    assert ended.returncode == 1
    step = complete_steps(out)[0]
    assert message(out) == f"SIGTERM ended the run after step {step}; checkpoint-{step} was saved"
    assert f"all ranks end after step {step}, and save it; until then the newest complete one is" in ended.stdout
    assert announced < ended.stdout.rindex(f"step {step}/{STEPS}")


def observed(tmp_path: Path, mode: str) -> tuple[CompletedProcess[str], float]:
    began = time.monotonic()
    words = ["--output-dir", str(tmp_path / "run"), "--stop-on-signal", "--complete-saves"]
    ended = torchrun_observed(*words, str(SCRIPTS / "somebodys.py"), mode, str(tmp_path / "out"))
    return ended, time.monotonic() - began


@pytest.mark.parametrize("mode", ["evaluates", *nightly("prepares")])
def test_a_script_of_somebody_ends_in_the_same_way(mode: str, tmp_path: Path) -> None:
    ended, seconds = observed(tmp_path, mode)
    assert ended.returncode == 1
    if mode == "evaluates":
        assert message(tmp_path / "run") == "SIGTERM ended the run after step 2; checkpoint-2 was saved"
        assert complete_steps(tmp_path / "out") == [2]
        assert "done: " not in ended.stdout
    else:
        where = "before the first step (phase start)"
        assert (
            message(tmp_path / "run")
            == f"SIGTERM ended the run {where}; no step was finished, so there is nothing to save"
        )
        assert seconds < 60


def test_a_rank_that_cannot_hear_of_a_stop_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the first sign is a run that ends without a checkpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))  # where nothing listens any more
    monkeypatch.setattr(signals, "ANSWER_SECONDS", 0.5)
    stop = signals.StopOnSignal(Progress(attempt_id="a"), RunFolder(tmp_path), rank=1, world_size=2)
    stop.follow(stop.progress)
    for thread in threading.enumerate():
        if thread.name == "stop-with-others":
            thread.join(timeout=60)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: rank 1 does not hear of a stop that another rank is told of (")
    assert warning.endswith("): signal every rank, or no checkpoint is saved\n")

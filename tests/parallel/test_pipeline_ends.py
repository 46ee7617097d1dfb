"""A pipeline that does not simply run to its end: signals, exhausted memory, the best checkpoint, another schedule."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, nightly_launch, read
from split_runs import RUNS, losses_and_norms
from split_runs import launch as launch_run

from toolkit.record.checkpoints import list_checkpoints

CONFIG = ROOT / "accelerate_configs" / "pipeline_1f1b.yaml"


@pytest.fixture
def job(split_models: Path, split_rows: Path, tmp_path: Path) -> list[str]:
    words = ["--model_name_or_path", str(split_models / "llama_tied"), "--dataset", str(split_rows)]
    words += ["--max_seq_length", "64", "--pp", "2", "--per_device_train_batch_size", "4"]
    words += ["--gradient_accumulation_steps", "2", "--learning_rate", "5e-3", "--save_strategy", "no"]
    return [*words, "--max_steps", "6", "--output_dir", str(tmp_path / "out")]


@pytest.mark.launch
def test_sigterm_ends_all_stages_with_a_checkpoint_after_the_same_step(job: list[str], tmp_path: Path) -> None:
    words = [*job, "--max_steps", "40", "--save_strategy", "steps", "--save_steps", "2"]
    variables = {"TOOLKIT_SIGNAL": "SIGTERM:2:checksums:1"}
    ended = accelerate_launch(CONFIG, *words, script="signal_while_writing", variables=variables)
    failure = read(tmp_path / "out" / "failure.json")
    assert (ended.returncode, failure["kind"]) == (1, "interrupted"), ended.stderr[-3000:]
    found = list_checkpoints(tmp_path / "out")
    assert found[0].step == failure["step"]
    assert [checkpoint.problem(deep=True) for checkpoint in found] == [None] * len(found)
    states = [path.name for path in found[0].path.glob("optimizer_stage*")]
    assert sorted(states) == ["optimizer_stage0.pt", "optimizer_stage1.pt"]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("schedule", "step"), [("1f1b", 2), pytest.param("interleaved_1f1b", 1, marks=pytest.mark.nightly)]
)
def test_memory_that_runs_out_in_a_stage_is_reported_as_that(
    schedule: str, step: int, job: list[str], split_models: Path, tmp_path: Path
) -> None:
    words = [*job, "--pipeline_schedule", schedule, "--model_name_or_path", str(split_models / "llama_deep")]
    ended = accelerate_launch(CONFIG, *words, script="stage_out_of_memory")
    failure = read(tmp_path / "out" / "failure.json")
    assert (failure["kind"], failure["rank"]) == ("host_out_of_memory", 1), ended.stderr[-3000:]
    assert failure["phase"] == "forward"
    assert failure["message"].startswith(f"rank 1 ran out of host memory in phase forward, step {step}: RuntimeError: ")
    assert read(tmp_path / "out" / "run.json")["status"] == "host_out_of_memory"


@nightly_launch
def test_the_best_checkpoint_is_loaded_into_all_stages_at_the_end(
    job: list[str], split_rows: Path, tmp_path: Path
) -> None:
    words = [*job, "--eval_dataset", str(split_rows), "--eval_strategy", "steps", "--eval_steps", "2"]
    words += ["--save_strategy", "steps", "--save_steps", "2", "--load_best_model_at_end", "true"]
    words += ["--greater_is_better", "true"]  # so that the first is the best
    ended = accelerate_launch(CONFIG, *words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kept = {each.step: read(each.path / "manifest.json")["fingerprint"] for each in list_checkpoints(tmp_path / "out")}
    assert kept[2]["logits"] != kept[6]["logits"]
    assert read(tmp_path / "out" / "fingerprint.json")["logits"] == kept[2]["logits"]


@nightly_launch
def test_a_pipeline_resumes_exactly_under_another_schedule_of_the_same_stages(
    run_folder: Callable[[str], Path], split_models: Path, split_rows: Path, tmp_path: Path
) -> None:
    resumed = replace(RUNS["pipeline"], words=("--pipeline_schedule", "gpipe"))
    checkpoint = run_folder("pipeline") / "checkpoint-1"
    launch_run(resumed, models=split_models, rows=split_rows, folder=tmp_path / "out", checkpoint=checkpoint)
    losses, norms = losses_and_norms(run_folder("pipeline"))
    assert losses_and_norms(tmp_path / "out") == (losses[1:], norms[1:])

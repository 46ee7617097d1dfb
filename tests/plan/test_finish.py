"""Steps, hours and dollars until a job has trained on its data."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG

from toolkit.errors import ToolkitError
from toolkit.plan.config_file import configured_plan
from toolkit.plan.finish import Work, read_prices, work_of
from toolkit.plan.methods import Method
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob

Capsys = pytest.CaptureFixture[str]
WORDS = ["plan", str(LLAMA_8B_CONFIG), "--gpu", "h100", "--num-processes", "8", "--preset", "zero3"]
JOB = PlannedJob(max_seq_length=100, per_device_train_batch_size=2, gradient_accumulation_steps=3)


def rows(folder: Path, count: int) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "two words"}) + "\n" for _ in range(count)))
    return file


@pytest.mark.parametrize(
    ("work", "steps"),
    [
        (Work(max_steps=7, tokens=10**9), 7),
        (Work(rows=9), 1),  # 2 groups x 2 rows: 3 batches, one step of 3
        (Work(rows=13), 2),  # 4 batches: the second step has one
        (Work(rows=13, epochs=3), 6),  # a step does not go on into the next epoch
        (Work(tokens=1201), 2),  # 13 rows of 100
        (Work(rows=13, epochs=0.5), 1),
    ],
)
def test_steps_are_counted_as_the_trainer_counts_them(work: Work, steps: int) -> None:
    assert work.steps(JOB, groups=2) == steps


def test_hours_are_steps_and_dollars_are_hours_of_all_gpus(capsys: Capsys) -> None:
    words = [*WORDS, "--dataset-tokens", "81920000", "--price-per-gpu-hour", "h100=2.5"]
    words += ["--per-device-train-batch-size", "1"]
    [row] = json_of(words, capsys)["plans"]
    finish = row["finish"]
    assert finish["steps"] == 10_000  # 8 rows of 1,024 tokens
    assert finish["hours_range"] == pytest.approx([each * 10_000 / 3600 for each in row["step_seconds"]])
    assert finish["hours_range"][0] < finish["hours"] < finish["hours_range"][1]
    assert finish["dollars"] == pytest.approx(finish["hours"] * 8 * 2.5)
    assert row["dollars_per_million_tokens"] == pytest.approx(finish["dollars"] / 81.92)


def test_the_rows_of_a_data_file_are_counted(tmp_path: Path, capsys: Capsys) -> None:
    words = [*WORDS, "--dataset", str(rows(tmp_path, 33)), "--per-device-train-batch-size", "1"]
    assert json_of(words, capsys)["plans"][0]["finish"]["steps"] == 5
    code, out, _ = run_command([*words, "--price-per-gpu-hour", "2"], capsys)
    assert code == 0
    assert "To finish 1 x 33 rows of data, each planned at full length" in out
    assert "expect the upper end:\n" in out
    assert re.search(r"tokens/s per GPU +\$ per M$", out, re.MULTILINE)
    assert re.search(r"^8 x h100-sxm  zero3  5 steps  \d\.\d to \d\.\d min  \$0\.\d+ to \$0\.\d+$", out, re.MULTILINE)


def test_a_recommendation_has_the_hours_and_the_dollars_of_the_data(capsys: Capsys) -> None:
    words = ["recommend", *WORDS[1:], "--global-batch-size", "8", "--dataset-tokens", "81920000"]
    words += ["--price-per-gpu-hour", "2.5", "--num-train-epochs", "2"]
    choice = json_of(words, capsys)["choice"]
    finish = choice["finish"]
    assert finish["steps"] == 20_000
    assert finish["hours_range"] == pytest.approx([each * 20_000 / 3600 for each in choice["step_seconds"]])
    assert finish["dollars_range"] == pytest.approx([each * 8 * 2.5 for each in finish["hours_range"]])
    out = run_command(words, capsys)[1]
    total = (
        r"^total     \d+\.\d to \d+\.\d h, \$\d+\.\d\d to \$\d+\.\d\d \(expect the upper end\): 20,000 steps for 2 x "
    )
    assert re.search(f"{total}81,920,000 tokens$", out, re.MULTILINE)
    assert re.search(r"^price     \$0\.\d{3} to \$0\.\d{3} per million tokens ", out, re.MULTILINE)


def test_without_data_steps_or_a_price_nothing_is_made_up(capsys: Capsys) -> None:
    [row] = json_of(WORDS, capsys)["plans"]
    assert (row["finish"], row["price_per_gpu_hour"], row["dollars_per_million_tokens"]) == (None, None, None)


def test_packed_rows_are_counted_with_the_models_tokenizer(tmp_path: Path, tiny_model: Any) -> None:
    options = PlanOptions(dataset=rows(tmp_path, 10))
    work = work_of(options, PlannedJob(packing=True), str(tiny_model))
    assert 20 <= work.tokens <= 90  # two words, ten times
    with pytest.raises(ToolkitError, match="has no tokenizer"):
        work_of(options, PlannedJob(packing=True), str(LLAMA_8B_CONFIG))


@pytest.mark.parametrize(
    ("method", "counted", "steps"),
    [
        ("dpo", Work(tokens=2401), 3),  # 13 pairs of two rows of 100: 7 batches on one group
        ("kto", Work(tokens=2401), 5),
        ("grpo", Work(rows=3), 4),  # 8 completions of each prompt
    ],
)
def test_a_pair_has_two_rows_and_a_prompt_as_many_as_are_generated(method: str, counted: Work, steps: int) -> None:
    assert counted.steps(replace(JOB, method=Method(method=method)), groups=1) == steps


def test_the_rows_of_somebodys_preferences_are_counted_whatever_their_columns(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"chosen": "a", "rejected": "b"}\n' * 7)
    assert work_of(PlanOptions(dataset=file), PlannedJob(method=Method(method="dpo")), "MODEL") == Work(rows=7)


def test_rows_with_columns_of_another_name_are_counted(tmp_path: Path, tiny_model: Any) -> None:
    file, config = tmp_path / "rows.jsonl", tmp_path / "job.yaml"
    file.write_text('{"question": "a", "answer": "b"}\n' * 7)
    options = PlanOptions(dataset=file, column=("instruction=question", "output=answer"))
    assert work_of(options, PlannedJob(), "MODEL") == Work(rows=7)
    packed = work_of(options, PlannedJob(packing=True), str(tiny_model))
    assert packed.tokens == 14
    with pytest.raises(ToolkitError, match="fields found: question, answer"):
        work_of(PlanOptions(dataset=file), PlannedJob(), "MODEL")
    config.write_text(
        f"model_name_or_path: MODEL\ndataset: {file}\ncolumn: {{instruction: question, output: answer}}\n"
    )
    assert configured_plan(config, None, PlanOptions(), given=()).options.column == options.column


def test_tokens_do_not_say_how_many_prompts_there_are() -> None:
    with pytest.raises(ToolkitError, match="does not say how many prompts grpo generates from"):
        work_of(PlanOptions(dataset_tokens=10), PlannedJob(method=Method(method="grpo")), "MODEL")


def test_precomputing_takes_the_forwards_of_one_epoch_and_no_time_of_a_step(capsys: Capsys) -> None:
    words = [*WORDS, "--per-device-train-batch-size", "1", "--dataset-tokens", "1_000_000", "--num-train-epochs", "3"]
    found = [json_of([*words, "--method", "dpo", *more], capsys) for more in ([], ["--precompute-ref-log-probs"])]
    (during,), (before,) = (each["plans"] for each in found)
    scored = during["step_seconds_estimate"] - before["step_seconds_estimate"]
    # 62 steps of 8 pairs; under ZeRO-3, a forward during training gathers the reference besides
    assert 0 < before["finish"]["precompute_hours"] <= 62 * scored / 3600
    assert during["finish"]["precompute_hours"] == 0
    expected = before["finish"]["steps"] * before["step_seconds_estimate"] / 3600 + before["finish"]["precompute_hours"]
    assert before["finish"]["hours"] == pytest.approx(expected)


def test_people_read_that_generation_is_not_in_the_time(capsys: Capsys) -> None:
    _, out, _ = run_command([*WORDS, "--method", "grpo", "--max-steps", "10"], capsys)
    assert "10 steps  at least " in out
    assert "without generation, which is not planned" in out


def test_prices_are_read_by_name_and_refused_if_they_are_none() -> None:
    assert read_prices(["h100=2.5", "1"]) == {"h100-sxm": 2.5, "": 1.0}
    for word in ("cheap", "h100=-1", "h100=nan"):
        with pytest.raises(ToolkitError, match="expected a number below a million"):
            read_prices([word])
    with pytest.raises(ToolkitError, match="unknown GPU"):
        read_prices(["h1000=2"])

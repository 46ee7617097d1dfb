"""The comparison with other programs: what each is given, how a run is read, and that two of them train the same."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, cpu_environment, nightly_launch, run_warm

from toolkit.convert.conversion import convert_file

sys.path[:0] = [str(ROOT / "benchmarks")]

from peer_jobs import comparison  # noqa: E402
from peer_jobs.commands import PROGRAMS, Launch  # noqa: E402
from peer_jobs.job import LORA_R, Job, Setting  # noqa: E402

SETTING = Setting(steps=4, untimed_steps=2, max_length=8)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("peer_jobs.commands.tokenized_rows", lambda _: '{"input_ids": [1, 2]}\n')
    model, rows = tmp_path / "model", tmp_path / "rows" / "train.jsonl"
    model.mkdir()
    rows.parent.mkdir()
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    return Job(preset="zero2", method="lora", setting=SETTING, model=model, rows=rows)


def launch_of(program: str, job: Job) -> Launch:
    return PROGRAMS[program](job, "python", Path("run"))


@pytest.mark.parametrize("program", ["llamafactory", "axolotl"])
def test_another_programs_file_describes_the_job_as_our_converter_reads_it(
    program: str, job: Job, tmp_path: Path
) -> None:
    for name, text in launch_of(program, job).files.items():
        (tmp_path / name).write_text(text.replace("run/deepspeed.json", str(tmp_path / "deepspeed.json")))
    found = convert_file(tmp_path / "job.yaml", "llama-factory" if program == "llamafactory" else program).arguments
    assert found["model_name_or_path"] == str(job.model)
    assert (found["max_steps"], found["per_device_train_batch_size"]) == (4, 2)
    assert float(found["learning_rate"]) == Setting().learning_rate
    assert (found["max_seq_length"], found["lora_r"], found["lora_alpha"]) == (8, LORA_R, 2 * LORA_R)


LOSSES = [4.0, 3.0, 2.0, 1.0]


def figures(losses: list[float], *, engine: str = "ddp", ranks: int = 2) -> dict[str, Any]:
    """A run of steps that end a second apart, each after half a second of processor time on every rank."""
    steps = [{"step": n + 1, "time": 100.0 + n, "cpu_seconds": 3 + n / 2, "loss": x} for n, x in enumerate(losses)]
    steps[0] |= {"engine": engine, "trained_parameters": 10, "trained_dtypes": ["torch.float32"]}
    steps[0] |= {"activation_checkpointing": False}
    run = {"ranks": [steps] * ranks, "started": 90.0, "cpu_seconds": 8.0, "peak_pss_bytes": 5}
    return comparison.figures(run, untimed_steps=2, tokens_per_step=32)


def test_figures_count_the_timed_steps_and_the_processor_time_of_every_rank() -> None:
    found = figures(LOSSES)
    assert found["tokens_per_second"] == 2 * 32 / 2
    assert found["tokens_per_cpu_second"] == 2 * 32 / (2 * 2 * 0.5)
    assert found["first_step_seconds"] == 10


@pytest.mark.parametrize(
    ("losses", "changes", "difference"),
    [
        ([4.0, 3.0, 2.01, 1.0], {}, None),
        ([3.5, 2.625, 1.75, 0.875], {}, None),  # divided by the 8 tokens of a row, not by the 7 predicted
        ([4.1, 3.0, 2.0, 1.0], {}, "first loss 4.1000, bare Trainer: 4.0000"),
        ([4.0, 3.0, 2.0, 1.2], {}, "losses differ by up to 20.0%: last 1.2000, bare: 1.0000"),
        ([4.0, 3.0, 2.0], {}, "3 steps with a loss, bare Trainer: 4"),
        (LOSSES, {"engine": "fsdp2"}, "ran as fsdp2"),
        (LOSSES, {"ranks": 1}, "1 of 2 ranks trained"),
    ],
)
def test_a_run_that_trained_something_else_is_not_the_same_job(
    losses: list[float], changes: dict[str, Any], difference: str | None, job: Job
) -> None:
    ddp = dataclasses.replace(job, preset="ddp", method="full")
    found = comparison.differences(figures(losses, **changes), figures(LOSSES), ddp)
    assert found == ([] if difference is None else [difference])


@nightly_launch
@pytest.mark.parametrize("turns", [[], ["--in-turns"]], ids=["one by one", "in turns"])
def test_a_bare_trainer_and_the_toolkit_train_the_same_job(turns: list[str], tmp_path: Path) -> None:
    words = [*turns, "--work", str(tmp_path / "work"), "--peers", "bare", "toolkit", "--jobs", "single-full"]
    words += ["--repeats", "1", "--steps", "3", "--untimed-steps", "1", "--batch-size", "1", "--max-length", "32"]
    words += ["--name", str(tmp_path / "result")]
    argv = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *words]
    ended = run_warm(argv, cpu_environment())  # each of its runs is started cold
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    _, *rows = map(json.loads, (tmp_path / "result.jsonl").read_text().splitlines())
    assert [(row["program"], row.get("differences")) for row in rows] == [("bare", []), ("toolkit", [])]
    assert all(row["facts"]["engine"] == "single" for row in rows)

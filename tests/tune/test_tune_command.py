"""`toolkit tune` as its user runs it: real trials, a budget, resume, invalid input, and a dry run."""

import json
from pathlib import Path

import pytest
import typer
from command_line import run_command
from comparison_records import trial
from launching import read, toolkit

from toolkit import installation
from toolkit.compare.ledger import Ledger
from toolkit.job.job import Job
from toolkit.plan import planner
from toolkit.presets import load_preset
from toolkit.tune.commands import run_tune
from toolkit.tune.field import YOURS
from toolkit.tune.options import PARTS, TuneOptions


@pytest.mark.nightly
@pytest.mark.launch
def test_a_search_ends_with_its_budget_resumes_and_names_the_command_to_copy(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """Three settings: the user's own, smaller batches with accumulation, and activation checkpointing."""
    folder = tmp_path / "tune"
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    job += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--output_dir", str(tmp_path / "mine")]
    options = ["--num-processes", "2", "--cpu", "--keep", "preset", "--keep", "loss", "--keep", "compile"]
    options += ["--max-settings", "3", "--rounds", "2", "--trial-steps", "6", "--output-dir", str(folder)]
    words = ["tune", *options, "--", *job]

    first = toolkit(*words[:1], "--budget-minutes", "0.01", "--json", *words[1:])
    assert first.returncode == 0, first.stderr
    stopped = json.loads(first.stdout)
    assert stopped["ended"] == "the budget of 0.0 minutes, in round 1"
    assert stopped["winner"] == "yours"
    assert [each["outcome"] for each in stopped["settings"]] == ["left", "not_tried", "not_tried"]
    again = toolkit(*words)
    assert (again.returncode, "already holds a comparison" in again.stderr) == (2, True)
    other = toolkit(*words[:1], "--resume", *words[1:], "--seed", "7")
    assert (other.returncode, "holds another comparison" in other.stderr) == (2, True)

    ended = toolkit(*words[:1], "--resume", *words[1:])
    assert ended.returncode == 0, ended.stderr
    result = read(folder / "tune.json")
    records = Ledger(folder / "ledger.jsonl").read()
    assert len(records) == 6  # of which the first search ran one
    settings = {each["name"]: each for each in result["settings"]}
    assert list(settings) == ["yours", "ddp_b1x2", "ddp_b2x1_checkpointing"]
    assert all(each["outcome"] in ("left", "eliminated") and each["trials"] == 2 for each in settings.values())
    assert settings["ddp_b1x2"]["ratio_interval"][0] < settings["ddp_b1x2"]["ratio_to_yours"]
    assert f"fastest   {result['winner']}" in ended.stdout
    preset, _, arguments = result["command"].partition(" -- ")
    assert preset == "toolkit train --preset ddp --num-processes 2 --cpu"
    trained = Job.from_argv(arguments.split())
    assert trained.output_dir == str(tmp_path / "mine")
    assert trained.per_device_train_batch_size * trained.gradient_accumulation_steps == 2
    report = toolkit("report", str(folder))
    assert (report.returncode, "Interrupted" in report.stdout, "tune.json has" in report.stderr) == (0, False, True)


def test_a_dry_run_for_another_gpu_prints_what_is_pruned_and_the_time(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "128"]
    words = ["tune", "--dry-run", "--gpu", "h100", "--num-processes", "8", "--keep", "loss", "--output-dir"]
    shown = toolkit(*words, str(tmp_path / "tune"), "--", *job, "--per_device_train_batch_size", "1")
    assert shown.returncode == 0, shown.stderr
    assert "not tried, cannot win:" in shown.stdout
    assert "two rounds take" in shown.stdout
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"status": "out_of_memory", "message": "CUDA out of memory"}, 3),
        ({"status": "failed", "message": "a rank was killed"}, 1),
        ({}, None),
    ],
    ids=["all ran out of memory", "all failed", "completed"],
)
def test_a_search_whose_trials_are_in_the_ledger_starts_nothing_and_ends_as_they_did(
    changes: dict[str, str], code: int | None, tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    job = ("--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64")
    options = TuneOptions(
        output_dir=tmp_path,
        num_processes=2,
        cpu=True,
        resume=True,
        rounds=2,
        max_settings=2,
        keep=("preset", "checkpointing", "attention", "loss", "compile"),
        training_arguments=(*job, "--per_device_train_batch_size", "2"),
    )
    for repeat in range(2):
        for number, name in enumerate((YOURS, "ddp_b1x2")):
            Ledger(tmp_path / "ledger.jsonl").append(trial(name, repeat, slower=1.0 + number, **changes))
    if code is None:
        run_tune(options, "ddp")
    else:
        with pytest.raises(typer.Exit) as ended:
            run_tune(options, "ddp")
        assert ended.value.exit_code == code
    result = read(tmp_path / "tune.json")
    outcome = str(changes.get("status", "eliminated"))
    assert [each["outcome"] for each in result["settings"]][1] == outcome
    assert result["winner"] == (None if changes else YOURS)


def test_a_job_of_which_nothing_can_be_changed_is_refused(tmp_path: Path, tiny_model: Path, faq_alpaca: Path) -> None:
    words = ["tune", "--num-processes", "2", "--cpu", "--output-dir", str(tmp_path / "tune")]
    words += [word for part in PARTS for word in ("--keep", part)]
    ended = toolkit(*words, "--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca))
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (
        2,
        "error: there is no setting to try but your own (every part is kept)",
    )


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (["MODEL", "--dataset", "rows"], ["--model_name_or_path", "MODEL", "--dataset", "rows"]),
        (["--model_name_or_path", "MODEL"], ["--model_name_or_path", "MODEL"]),
        (["job.yaml", "--seed", "1"], ["job.yaml", "--seed", "1"]),
        (["--config=job.yaml", "MODEL", "--seed", "1"], ["job.yaml", "--model_name_or_path", "MODEL", "--seed", "1"]),
        (["--config=job.yaml"], ["job.yaml"]),
        (["--script=mine.py", "MODEL"], ["MODEL"]),
    ],
)
def test_a_job_is_a_model_a_file_or_arguments(words: list[str], job: list[str]) -> None:
    given = dict(word[2:].split("=") for word in words if "=" in word)
    left = tuple(word for word in words if "=" not in word)
    assert TuneOptions(output_dir=Path("out"), training_arguments=left, **given).job_words == tuple(job)  # type: ignore[arg-type]


def test_a_model_and_a_file_are_tuned_as_the_same_words_after_the_dashes(
    tmp_path: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(f"model_name_or_path: Qwen/Qwen3-8B\ndataset: {faq_alpaca}\n")
    options = f"tune --dry-run --json --gpu h100 --num-processes 8 --keep preset --keep batch --output-dir {tmp_path}/o"
    found = []
    for job in (
        f"Qwen/Qwen3-8B -- --dataset {faq_alpaca}",
        f"-- --model_name_or_path Qwen/Qwen3-8B --dataset {faq_alpaca}",
        f"--config {tmp_path}/job.yaml",
    ):
        code, out, err = run_command(f"{options} {job}".split(), capsys)
        assert code == 0, err
        found.append(json.loads(out)["settings"])
    assert found[0] == found[1] == found[2]
    code, _, err = run_command(f"{options} --config {tmp_path}/job.yaml --script mine.py".split(), capsys)
    assert (code, "--config is for the toolkit's own script" in err) == (2, True)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B-Instruct"])
@pytest.mark.parametrize("command", ["tune --keep preset --keep batch", "compare --preset zero3 --preset fsdp2"])
def test_a_dry_run_plans_a_model_that_plan_knows_without_network_and_torch(
    command: str,
    model: str,
    tmp_path: Path,
    faq_alpaca: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no file of an earlier download
    for module in (installation, planner):
        monkeypatch.setattr(module, "is_importable", lambda _: False)
    words = f"{command} --dry-run --json --gpu h100 --num-processes 8 --output-dir {tmp_path / 'out'} --"
    words += f" --model_name_or_path {model} --dataset {faq_alpaca} --max_steps 20 --lora_r 16"
    code, out, err = run_command(words.split(), capsys)
    assert code == 0, err
    found = json.loads(out)
    rows = found.get("settings") or found["trials"]
    assert all(each.get("verdict") or each["planned_peak_bytes"] for each in rows)


def test_a_missing_dataset_is_reported_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(planner, "default_preset")
    words = f"tune Qwen/Qwen3-8B --dry-run --gpu h100 --num-processes 8 --output-dir {tmp_path / 'out'}"
    code, _, err = run_command(words.split(), capsys)
    assert (code, "--dataset is missing" in err) == (2, True)


def test_the_default_preset_of_a_job_that_fits_nowhere_needs_no_disk(
    tmp_path: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"tune --dry-run --json --gpu rtx-4090 --num-processes 1 --output-dir {tmp_path} -- --model_name_or_path"
    code, out, err = run_command([*words.split(), "Qwen/Qwen2.5-72B", "--dataset", str(faq_alpaca)], capsys)
    assert code == 0, err
    assert not load_preset(json.loads(out)["settings"][0]["preset"]).uses_nvme

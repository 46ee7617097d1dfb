"""`toolkit train` before a run starts: its defaults, shipped examples, the demo by name, and what it checks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_command
from launching import ROOT
from loaded_modules import HEAVY, loaded_after

from toolkit.convert.conversion import MODULES, TOOLS
from toolkit.convert.draft import load_dialect
from toolkit.demo.assets import MODEL_PARAMETERS
from toolkit.hardware.node import usable_memory_bytes
from toolkit.job.argument_values import MAX_SEQ_LENGTH
from toolkit.record.folder import RunFolder, write_json

DryRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Runs the checks of a command line in `tmp_path`, on the CPU; returns exit code, stdout and stderr."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(["train", "--dry-run", *map(str, words)], capsys)


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    return ["--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--output_dir", "out"]


# -- the preset


@pytest.mark.parametrize(
    ("options", "preset", "why"),
    [
        ([], "ddp", "2 processes"),
        (["--num-processes", "1"], "single", "one process"),
        (["--gpu", "rtx-4090", "--num-processes", "1"], "single", "this job on 1 × rtx-4090"),
        (["--preset", "auto"], "ddp", "2 processes"),
    ],
)
def test_a_run_without_a_preset_has_a_default_and_says_which(
    options: list[str], preset: str, why: str, dry_run: DryRun, job: list[str]
) -> None:
    code, out, err = dry_run(*options, *job)
    assert code == 0, err
    assert err.splitlines()[0] == f"preset {preset}, the default for {why}; `--preset NAME` takes another"
    assert f"/{preset}.yaml " in out


def test_the_default_on_gpus_is_planned_to_fit_and_has_the_degrees_of_the_job(dry_run: DryRun, job: list[str]) -> None:
    gpus = ["--gpu", "h100", "--num-processes", "8"]
    code, out, err = dry_run(*gpus, *job, "--tp", "2")
    assert code == 0, err
    assert "/tp.yaml " in out
    assert ": fits" in err


def test_a_preset_that_is_named_is_not_explained(dry_run: DryRun, job: list[str]) -> None:
    assert "default" not in dry_run("--preset", "zero2", *job)[2]


# -- what is listed


def test_training_arguments_are_listed_by_topic_after_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(["train", "--preset", "zero2", "--", "--help"], capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: toolkit train ... -- [config.yaml]")
    topics = ["model, method and measurement:", "data:", "of transformers' TrainingArguments:"]
    assert [line for line in out.splitlines() if line in topics] == topics
    text = " ".join(out.split())
    assert f"longer rows are truncated to this many tokens (default: {MAX_SEQ_LENGTH})" in text
    assert "One of: linear, cosine," in text
    assert not loaded_after("from toolkit.job.argument_reading import help_text; help_text()") & HEAVY


def test_help_after_the_dashes_goes_to_a_script_of_the_users_own(dry_run: DryRun, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    code, out, _ = dry_run("--script", "mine.py", "--", "--help")
    assert code == 0
    assert out.endswith(" mine.py --help\n")


def test_a_training_argument_before_the_dashes_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run_command(["train", "--model-name-or-path", "x"], capsys)
    assert err.splitlines() == [
        "error: no such option: --model-name-or-path",
        "  hint: training arguments go after `--`: `toolkit train ... -- --model_name_or_path ...`",
    ]


def test_every_tool_that_is_recognised_has_a_module_that_runs_its_files() -> None:
    assert MODULES.keys() == {*(load_dialect(tool).tool for tool in TOOLS), "ms-swift"}


# -- the folder of a script


def test_a_script_gets_a_folder_of_its_own_each_time(dry_run: DryRun, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    for expected in ("runs/mine", "runs/mine-2", "runs/mine-3"):
        code, out, err = dry_run("--script", "mine.py")
        assert code == 0, err
        assert f" --output-dir {expected} " in out
        write_json(RunFolder(tmp_path / expected).run_json, {"status": "completed"})
    write_json(RunFolder(tmp_path / "runs" / "mine").run_json, {"status": "failed"})  # without a trained step
    assert " --output-dir runs/mine " in dry_run("--script", "mine.py")[1]


def test_a_folder_that_the_user_names_is_kept_and_the_hint_works_as_it_is_typed(
    dry_run: DryRun, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("")
    write_json(RunFolder(tmp_path / "here").run_json, {"status": "completed"})
    code, _, err = dry_run("--script", "mine.py", "--output-dir", "here")
    assert (code, err.splitlines()) == (
        2,
        ["error: here already holds a finished run", "  hint: name another folder: `--output-dir DIR`"],
    )
    assert dry_run("--script", "mine.py", "--output-dir", "DIR")[0] == 0


def test_a_trl_script_on_a_cpu_runs_with_the_flag_of_the_hint(dry_run: DryRun) -> None:
    words = ["--module", "trl.scripts.dpo", "--", "--model_name_or_path", "x"]
    code, _, err = dry_run(*words)
    assert (code, "`--bf16 false`" in err) == (2, True)
    assert dry_run(*words, "--bf16", "false")[0] == 0


# -- examples, and the demo by name


@pytest.mark.parametrize("name", ["examples/lora_8b.yaml", "lora_8b.yaml", str(ROOT / "examples" / "lora_8b.yaml")])
def test_a_shipped_example_runs_from_any_directory(name: str, dry_run: DryRun, tiny_model: Path) -> None:
    code, out, err = dry_run("--", name, "--model_name_or_path", tiny_model)
    assert code == 0, err
    assert f" {ROOT / 'examples' / 'lora_8b.yaml'} " in out


def test_an_example_of_another_folder_is_not_guessed(dry_run: DryRun) -> None:
    assert "error: no such file: configs/lora_8b.yaml" in dry_run("--", "configs/lora_8b.yaml")[2]


def test_the_data_of_a_configuration_may_be_relative_to_its_folder(
    dry_run: DryRun, tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    folder = tmp_path / "far" / "configs"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(faq_alpaca.read_text())
    (folder / "job.yaml").write_text(f"model_name_or_path: {tiny_model}\ndataset: rows.jsonl\noutput_dir: out\n")
    assert dry_run("--", folder / "job.yaml")[0] == 0
    (tmp_path / "rows.jsonl").write_text("not a row\n")  # the working directory goes first, as for a flag
    assert "error: rows.jsonl: row 1" in dry_run("--", folder / "job.yaml")[2]


def test_demo_is_a_name_in_a_file_too(dry_run: DryRun, tmp_path: Path, real_model: Path, faq_alpaca: Path) -> None:
    (tmp_path / "job.yaml").write_text("base_model: demo\ndataset: [demo]\noutput_dir: out\nmax_steps: 2\n")
    code, out, err = dry_run("--", "job.yaml")
    assert code == 0, err
    assert f" job.yaml --model_name_or_path={real_model} --dataset={faq_alpaca}\n" in out


def test_a_script_gets_the_demos_model_and_keeps_its_own_data(
    dry_run: DryRun, tmp_path: Path, real_model: Path
) -> None:
    (tmp_path / "mine.py").write_text("")
    _, out, _ = dry_run("--script", "mine.py", "--", "--model_name_or_path", "demo", "--dataset", "demo")
    assert out.endswith(f" mine.py --model_name_or_path {real_model} --dataset demo\n")


# -- the node


def test_more_processes_than_the_host_memory_holds_are_refused(
    dry_run: DryRun, real_model: Path, faq_alpaca: Path
) -> None:
    states = 16 * MODEL_PARAMETERS  # weights, gradients and AdamW's two states in fp32
    most = usable_memory_bytes() // states
    words = ["--model_name_or_path", real_model, "--dataset", faq_alpaca, "--output_dir", "out"]
    words += ["--per_device_train_batch_size", "1"]
    code, _, err = dry_run("--num-processes", most + 1, "--", *words)
    assert code == 2
    assert f"error: model states of {most + 1} processes take " in err
    assert dry_run("--num-processes", most, "--", *words)[0] == 0


def test_more_processes_than_cores_are_warned_of(dry_run: DryRun, job: list[str]) -> None:
    err = dry_run("--num-processes", "40", *job)[2]
    assert "warning: 40 processes share " in err
    assert "processes share" not in dry_run("--num-processes", "1", *job)[2]

"""Bad input through the command line: exit 2, two lines, no traceback, nothing written, no rank started.

Most tests call the program in this process; two start `toolkit` itself.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launching import toolkit

from toolkit.cli.program import main
from toolkit.presets import preset_names
from toolkit.record.folder import write_json


@dataclass(frozen=True)
class Said:
    """What a refused command left on the screen."""

    error: str
    hint: str | None


def refused(*words: str, cwd: Path) -> Said:
    """Run the command line without a GPU; it must refuse as every wrong input is refused."""
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(cwd), streams[0], streams[1], pytest.raises(SystemExit) as ended:
        main(list(words))
    return said_by(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def refused_by_process(*words: str, cwd: Path) -> Said:
    """Run `toolkit` in a process of its own; it must refuse in the same way."""
    done = toolkit(*words, cwd=cwd)
    return said_by(done.returncode, done.stdout, done.stderr)


def said_by(code: int, out: str, err: str) -> Said:
    assert code == 2, err
    assert out == ""
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2, err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in err
    hint = lines[1].removeprefix("  hint: ") if len(lines) == 2 else None
    assert hint is None or hint != lines[1], "the second line is a hint"
    return Said(error=lines[0].removeprefix("error: "), hint=hint)


@dataclass(frozen=True)
class Job:
    """A job that would run; each test spoils one thing in it."""

    folder: Path
    model: Path
    rows: Path

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def arguments(self, *more: str, **changed: object) -> list[str]:
        given = {"model_name_or_path": self.model, "dataset": self.rows} | changed
        return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *more]

    def train(self, *more: str, options: tuple[str, ...] = (), preset: str = "zero2", **changed: object) -> Said:
        changed = {"output_dir": self.output} | changed
        command = ("train", "--preset", preset, "--num-processes", "2", *options)
        return refused(*command, "--", *self.arguments(*more, **changed), cwd=self.folder)

    def compare(self, *options: str, more: tuple[str, ...] = ("--max_steps", "8")) -> Said:
        command = ("compare", "--num-processes", "2", "--output", str(self.output), *options)
        return refused(*command, "--", *self.arguments(*more), cwd=self.folder)


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "Hej", "output": "Hello"}\n' * 32)
    return Job(folder=tmp_path, model=tiny_model, rows=rows)


def contents(folder: Path) -> dict[str, Any]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# -- data


def test_a_missing_data_file(job: Job) -> None:
    said = job.train(dataset=job.folder / "row.jsonl")
    assert said.error == f"no such data file: {job.folder / 'row.jsonl'}"
    assert said.hint == f"did you mean `{job.rows}`?"
    assert not job.output.exists()


def test_a_malformed_json_row_is_named_by_file_and_line(job: Job) -> None:
    good = '{"instruction": "Hej", "output": "Hello"}\n'
    job.rows.write_text(good * 249 + '{"instruction": "Hej", "output": \n' + good * 10)
    said = job.train()
    assert said.error.startswith(f"{job.rows}: row 250, line 250: malformed JSON: ")
    assert not job.output.exists()


def test_a_row_without_the_expected_fields_is_named_with_what_it_has(job: Job) -> None:
    good = '{"instruction": "Hej", "output": "Hello"}\n'
    job.rows.write_text(good * 3 + '{"instruction": "Hej", "answer": "Hello"}\n' + good * 30)
    said = job.train()
    assert said.error == f"{job.rows}: row 4, line 4: no field `output`; fields found: instruction, answer"
    assert said.hint is not None
    assert "instruction + output" in said.hint
    assert not job.output.exists()


def test_rows_of_no_known_format_are_named_with_what_they_have(job: Job) -> None:
    job.rows.write_text('{"question": "Hej", "answer": "Hello"}\n' * 32)
    said = job.train()
    assert said.error == f"{job.rows}: row 1, line 1: fields found: question, answer"
    assert said.hint is not None
    assert said.hint.startswith("expected one of: ")


def test_fewer_rows_than_a_global_batch(job: Job) -> None:
    said = job.train("--per_device_train_batch_size", "17")
    assert said.error == f"{job.rows} has 32 rows, fewer than one global batch of 34 sequences"


def test_fewer_rows_than_packs_of_a_global_batch(job: Job) -> None:
    said = job.train("--per_device_train_batch_size", "17", "--packing", "true")
    assert said.error.startswith(f"{job.rows} has 32 rows, which make at most as many packed sequences")


def test_a_stream_without_an_end(job: Job) -> None:
    said = job.train("--streaming")
    assert said.error.startswith("--streaming needs --max_steps")
    assert said.hint == "`--max_steps 1000`"
    assert not job.output.exists()


# -- arguments


def test_an_unknown_key_of_the_yaml_file(job: Job) -> None:
    config = job.folder / "job.yaml"
    config.write_text("learning_rat: 1e-4\n")
    words = ("train", "--preset", "zero2", "--num-processes", "2", "--", str(config), *job.arguments())
    said = refused(*words, "--output_dir", str(job.output), cwd=job.folder)
    assert said.error == f"{config}: unknown key 'learning_rat'"
    assert said.hint == "did you mean `learning_rate`?"
    assert not job.output.exists()


def test_an_unknown_flag_of_the_training_script(job: Job) -> None:
    said = job.train("--learning_rat", "1e-4")
    assert (said.error, said.hint) == ("unknown argument --learning_rat", "did you mean `--learning_rate`?")
    assert not job.output.exists()


def test_an_unknown_flag_of_the_toolkit(job: Job) -> None:
    said = job.train(options=("--timeout-minute", "1"))
    assert "no such option: --timeout-minute" in said.error
    assert "--timeout-minutes" in said.error
    assert said.hint == "see `toolkit train --help`"


def test_an_option_of_the_toolkit_that_is_missing(job: Job) -> None:
    said = refused("train", "--num-processes", "2", cwd=job.folder)
    assert (said.error, said.hint) == ("missing option '--preset'", "see `toolkit train --help`")


def test_a_command_that_does_not_exist(job: Job) -> None:
    said = refused("trian", cwd=job.folder)
    assert said.error == "no such command 'trian'. Did you mean 'train'?"


def test_a_word_that_belongs_to_no_flag(job: Job) -> None:
    said = job.train("--max_steps", "8", "zero3")
    assert said.error == "unexpected word 'zero3' after --max_steps 8"


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max_steps", "many", "--max_steps is 'many', expected a whole number"),
        ("--learning_rate", "fast", "--learning_rate is 'fast', expected a number"),
        ("--bf16", "maybe", "--bf16 is 'maybe', expected true or false"),
        ("--per_device_train_batch_size", "0", "--per_device_train_batch_size is 0, expected 1 or more"),
    ],
)
def test_a_value_of_the_wrong_kind(flag: str, value: str, message: str, job: Job) -> None:
    assert job.train(flag, value).error == message
    assert not job.output.exists()


def test_a_number_of_processes_that_is_no_number(job: Job) -> None:
    said = refused("train", "--preset", "zero2", "--num-processes", "two", cwd=job.folder)
    assert said.error.startswith("invalid value for '--num-processes'")


def test_more_processes_than_gpus(job: Job) -> None:
    said = job.train(options=("--no-cpu",))
    assert (said.error, said.hint) == ("2 processes, but 0 GPUs are visible here", "`--cpu` trains on the CPU")
    assert not job.output.exists()


# -- presets and models


def test_an_unknown_preset(job: Job) -> None:
    said = job.train(preset="zero4")
    assert said.error == f"unknown preset 'zero4'; available: {', '.join(preset_names())}"
    assert said.hint == "did you mean `zero3`?"


def test_a_preset_file_with_an_unknown_nested_key(job: Job) -> None:
    mine = job.folder / "mine.yaml"
    mine.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forwrd: false}\n")
    said = job.train(preset=str(mine))
    assert "unknown key 'fsdp_reshard_after_forwrd' in fsdp_config" in said.error
    assert said.hint == "did you mean `fsdp_reshard_after_forward`?"


def test_a_model_folder_that_does_not_exist(job: Job) -> None:
    said = job.train(model_name_or_path=job.folder / "no-model")
    assert said.error == f"model '{job.folder / 'no-model'}' is neither a folder nor a hub id"


def test_a_model_folder_without_weights(job: Job) -> None:
    (job.folder / "model").mkdir()
    said = job.train(model_name_or_path=job.folder / "model")
    assert said.error == f"model folder {job.folder / 'model'} has no config.json"
    (job.folder / "model" / "config.json").write_text("{}")
    said = job.train(model_name_or_path=job.folder / "model")
    assert said.error == f"model folder {job.folder / 'model'} has no weights (*.safetensors or *.bin)"


def test_a_hub_id_that_cannot_be_reached(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(job.folder / "cache"))
    arguments = job.arguments(model_name_or_path="no-such-owner/no-such-model", output_dir=job.output)
    words = ("train", "--preset", "zero2", "--num-processes", "2", "--", *arguments)
    said = refused_by_process(*words, cwd=job.folder)  # it reads the variable when it imports a library
    assert said.error.startswith("'no-such-owner/no-such-model' is not a folder here, the hub cannot be reached")
    assert said.hint == "name a local folder that holds the model's config.json"
    assert not job.output.exists()


# -- the output folder


def test_a_finished_run_is_never_overwritten(job: Job) -> None:
    write_json(job.output / "run.json", {"status": "completed"})
    (job.output / "model.safetensors").write_text("trained for a week")
    before = contents(job.output)
    said = job.train()
    assert said.error == f"{job.output} already holds a finished run, which is never overwritten"
    assert said.hint == f"name another folder, or remove it: `rm -r {job.output}`"
    assert contents(job.output) == before


def test_an_output_folder_under_a_file(job: Job) -> None:
    before = contents(job.folder)
    said = job.train(output_dir=job.rows / "out")
    assert said.error == f"output_dir {job.rows / 'out'} cannot be written: Not a directory"
    assert contents(job.folder) == before


def test_an_output_folder_that_the_system_refuses(job: Job) -> None:
    said = job.train(output_dir="/proc/out")
    assert said.error.startswith("output_dir /proc/out cannot be written: ")


def test_an_output_folder_that_is_a_file(job: Job) -> None:
    before = contents(job.folder)
    said = job.train(output_dir=job.rows)
    assert said.error == f"--dataset {job.rows} is in output_dir {job.rows}, where the run would replace it"
    assert contents(job.folder) == before


def test_an_output_folder_that_is_not_named(job: Job) -> None:
    said = refused("train", "--preset", "ddp", "--num-processes", "2", "--", *job.arguments(), cwd=job.folder)
    assert said.error == "--output_dir is missing"


# -- compare


def test_a_comparison_chooses_its_own_output_folders(job: Job) -> None:
    said = job.compare("--preset", "ddp", more=("--output_dir", "elsewhere"))
    assert said.error == "--output_dir is set by the comparison itself"
    assert not job.output.exists()


def test_a_comparison_without_a_timed_step(job: Job) -> None:
    said = job.compare("--preset", "ddp", more=("--max_steps", "2"))
    assert said.error == "--max_steps 2 leaves no timed step after 2 untimed ones"
    assert said.hint == "`--max_steps 10` or more"
    assert not job.output.exists()


def test_a_preset_that_is_compared_with_itself(job: Job) -> None:
    said = job.compare("--preset", "ddp", "--preset", "zero2", "--preset", "ddp")
    assert said.error == "--preset ddp is given twice"
    assert said.hint == "name each preset once; `--variant again=ddp` is the same under another name"
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--repeats", "0"], "--repeats is 0, expected 1 or more"),
        (["--target-interval", "3"], "--target-interval is 3, expected a fraction from 0 to below 1"),
        (["--scaling", "strong"], "--scaling needs several numbers of processes"),
        (["--find-max-batch", "0"], "--find-max-batch is 0, expected 1 or more"),
        (["--trial-minutes", "0"], "--trial-minutes is 0, expected more than 0"),
        (["--variant", "again"], "--variant 'again', expected a name of letters, digits and _, `=`, a preset, and"),
        (["--preset", "zeropp", "--num-processes", "two"], "--num-processes is 'two', expected whole numbers"),
    ],
)
def test_a_method_that_cannot_be(job: Job, options: list[str], error: str) -> None:
    said = job.compare("--preset", "ddp", *options)
    assert said.error.startswith(error)
    assert not job.output.exists()


def test_presets_of_which_none_can_run_here(job: Job) -> None:
    said = job.compare("--preset", "zeropp", "--cpu")
    assert said.error.startswith("preset 'zeropp' does not run on a CPU")


def test_a_reference_that_is_not_compared(job: Job) -> None:
    said = job.compare("--preset", "zero2", "--baseline", "ddp")
    assert said.error == "--baseline ddp is not among the presets compared: zero2"


def test_a_bad_job_is_refused_before_the_first_trial(job: Job) -> None:
    said = job.compare("--preset", "ddp", "--preset", "zero2", more=("--max_stepz", "8"))
    assert said.error == "unknown argument --max_stepz"
    assert not job.output.exists()


def prepared_comparison(job: Job, **changed: object) -> dict[str, Any]:
    """The folder as a comparison of ddp and zero2 leaves it when it is stopped before its first trial ends."""
    from toolkit.compare.options import CompareOptions
    from toolkit.compare.specification import SPEC_FILE, make_specification, open_comparison
    from toolkit.compare.variants import load_variants

    options = CompareOptions(
        preset=("ddp", "zero2"),
        num_processes=("2",),
        output_dir=job.output,
        training_arguments=tuple(job.arguments("--max_steps", "8")),
        cpu=True,
    )
    spec = make_specification(options, load_variants(options.preset, options.variant))
    open_comparison(job.output, spec, resume=False)
    write_json(job.output / SPEC_FILE, spec.as_json() | changed)
    return contents(job.output)


def test_a_comparison_is_not_gone_on_with_unasked(job: Job) -> None:
    before = prepared_comparison(job)
    said = job.compare("--preset", "ddp", "--preset", "zero2")
    assert said.error == f"{job.output} already holds a comparison"
    assert said.hint == "add `--resume`, or name another folder"
    assert contents(job.output) == before


def test_another_comparison_in_the_folder_is_not_mixed_with_this_one(job: Job) -> None:
    before = prepared_comparison(job)
    said = job.compare("--preset", "ddp", "--preset", "zero2", "--resume", "--untimed-steps", "3")
    assert said.error == f"{job.output} holds another comparison: its untimed_steps is 2, now 3"
    said = job.compare("--preset", "ddp", "--preset", "zero3", "--resume")
    assert said.error.startswith(f"{job.output} holds another comparison: its presets is ['ddp', 'zero2'], now")
    assert contents(job.output) == before


def test_a_comparison_whose_presets_file_has_changed_is_another_one(job: Job) -> None:
    before = prepared_comparison(job, preset_files={"ddp": {}, "zero2": {}})
    said = job.compare("--preset", "ddp", "--preset", "zero2", "--resume")
    assert said.error.startswith(f"{job.output} holds another comparison: its preset_files is {{'ddp': {{}}")
    assert contents(job.output) == before


def test_a_comparison_that_cannot_be_written(job: Job) -> None:
    command = ("compare", "--preset", "ddp", "--num-processes", "2", "--output", str(job.rows / "out"))
    said = refused_by_process(*command, "--", *job.arguments("--max_steps", "8"), cwd=job.folder)
    assert said.error == f"--output-dir {job.rows / 'out'} cannot be written: Not a directory"


def test_a_report_of_a_folder_without_one(job: Job) -> None:
    said = refused("report", str(job.folder), cwd=job.folder)
    assert said.error == f"no such file: {job.folder / 'results.json'}"

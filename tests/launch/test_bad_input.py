"""Bad input through the command line: exit 2, two lines, no traceback, nothing written, no rank started.

Most tests call the program in this process; two start `toolkit` itself.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launching import toolkit

from toolkit.cli.program import main
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


GOOD = '{"instruction": "Hej", "output": "Hello"}\n'


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One thing that is wrong; `{folder}` and `{rows}` in it are those of the job."""

    error: str
    """What the message begins with."""
    hint: str | None = None
    """What the hint begins with; None where any will do."""
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    preset: str = "zero2"
    rows: str = GOOD * 32
    files: Mapping[str, str] = field(default_factory=dict)


BAD_JOBS = {
    "a missing data file": Bad(
        words=("--dataset", "{folder}/row.jsonl"),
        error="no such data file: {folder}/row.jsonl",
        hint="did you mean `{rows}`?",
    ),
    "a malformed JSON row": Bad(
        rows=GOOD * 249 + '{"instruction": "Hej", "output": \n' + GOOD * 10,
        error="{rows}: row 250, line 250: malformed JSON: ",
    ),
    "a row without a field that the others have": Bad(
        rows=GOOD * 3 + '{"instruction": "Hej", "answer": "Hello"}\n' + GOOD * 30,
        error="{rows}: row 4, line 4: no field `output`; fields found: instruction, answer",
    ),
    "fewer rows than a global batch": Bad(
        words=("--per_device_train_batch_size", "17"),
        error="{rows} has 32 rows, fewer than one global batch of 34 sequences",
    ),
    "an unknown key of the YAML file": Bad(
        words=("{folder}/job.yaml",),
        files={"job.yaml": "learning_rat: 1e-4\n"},
        error="{folder}/job.yaml: unknown key 'learning_rat'",
        hint="did you mean `learning_rate`?",
    ),
    "an unknown flag of the toolkit": Bad(
        options=("--timeout-minute", "1"),
        error="no such option: --timeout-minute",
        hint="see `toolkit train --help`",
    ),
    "a word that belongs to no flag": Bad(
        words=("--max_steps", "8", "zero3"), error="unexpected word 'zero3' after --max_steps 8"
    ),
    "text in place of a whole number": Bad(
        words=("--max_steps", "many"), error="--max_steps is 'many', expected a whole number"
    ),
    "more processes than GPUs": Bad(
        options=("--no-cpu",),
        error="2 processes, but 0 GPUs are visible here",
        hint="`--cpu` trains on the CPU",
    ),
    "an unknown preset": Bad(preset="zero4", error="unknown preset 'zero4'; available: ", hint="did you mean `zero3`?"),
    "a preset file with an unknown nested key": Bad(
        preset="{folder}/mine.yaml",
        files={"mine.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, reshard: true}\n"},
        error="{folder}/mine.yaml: unknown key 'reshard' in fsdp_config",
    ),
    "a model folder that does not exist": Bad(
        words=("--model_name_or_path", "{folder}/no-model"),
        error="model '{folder}/no-model' is neither a folder nor a hub id",
    ),
    "a model folder without weights": Bad(
        words=("--model_name_or_path", "{folder}/model"),
        files={"model/config.json": "{}"},
        error="model folder {folder}/model has no weights (*.safetensors or *.bin)",
    ),
    "an output folder that the system refuses": Bad(
        words=("--output_dir", "/proc/out"), error="output_dir /proc/out cannot be written: "
    ),
    "an output folder that is the data file": Bad(
        words=("--output_dir", "{rows}"),
        error="--dataset {rows} is in output_dir {rows}, where the run would replace it",
    ),
}


@pytest.mark.parametrize("what", BAD_JOBS)
def test_a_job_is_refused_for(what: str, job: Job) -> None:
    bad = BAD_JOBS[what]

    def filled(text: str) -> str:
        return text.replace("{folder}", str(job.folder)).replace("{rows}", str(job.rows))

    job.rows.write_text(bad.rows)
    for name, text in bad.files.items():
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_text(text)
    before = contents(job.folder)
    words, preset = [filled(word) for word in bad.words], filled(bad.preset)
    options = ("train", "--preset", preset, "--num-processes", "2", *bad.options, "--")
    yaml = [words.pop(0)] if words and words[0].endswith(".yaml") else []  # it stands before all flags
    said = refused(*options, *yaml, *job.arguments("--output_dir", str(job.output)), *words, cwd=job.folder)
    assert said.error.startswith(filled(bad.error))
    assert bad.hint is None or str(said.hint).startswith(filled(bad.hint))
    assert contents(job.folder) == before


def test_options_that_are_missing_or_wrong(job: Job) -> None:
    said = refused("train", "--num-processes", "2", cwd=job.folder)
    assert (said.error, said.hint) == ("missing option '--preset'", "see `toolkit train --help`")
    said = refused("train", "--preset", "zero2", "--num-processes", "two", cwd=job.folder)
    assert said.error.startswith("invalid value for '--num-processes'")
    said = refused("train", "--preset", "ddp", "--num-processes", "2", "--", *job.arguments(), cwd=job.folder)
    assert said.error == "--output_dir is missing"
    assert refused("trian", cwd=job.folder).error == "no such command 'trian'. Did you mean 'train'?"


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
    assert said.error == f"{job.output} already holds a finished run"
    assert said.hint == "name another folder: `--output_dir DIR`; `--overwrite_output_dir true` replaces the run"
    assert contents(job.output) == before


# -- compare


@pytest.mark.parametrize(
    ("options", "more", "error"),
    [
        ("--preset ddp", "--output_dir elsewhere", "--output_dir is set by the comparison itself"),
        ("--preset ddp", "--max_steps 2", "--max_steps 2 leaves no timed step after 2 untimed ones"),
        ("--preset ddp --preset zero2", "--max_stepz 8", "unknown argument --max_stepz"),
        ("--preset ddp --preset zero2 --preset ddp", "", "--preset ddp is given twice"),
        ("--preset ddp --repeats 0", "", "--repeats is 0, expected 1 or more"),
        ("--preset ddp --target-interval 3", "", "--target-interval is 3, expected a fraction from 0 to below 1"),
        ("--preset ddp --scaling strong", "", "--scaling needs several numbers of processes"),
        ("--preset ddp --trial-minutes 0", "", "--trial-minutes is 0, expected more than 0"),
        ("--preset ddp --variant again", "", "--variant 'again', expected a name of letters, digits and _, `=`, a"),
        ("--preset zeropp --num-processes two", "", "--num-processes is 'two', expected whole numbers"),
        ("--preset zeropp --cpu", "", "preset 'zeropp' does not run on a CPU"),
        ("--preset zero2 --baseline ddp", "", "--baseline ddp is not among the presets compared: zero2"),
    ],
)
def test_a_comparison_that_cannot_be(options: str, more: str, error: str, job: Job) -> None:
    said = job.compare(*options.split(), more=tuple(more.split()) or ("--max_steps", "8"))
    assert said.error.startswith(error)
    assert not job.output.exists()

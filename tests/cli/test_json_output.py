"""Every command with `--json` prints one JSON document in each of its modes, also where it refuses or fails."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import SCHEMAS, check_answer, run_command
from comparison_records import trial
from launching import ROOT

from toolkit.cli.program import program
from toolkit.compare.ledger import Ledger
from toolkit.compare.options import CompareOptions
from toolkit.compare.specification import make_specification, open_comparison
from toolkit.plan.measured_by_others import ROWS
from toolkit.record.folder import RunFolder
from toolkit.rehearse import rehearsal
from toolkit.tune.options import PARTS

FIXTURES = ROOT / "tests" / "fixtures"
GPUS = "--gpu h100 --num-processes 8"
ON_CPU = "--cpu --num-processes 2"
CLUSTER = "--preset zero2 --nodes 2 --gpus-per-node 4 --no-check-files"
JOB = "-- --model_name_or_path MODEL --dataset rows.jsonl"
HARDWARE = {"cpu": "Z80", "cpu_count": 1, "python": "3.11", "gpus": []}
MOUNTED = "-- --model_name_or_path MODEL --dataset rows.jsonl --output_dir /data/out"
STOPPED = "--preset ddp --preset zero2 --cpu --num-processes 2 --repeats 1 --output-dir stopped"

Run = Callable[..., tuple[int, str, str]]


def commands_with_json(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)
    for name, child in getattr(command, "commands", {}).items():
        yield from commands_with_json(child, (*path, name))


COMMANDS = list(commands_with_json(program()))
REFUSED, FAILED = (2, True), (1, True)
ANSWER, BAD = (0, False), (1, False)  # BAD: the answer is that something is wrong
# command -> words of its modes, with the exit code of each, and whether it ends without an answer. LLAMA and MODEL are
# folders. Where a command submits a file or starts a long run, a test of its own has that mode.
MODES: dict[str, dict[str, tuple[int, bool]]] = {
    "plan": {
        f"LLAMA {GPUS}": ANSWER,
        f"LLAMA {GPUS} --preset ddp --preset zero3": ANSWER,
        "LLAMA --no-cpu": ANSWER,  # which GPUs it needs
        f"LLAMA --config axolotl.yaml {GPUS}": ANSWER,
        f"--config axolotl.yaml {GPUS}": ANSWER,
        "LLAMA --config": REFUSED,
        "LLAMA --gpu h1000": REFUSED,
        "nowhere/config.json": REFUSED,
        "": REFUSED,
    },
    "recommend": {
        f"LLAMA {GPUS}": ANSWER,
        "LLAMA --gpu a100-40gb --num-processes 4 --preset ddp": REFUSED,  # nothing fits
        "LLAMA --gpu a100-40gb --num-processes 4": ANSWER,
        f"72B {GPUS}": ANSWER,  # on paper, over a pipeline
        "LLAMA --gpu l4 --num-processes 1": REFUSED,
    },
    "rehearse": {
        f"--preset zero2 {ON_CPU} -- --model_name_or_path MODEL": FAILED,
        f"--preset no-such {ON_CPU} -- --model_name_or_path MODEL": REFUSED,
        f"--preset zero2 {ON_CPU} -- --model_name_or_path nowhere/config.json": REFUSED,
    },
    "presets": {"": ANSWER},
    "lint": {
        "clean.json": ANSWER,
        "bad.json": BAD,
        "bad.json --level error": BAD,
        "mixed": (2, False),  # findings, and a file that cannot be read
        "fixable.json --fix --in-place": ANSWER,
        "empty": REFUSED,
        "nowhere.json": REFUSED,
        "bad.json --fix": REFUSED,
        "bad.json --level worst": REFUSED,
    },
    "diff": {"HEAD empty": ANSWER, "HEAD changed.json": ANSWER, "HEAD~1 changed.json": BAD, "no-such-commit": REFUSED},
    "convert-config": {
        "axolotl.yaml": ANSWER,
        "axolotl.yaml --output ours.yaml": ANSWER,
        "rows.jsonl": REFUSED,
        "axolotl.yaml --output axolotl.yaml": REFUSED,
    },
    "train": {
        f"--dry-run {ON_CPU} {JOB} --output_dir out": ANSWER,
        f"--dry-run {GPUS} {JOB} --output_dir out": ANSWER,
        f"--dry-run {ON_CPU} --script script.py": ANSWER,
        f"{ON_CPU} {JOB} --output_dir out": REFUSED,
        f"--dry-run {ON_CPU} {JOB}": REFUSED,
    },
    "compare": {
        f"--dry-run --preset ddp --preset zero2 {ON_CPU} --output-dir cmp {JOB} --max_steps 8": ANSWER,
        f"--dry-run --preset ddp {GPUS} --find-max-batch 4 --output-dir cmp {JOB} --max_steps 8": ANSWER,
        f"--dry-run --preset ddp {ON_CPU} --output-dir cmp --script script.py --stop-after-steps 8": ANSWER,
        f"{STOPPED} --resume {JOB} --max_steps 8": ANSWER,  # the trials that are left are in the ledger by then
        f"--preset no-such {ON_CPU} --output-dir cmp {JOB} --max_steps 8": REFUSED,
        f"--preset ddp {ON_CPU} --output-dir cmp {JOB} --max_steps 1": REFUSED,
    },
    "tune": {
        f"--dry-run {GPUS} --output-dir tuned {JOB}": ANSWER,
        f"--dry-run {ON_CPU} --output-dir tuned {JOB}": ANSWER,
        f"{ON_CPU} {' '.join(f'--keep {part}' for part in PARTS)} --output-dir tuned {JOB}": REFUSED,
    },
    "report": {
        "finished": ANSWER,
        "stopped": ANSWER,
        "finished --price-per-gpu-hour 2": ANSWER,
        "row.json --share": ANSWER,
        "false.json --share": FAILED,
        "empty": REFUSED,
        "empty --share": REFUSED,
        "finished stopped": REFUSED,
    },
    "doctor": {
        "": ANSWER,
        "--compare node.json node.json": ANSWER,
        "--compare": REFUSED,
        "--compare rows.jsonl": REFUSED,
        "LLAMA MODEL": REFUSED,
    },
    "env": {"": ANSWER},
    "simulate pipeline": {
        "--stages 4 --micro-batches 8": ANSWER,
        "--stages 4 --micro-batches 8 --output-dir simulated": ANSWER,
        "--stages 4 --micro-batches 8 --output-dir rows.jsonl": REFUSED,
        "--stages 0 --micro-batches 8": REFUSED,
    },
    "simulate failures": {"--gpus 1024 --checkpoint-seconds 60": ANSWER, "--gpus 0": REFUSED},
    "simulate stragglers": {"--workers 4": ANSWER, "--workers 0": REFUSED},
    "cluster slurm": {
        f"{CLUSTER} {JOB} --output_dir out": ANSWER,
        f"{CLUSTER} --output job.sbatch {JOB} --output_dir out": ANSWER,
        f"{CLUSTER} --preset ddp {JOB} --max_steps 8 --output_dir out": ANSWER,
        f"{CLUSTER} --submit {JOB} --output_dir out": REFUSED,
    },
    "cluster skypilot": {
        f"{CLUSTER} --gpu H100 --mount s3://a=/data {MOUNTED}": ANSWER,
        f"{CLUSTER} {MOUNTED}": REFUSED,
    },
    "cluster kubernetes": {
        f"{CLUSTER} --container my/image:1 --mount a=/data {MOUNTED}": ANSWER,
        f"{CLUSTER} {MOUNTED}": REFUSED,
    },
    "cluster ssh": {
        f"{CLUSTER} --host a --host b {JOB} --output_dir out": ANSWER,
        f"{CLUSTER} {JOB} --output_dir out": REFUSED,
    },
    "checkpoint inspect": {"MODEL": ANSWER, "nothing": REFUSED},
    "checkpoint verify": {"MODEL": ANSWER, "empty": REFUSED},
    "checkpoint export": {"nothing out": REFUSED},
    "checkpoint convert": {"nothing out --preset zero2 --num-processes 2": REFUSED},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Path:
    """A folder with what the modes name."""
    folder = tmp_path_factory.mktemp("inputs")
    with chdir(folder):
        write_inputs(tiny_model, faq_alpaca)
    return folder


def write_inputs(model: Path, data: Path) -> None:
    shutil.copy(data, "rows.jsonl")
    shutil.copy(FIXTURES / "axolotl.yaml", ".")
    Path("script.py").write_text("from transformers import Trainer\n")
    Path("clean.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}')
    Path("bad.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_cliping": 1}')
    Path("fixable.json").write_text(
        '{"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true}}'
    )
    Path("broken.json").write_text("{")
    for name in ("empty", "mixed", "finished"):
        Path(name).mkdir()
    shutil.copy("bad.json", "mixed")
    Path("mixed/acc.yaml").write_text("distributed_type: [\n")
    shutil.copy(FIXTURES / "results_small.json", "finished/results.json")
    row = ROWS.read_text().splitlines()[0]
    Path("row.json").write_text(row)
    Path("false.json").write_text(json.dumps(json.loads(row) | {"gpu": "h1000"}))
    Path("node.json").write_text(json.dumps({"node_facts": {"hostname": "a", "unix_time": 1.0}}))
    Path("changed.json").write_text("{}")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for words in (["init"], ["add", "changed.json"], ["commit", "-m", "one"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    shutil.copy("bad.json", "changed.json")
    subprocess.run([*git, "commit", "-am", "two"], check=True, capture_output=True)
    job = ("--model_name_or_path", str(model), "--dataset", "rows.jsonl", "--max_steps", "8")
    words = {"preset": ("ddp", "zero2"), "cpu": True, "num_processes": ("2",), "repeats": 1}
    options = CompareOptions(output_dir=Path("stopped"), training_arguments=job, **words)
    open_comparison(options.output_dir, make_specification(options), resume=False)
    for preset in options.preset:
        Ledger(options.output_dir / "ledger.jsonl").append(trial(preset, 0))
        RunFolder(Path(f"stopped/trials/{preset}-n2-r0")).update_run(hardware=HARDWARE, versions={})


@pytest.fixture
def run(
    inputs: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Run a command in a folder of its own; the ranks of a rehearsal fail."""
    monkeypatch.chdir(shutil.copytree(inputs, tmp_path, dirs_exist_ok=True))
    failed = SimpleNamespace(failure={"message": "why", "hint": "what"}, status="failed", exit_code=1)
    monkeypatch.setattr(rehearsal, "rehearse_once", lambda *_, **__: (failed, None))

    def run(words: str) -> tuple[int, str, str]:
        given = words.replace("LLAMA", f"{FIXTURES}/llama-8b").replace("72B", f"{FIXTURES}/qwen2.5-72b")
        return run_command(given.replace("MODEL", str(tiny_model)).split(), capfd)

    return run


def one_document(out: str) -> Any:
    """Return what was printed; more than one document, or a line of text, is an error."""
    return json.loads(out)


def test_every_command_with_json_is_here() -> None:
    assert set(MODES) == set(COMMANDS) == SCHEMAS.keys() - {"failure"}
    assert all(modes for modes in MODES.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_one_document_in_each_of_its_modes(command: str, run: Run) -> None:
    found = {}
    for words in (*MODES[command], "--no-such-option"):
        code, out, err = run(f"{command} --json {words}".strip())
        try:
            answer = one_document(out)
            found[words] = code, "failure" in answer
            check_answer(command, answer)
        except ValueError:
            found[words] = code, f"{out[:200]!r} is no document; {err[:300]!r}"
    assert found == MODES[command] | {"--no-such-option": REFUSED}


@pytest.mark.parametrize("form", ["--format json", "--format=json"])
@pytest.mark.parametrize("command", ["lint nowhere.json", "lint", "diff no-such-commit", "diff HEAD --level worst"])
def test_a_refusal_is_a_document_with_the_format_json_too(command: str, form: str, run: Run) -> None:
    code, out, _ = run(f"{command} {form}")
    assert (code, one_document(out)["failure"]["exit_code"]) == (2, 2)


def test_diff_refuses_a_gpu_that_it_does_not_know_where_nothing_was_changed(run: Run) -> None:
    code, out, _ = run("diff HEAD changed.json --json --gpu h1000")
    assert code == 2
    assert "h1000" in one_document(out)["failure"]["message"]

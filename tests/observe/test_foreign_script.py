"""Somebody's script runs unchanged under `python -m toolkit.observe`: its own exit code, and a true run folder."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, accelerate_launch, cpu_environment, nightly_launch, read, run_captured, run_warm
from trl_jobs import TRL_ROWS, trl_words

from toolkit.errors import ToolkitError
from toolkit.launch.launch import prepare_run
from toolkit.launch.options import TrainOptions
from toolkit.observe.foreign_script import write_whole_lines
from toolkit.observe.words import Words, check_transformers
from toolkit.record.checkpoints import list_checkpoints
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

SCRIPT = SCRIPTS / "somebodys.py"
CASES = Path(__file__).parent / "cases"


def observed(
    folder: Path, *words: str, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """One process, without a launcher."""
    own = ["--output-dir", str(folder / "run"), *options]
    command = [sys.executable, "-m", "toolkit.observe", *own, str(SCRIPT), words[0], str(folder / "out"), *words[1:]]
    return run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"} | variables, cwd=folder)


def run_of(folder: Path) -> dict[str, Any]:
    return dict(read(folder / "run" / "run.json"))


@pytest.mark.launch
def test_a_script_has_the_words_the_path_and_the_folder_that_python_gives_it(tmp_path: Path) -> None:
    ended = observed(tmp_path, "facts", "more", "--flag=1")
    facts = json.loads((tmp_path / "out").read_text())
    assert facts == {
        "file": str(SCRIPT),
        "argv": [str(SCRIPT), "facts", str(tmp_path / "out"), "more", "--flag=1"],
        "path": str(SCRIPTS),
        "folder": str(tmp_path),
        "name": "__main__",
    }
    assert (ended.returncode, run_of(tmp_path)["status"]) == (1, "failed")  # it made no Trainer
    assert "error: no Trainer was made; nothing was observed\n  hint: a loop without accelerate" in ended.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    ("words", "code", "status", "said"),
    [
        pytest.param(["workers"], 0, "completed", "done: 4 steps, loss ", marks=pytest.mark.nightly),  # sys.exit(0)
        (["exit", "3"], 3, "failed", "error: the script called sys.exit(3)"),
        (["before"], 1, "failed", "LookupError: what the script could not find"),
        (["untrained"], 1, "failed", "error: a Trainer was made, and train() was not called; nothing was observed"),
        (["killed"], -9, "running", "in effect: none, replicate, 1 rank"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_script_ends_with_its_own_exit_code(
    words: list[str], code: int, status: str, said: str, tmp_path: Path
) -> None:
    ended = observed(tmp_path, *words)
    assert (ended.returncode, run_of(tmp_path)["status"]) == (code, status), ended.stderr
    assert said in ended.stdout + ended.stderr
    if words == ["before"]:
        first = ended.stderr[ended.stderr.index("Traceback") :].splitlines()[1]
        assert str(SCRIPT) in first, "the traceback begins in the script"
    if status == "failed":  # as the launcher and a comparison read it
        assert read(tmp_path / "run" / "failure.json")["message"] in said
    if words == ["killed"]:
        assert read_rows(RunFolder(tmp_path / "run").rank_rows(0))


@pytest.mark.launch
def test_each_training_of_a_script_has_a_record_and_can_be_stopped_early(tmp_path: Path) -> None:
    required = ("--require", "engine=none", "--require", "attention=flash", "--require", "optimizer_path=fused")
    ended = observed(tmp_path, "two", options=("--stop-after-steps", "3", *required))
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:3] for line in ended.stdout.splitlines() if line.startswith("  attention ")] == [
        ["attention", "sdpa", "flash"],
        ["attention", "sdpa", "flash"],
    ], "each training ends with a table of its own"
    folders = [RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run" / "training-2")]
    assert [len(read_rows(folder.rank_rows(0))) for folder in folders] == [3, 2]
    assert [read(folder.run_json)["status"] for folder in folders] == ["completed", "completed"]
    assert [read(folder.attestation_json)["differences"] for folder in folders] == [[], []]
    again = observed(tmp_path, "two")
    assert again.returncode == 2
    assert f"error: {tmp_path / 'run'} already holds a finished run" in again.stderr


@nightly_launch
def test_a_rank_of_a_script_that_trains_alone_does_not_have_the_world_size_that_was_started(tmp_path: Path) -> None:
    required = ("--require", "engine=none", "--require", "attention=math")
    ended = observed(tmp_path, "workers", options=required, TOOLKIT_WORLD_SIZE="2")
    assert ended.returncode == 1
    assert "world_size on rank 0 is 1, expected 2" in ended.stderr
    assert "attention on rank 0 is flash, expected math" in ended.stderr


@pytest.mark.launch
def test_a_preset_that_the_run_contradicts_ends_it_after_the_first_step_with_both_values(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path / "run"), "--require", "zero2", str(SCRIPT), "plain", str(tmp_path / "out")]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "ddp.yaml", *words, module="toolkit.observe")
    assert ended.returncode == 1
    assert "engine on rank 0 is ddp, expected deepspeed" in ended.stderr.replace("'", "")
    run = read(tmp_path / "run" / "run.json")
    assert (run["status"], run["exit_code"]) == ("attestation_failed", 1)
    assert len(read_rows(RunFolder(tmp_path / "run").rank_rows(0))) <= 1


@nightly_launch
def test_a_script_has_its_own_toolkit_and_its_error_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").touch()
    (tmp_path / "toolkit" / "helpers.py").write_text("VALUE = 41")
    lines = ["import sys", "from toolkit.helpers import VALUE", f"sys.path.insert(0, {str(CASES)!r})"]
    lines += ["from common import *", "def train(steps): Trainer(model=model(), train_dataset=Rows(),"]
    lines += ["    args=args(sys.argv[1], max_steps=steps, dataloader_num_workers=2)).train()"]
    lines += ["train(2)", "train(1)", "raise ValueError(VALUE)"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    own = ["--output-dir", str(tmp_path / "run"), str(tmp_path / "script.py"), str(tmp_path / "out")]
    ended = run_captured([sys.executable, "-m", "toolkit.observe", *own], cpu_environment() | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ValueError: 41") == 2, "its line, and the traceback"
    assert 'script.py", line 9, in <module>' in ended.stderr
    assert [read(path)["status"] for path in sorted((tmp_path / "run").rglob("run.json"))] == ["failed", "completed"]


# -- toolkit train --script


def launched(
    folder: Path, *words: str, options: tuple[str, ...] = (), preset: str = "zero2"
) -> subprocess.CompletedProcess[str]:
    own = ["--preset", preset, "--num-processes", "2", "--script", str(SCRIPT), "--output-dir", str(folder / "run")]
    command = [sys.executable, "-m", "toolkit", "train", *own, *options, "--", words[0], str(folder / "out")]
    command += [*words[1:]]
    return run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"}, cwd=folder)


@nightly_launch
def test_a_parameter_that_the_trainers_own_optimizer_leaves_out_is_no_choice_of_the_script(tmp_path: Path) -> None:
    ended = launched(tmp_path, "forgets", preset="ddp")
    assert ended.returncode == 1, ended.stdout
    assert "the run does not match its preset and arguments: optimizer_bytes" in ended.stderr


@pytest.mark.launch
def test_a_script_whose_rank_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    ended = launched(tmp_path, "lost", str(tmp_path / "mark"), options=("--max-restarts", "1"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "rank 1 exited in step " in ended.stderr
    assert "restart 1 of 1, from step 2\n" in ended.stderr
    assert "resumed after step 2 (0 steps lost)" in ended.stdout + ended.stderr  # only now is it known
    run = run_of(tmp_path)
    assert (run["status"], run["exit_code"], run["preset"]) == ("completed", 0, "zero2")
    (restart,) = run["restarts"]
    assert (restart["resumed_from_step"], restart["rank"]) == (2, 1)
    assert [row.step for row in read_rows(RunFolder(tmp_path / "run").rank_rows(0))] == [1, 2, 3, 4, 5, 6]
    checkpoints = list_checkpoints(tmp_path / "out")
    assert [each.step for each in checkpoints] == [6, 4, 2]
    assert [each.problem(deep=True) for each in checkpoints] == [None, None, None]


@nightly_launch
def test_on_sigterm_all_ranks_of_a_script_save_after_the_same_step(tmp_path: Path) -> None:
    ended = launched(tmp_path, "ended")
    run, folder = run_of(tmp_path), RunFolder(tmp_path / "run")
    assert (ended.returncode, run["status"]) == (1, "interrupted"), ended.stderr[-3000:]
    steps = [len(read_rows(folder.rank_rows(rank))) for rank in (0, 1)]
    assert steps[0] == steps[1] < 6
    assert f"SIGTERM ended the run after step {steps[0]}; checkpoint-{steps[0]} was saved" in ended.stderr
    assert list_checkpoints(tmp_path / "out")[0].step == steps[0]
    (command,) = re.findall(r"hint: `(toolkit train .*)` resumes", ended.stderr)
    assert " --resume " in command
    words = [sys.executable, "-m", *shlex.split(command)]
    resumed = run_captured(words, cpu_environment() | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert (resumed.returncode, run_of(tmp_path)["status"]) == (0, "completed"), resumed.stderr[-3000:]
    assert f"resumed after step {steps[0]}\n" in resumed.stdout + resumed.stderr
    assert [row.step for row in read_rows(folder.rank_rows(0))] == [1, 2, 3, 4, 5, 6]
    again = run_captured(words, cpu_environment(), cwd=tmp_path)
    assert (again.returncode, "cannot be resumed: its first training has ended" in again.stderr) == (2, True)


@nightly_launch
@pytest.mark.parametrize(
    ("mode", "resumed_step", "said"),
    [
        ("resumes", 2, "resumed after step 2 (0 steps lost)"),
        ("own_train", 0, "checkpoint-2 was not loaded: resumed after step 0 (2 steps lost)"),
    ],
)
def test_a_restart_says_from_which_step_the_script_really_resumed(
    mode: str, resumed_step: int, said: str, tmp_path: Path
) -> None:
    ended = launched(tmp_path, mode, str(tmp_path / "mark"), options=("--max-restarts", "1"), preset="ddp")
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = ended.stdout + ended.stderr
    assert said in printed
    warned = "warning: a restart of this script begins at step 0: its `train` takes no `resume_from_checkpoint`"
    first_start = printed.partition("restart 1 of 1")[0]
    assert (warned in first_start) == (mode == "own_train")
    (restart,) = run_of(tmp_path)["restarts"]
    assert restart["resumed_from_step"] == resumed_step
    assert [row.step for row in read_rows(RunFolder(tmp_path / "run").rank_rows(0))] == [1, 2, 3, 4, 5, 6]


def test_a_line_and_its_end_are_written_at_once_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[bytes]()

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            written.append(bytes(data))
            return len(data)

    unbuffered = io.TextIOWrapper(Terminal(), encoding="utf-8", write_through=True)  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdout", unbuffered)
    print("apart")
    write_whole_lines()
    print("together")
    assert written == [b"apart", b"\n", b"together\n"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"script": "a.py", "module": "a"}, "both --script and --module are given"),
        ({"output_dir": Path("run")}, "--output-dir is for a script of your own"),
        ({"require": ("attention=flash",)}, "--require is for a script of your own"),
        ({"resume": True}, "--resume needs a script of your own, and the run's --output-dir"),
        ({"script": "a.py", "dry_run": True, "gpu": "h100"}, "--gpu with a script of your own has no effect"),
        ({"script": "a.py", "nvme_path": "/tmp"}, "--nvme-path with a script of your own has no effect"),
    ],
)
def test_options_that_do_not_go_with_a_script_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        TrainOptions(preset="zero2", num_processes=2, **given)
    assert refused.value.message == message


def test_a_script_that_cannot_be_launched_is_refused_before_any_rank(tmp_path: Path) -> None:
    def options(**given: Any) -> TrainOptions:
        return TrainOptions(**{"preset": "zero2", "num_processes": 2, "cpu": True, "output_dir": tmp_path} | given)

    with pytest.raises(ToolkitError, match=r"script no-such\.py does not exist"):
        prepare_run(options(script="no-such.py"), on_message=print)
    with pytest.raises(ToolkitError, match="preset 'tp' divides the model inside our training script"):
        prepare_run(options(script=str(SCRIPT), preset="tp"), on_message=print)
    with pytest.raises(ToolkitError, match="--require atention=flash: no reading is called"):
        prepare_run(options(script=str(SCRIPT), require=("atention=flash",)), on_message=print)
    readings = {"require": ("attention=math",), "allow": ("master_dtype=bfloat16",)}
    words = ("--hub_token", "hf_A1b2C3d4E5f6")
    prepared = prepare_run(options(script=str(SCRIPT), training_arguments=words, **readings), on_message=print)
    for command in (prepared.command.shown, str(prepared.command.resume_command)):
        assert "--require=attention=math --allow=master_dtype=bfloat16" in command
    assert prepared.command.argv[-2:] == ["--hub_token", "***"]
    assert str(SCRIPT) in prepared.command.shown


# -- TRL's own scripts, by name

NIGHTLY = [
    pytest.param(script, preset, marks=pytest.mark.nightly)
    for script in TRL_ROWS
    for preset in ("ddp", "zero2", "zero3", "fsdp2")
    if (script, preset) != ("dpo", "zero2")
]


@pytest.mark.launch
@pytest.mark.parametrize(("script", "preset"), [("dpo", "zero2"), *NIGHTLY])
def test_trls_scripts_are_verified_under_a_preset(script: str, preset: str, tiny_model: Path, tmp_path: Path) -> None:
    words = [*trl_words(script, tiny_model, tmp_path), "--max_steps", "2", "--bf16", "false"]
    words += ["--gradient_accumulation_steps", "2"]
    own = ["--output-dir", str(tmp_path / "run"), "--require", preset, "-m", f"trl.scripts.{script}"]
    config = ROOT / "accelerate_configs" / f"{preset}.yaml"
    ended = accelerate_launch(config, *own, *words, module="toolkit.observe")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"verified: {preset} (" in ended.stdout
    assert "warning: the loss" not in ended.stdout  # accelerate's own steps are DeepSpeed's, which does not divide here
    # transformers follows the preset, but under DeepSpeed the script.
    assert ("`--bf16 false` had no effect: mixed precision is the preset's" in ended.stdout) is (
        preset in ("ddp", "fsdp2")
    )
    first, second = (read_rows(RunFolder(tmp_path / "run").rank_rows(rank)) for rank in (0, 1))
    assert [row.step for row in first] == [row.step for row in second] == [1, 2]
    digests = {row.batch_sha256 for row in (*first, *second)}
    assert digests == {""} if script in ("grpo", "rloo") else len(digests) == 4
    attestation = read(tmp_path / "run" / "attestation.json")
    assert attestation["verdict"] == "attested"
    dtype = "bfloat16" if preset in ("ddp", "fsdp2") else "float32"
    assert {reading["compute_dtype"] for reading in attestation["ranks"]} == {dtype}
    if script == "dpo":  # TRL shards its reference under ZeRO-3 and FSDP2, the latter as a whole
        references = [reading["other_models"]["ref_model"] for reading in attestation["ranks"]]
        is_sharded = preset in ("zero3", "fsdp2")
        assert [each["sharding"] for each in references] == ["full_shard" if is_sharded else "replicate"] * 2
        assert sum(each["bytes"] for each in references) >= references[0]["whole_bytes"] * (1 if is_sharded else 2)
        assert references[0].get("fsdp2_groups") == (1 if preset == "fsdp2" else None)
        assert "ref_model: " in ended.stdout


# -- the command line


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "no script is named", "`python -m toolkit.observe [options] script.py"),
        (["no-such.py"], "script no-such.py does not exist", "a Python file, by its path from /"),
        (["."], "script . is a folder", "a Python file, by its path from"),
        (["bad.py"], "script bad.py is not Python, line 1: ", "`python"),
        (["-m", "no.such.module"], "there is no module 'no.such.module'", "install its package in"),
        (["--require", "zero4", "good.py"], "unknown preset 'zero4'", "did you mean `zero3`?"),
        (["--require", "shardng=full_shard", "good.py"], "--require shardng=full_shard: no reading", "did you mean `s"),
        (["--require", "attention=flesh", "good.py"], "--require attention=flesh: attention never", "did you mean `fl"),
        (["--stop-after-steps", "0", "good.py"], "argument --stop-after-steps: 0 is not a number", "`python"),
        (["--stop-after", "3", "good.py"], "unrecognized arguments: --stop-after 3", "`python"),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: list[str], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("pass\n")
    (tmp_path / "bad.py").write_text("this is no Python\n")
    with pytest.raises(ToolkitError) as refused:
        Words.read(words)
    assert refused.value.message.startswith(message)
    assert str(refused.value.hint).startswith(hint)


@pytest.mark.parametrize("installed", ["4.57.6", "5.5.4", None])
def test_an_older_transformers_is_refused_with_the_version_that_is_needed(installed: str | None) -> None:
    check_transformers("5.6.0")
    with pytest.raises(ToolkitError, match=rf"transformers 5\.6\.0 or newer is observed, {installed or 'none'} is"):
        check_transformers(installed)


def test_what_a_launcher_adds_reaches_the_script(tmp_path: Path) -> None:
    script = tmp_path / "dpo.py"
    script.write_text("pass\n")
    read = Words.read(["--local_rank=1", "--require", "sharding=full_shard", str(script), "--local", "-m", "x"])
    assert read.arguments == ("--local_rank=1", "--local", "-m", "x")
    assert (read.target, read.output_dir) == (str(script), Path("runs/dpo"))
    assert read.require_settings == {"sharding": "full_shard"}

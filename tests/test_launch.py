"""One run from argv to its final status: what is started, that nothing is left behind, how the ending is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware.gpus import visible_gpus
from toolkit.launch import preflight
from toolkit.launch.command import RUN_ID_VARIABLE, LaunchCommand, launch_command, threads_per_rank
from toolkit.launch.killed import killed_rank
from toolkit.launch.process import Outcome, processes_of, run_command
from toolkit.launch.run import conclude
from toolkit.presets import load_preset
from toolkit.runs.folder import RunFolder, write_json

ROOT = Path(__file__).parent.parent
YAMLS, JSONS = ROOT / "accelerate_configs", ROOT / "ds_configs"

# -- the command


def test_the_argv_is_accelerates_launcher_with_the_presets_file() -> None:
    command = launch_command(load_preset("ddp"), num_processes=2, training_argv=["--max_steps", "8"], cpu=False)
    assert command.argv == [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(YAMLS / "ddp.yaml"), "--num_processes", "2"),
        *("--num_machines", "1", "--main_process_port", "0"),
        *("-m", "toolkit.train", "--max_steps", "8"),
    ]
    assert command.shown == (
        f"accelerate launch --config_file {YAMLS}/ddp.yaml --num_processes 2 -m toolkit.train --max_steps 8"
    )


def test_a_deepspeed_json_is_named_by_its_absolute_path() -> None:
    command = launch_command(load_preset("zero3"), num_processes=4, training_argv=[], cpu=False)
    assert command.shown == (
        f"accelerate launch --config_file {YAMLS}/zero3.yaml --deepspeed_config_file {JSONS}/zero3.json"
        " --num_processes 4 -m toolkit.train"
    )
    assert command.argv[5:7] == ["--deepspeed_config_file", str(JSONS / "zero3.json")]


def test_the_limit_for_a_hang_reaches_the_ranks_by_their_environment() -> None:
    command = launch_command(
        load_preset("ddp"), num_processes=2, training_argv=[], cpu=False, hang_timeout_minutes=0.05
    )
    assert command.environment["TOOLKIT_HANG_TIMEOUT_MINUTES"] == "0.05"
    assert command.shown.startswith("TOOLKIT_HANG_TIMEOUT_MINUTES=0.05 accelerate launch ")


def test_a_hybrid_mesh_gets_its_shard_degree_from_the_number_of_processes() -> None:
    command = launch_command(load_preset("fsdp2_hybrid"), num_processes=8, training_argv=[], cpu=False)
    assert "--num_processes 8 --parallelism_config_dp_shard_size 4 -m toolkit.train" in command.shown
    assert (
        "parallelism_config"
        not in launch_command(load_preset("fsdp2"), num_processes=8, training_argv=[], cpu=False).shown
    )


def test_the_command_that_is_shown_survives_a_shell() -> None:
    command = launch_command(load_preset("ddp"), num_processes=1, training_argv=["--run_name", "a b"], cpu=False)
    assert command.shown.endswith("--run_name 'a b'")


def test_the_environment_on_gpus_says_only_what_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/ops")
    command = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=False)
    assert command.environment == {
        "TOOLKIT_RUN_ID": command.run_id,
        "TOOLKIT_PRESET": str(YAMLS / "ddp.yaml"),
        "TOOLKIT_WORLD_SIZE": "2",
        "TOOLKIT_RUN_PREPARED": "1",
        "TORCH_EXTENSIONS_DIR": "/ops",
        "PYTHONUNBUFFERED": "1",
    }


def test_on_the_cpu_gpus_are_hidden_and_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    on_cpu = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=True).environment
    on_gpu = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=False).environment
    added = {name: on_cpu[name] for name in set(on_cpu) - set(on_gpu)}
    assert added == {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // 2))}
    assert threads_per_rank(10 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    chosen = launch_command(load_preset("ddp"), num_processes=2, training_argv=[], cpu=True).environment
    assert chosen["OMP_NUM_THREADS"] == "7"


def test_every_run_has_an_id_of_its_own() -> None:
    ids = {launch_command(load_preset("ddp"), num_processes=1, training_argv=[], cpu=True).run_id for _ in range(3)}
    assert len(ids) == 3


# -- the processes


def python_command(program: str, *words: str) -> LaunchCommand:
    run_id = uuid.uuid4().hex
    argv = [sys.executable, "-c", program, *words]
    return LaunchCommand(argv=argv, environment={RUN_ID_VARIABLE: run_id}, shown="", run_id=run_id)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# Writes its pid, then starts a process in a session of its own, which a process group does not reach.
WITH_GRANDCHILD = """
import pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(str(grandchild.pid))
path.with_suffix(".part").rename(path)
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def grandchild(tmp_path: Path) -> Iterator[Path]:
    """The file into which WITH_GRANDCHILD writes its grandchild's pid; a test that fails leaves none behind."""
    path = tmp_path / "grandchild"
    yield path
    if path.exists() and is_running(int(path.read_text())):
        os.kill(int(path.read_text()), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_both_streams_land_in_the_log_and_on_the_callers_side(tmp_path: Path) -> None:
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); print('last', end='')"
    lines: list[str] = []
    outcome = run_command(python_command(program), tmp_path / "train.log", on_line=lines.append)
    assert lines == ["out", "err", "last"]
    assert (tmp_path / "train.log").read_text() == "out\nerr\nlast"
    assert (outcome.exit_code, outcome.timed_out, outcome.interrupted) == (0, False, False)


def test_the_launchers_exit_code_is_kept(tmp_path: Path) -> None:
    command = python_command("raise SystemExit(7)")
    assert run_command(command, tmp_path / "log", on_line=print).exit_code == 7


def test_bytes_that_are_not_utf8_do_not_end_the_log(tmp_path: Path) -> None:
    program = "import sys; sys.stdout.buffer.write(b'a\\xffb\\n'); sys.stdout.flush(); print('after')"
    run_command(python_command(program), tmp_path / "log", on_line=lambda _: None)
    assert (tmp_path / "log").read_text() == "a\ufffdb\nafter\n"


def test_a_run_has_no_standard_input(tmp_path: Path) -> None:
    command = python_command("import sys; print(repr(sys.stdin.read()))")
    run_command(command, tmp_path / "log", on_line=lambda _: None)
    assert (tmp_path / "log").read_text() == "''\n"


def test_a_strategy_that_a_library_left_in_the_environment_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # as building TrainingArguments(deepspeed=...) does
    lines: list[str] = []
    program = "import os; print(os.environ.get('ACCELERATE_USE_DEEPSPEED'))"
    run_command(python_command(program), tmp_path / "log", on_line=lines.append)
    assert lines == ["None"]


def test_a_timeout_ends_the_run(tmp_path: Path) -> None:
    command = python_command("import time; print('hello', flush=True); time.sleep(600)")
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None, timeout_seconds=0.7)
    assert (outcome.timed_out, outcome.interrupted) == (True, False)
    assert outcome.exit_code == -signal.SIGTERM
    assert 0.7 <= outcome.seconds < 10
    assert not processes_of(command.run_id)


def test_a_run_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.launch.process.GRACE_SECONDS", 0.3)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    command = python_command(program)
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None, timeout_seconds=0.7)
    assert outcome.exit_code == -signal.SIGKILL
    assert not processes_of(command.run_id)


def test_a_grandchild_in_its_own_session_is_gone_after_a_normal_end(tmp_path: Path, grandchild: Path) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "0")
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None)
    assert (outcome.exit_code, outcome.timed_out) == (0, False)
    assert not is_running(int(grandchild.read_text()))


def test_a_grandchild_in_its_own_session_is_gone_after_a_timeout(tmp_path: Path, grandchild: Path) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "600")
    outcome = run_command(command, tmp_path / "log", on_line=lambda _: None, timeout_seconds=1)
    assert outcome.timed_out
    assert not is_running(int(grandchild.read_text()))


def test_a_grandchild_is_gone_when_the_callers_side_fails(tmp_path: Path, grandchild: Path) -> None:
    def broken_pipe(_line: str) -> None:
        raise BrokenPipeError("stderr is closed")

    command = python_command(WITH_GRANDCHILD, str(grandchild), "600")
    with pytest.raises(BrokenPipeError, match="stderr is closed"):
        run_command(command, tmp_path / "log", on_line=broken_pipe)
    assert not is_running(int(grandchild.read_text()))


def test_a_process_of_another_run_is_left_alone(tmp_path: Path) -> None:
    other = python_command("input()")
    environment = os.environ | other.environment
    with subprocess.Popen(other.argv, env=environment, stdin=subprocess.PIPE) as running:
        run_command(python_command("pass"), tmp_path / "log", on_line=lambda _: None)
        assert running.poll() is None
        assert [process.pid for process in processes_of(other.run_id)] == [running.pid]
        running.communicate(b"\n")


# The program that a user would stop: it runs one command and says how that ended.
PARENT = """
import json, pathlib, sys
from toolkit.launch.command import LaunchCommand
from toolkit.launch.process import run_command
argv, environment, run_id, log = json.loads(sys.argv[1])
command = LaunchCommand(argv=argv, environment=environment, shown="", run_id=run_id)
outcome = run_command(command, pathlib.Path(log), on_line=lambda line: None)
print(json.dumps([outcome.interrupted, outcome.timed_out]))
"""


def start_parent(command: LaunchCommand, log: Path) -> subprocess.Popen[str]:
    handed = json.dumps([command.argv, command.environment, command.run_id, str(log)])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", PARENT, handed], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_program_ends_the_run_and_its_grandchild(
    number: signal.Signals, tmp_path: Path, grandchild: Path
) -> None:
    command = python_command(WITH_GRANDCHILD, str(grandchild), "600")
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(grandchild.exists)
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=30)
    assert json.loads(said) == [True, False]
    assert not is_running(int(grandchild.read_text()))
    assert not processes_of(command.run_id)


# A launcher that says what it was told, as torch's elastic agent passes SIGTERM on to its ranks.
TELLS_OF_SIGTERM = """
import pathlib, signal, sys, time
def told(*_):
    pathlib.Path(sys.argv[1]).write_text("SIGTERM")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, told)
pathlib.Path(sys.argv[2]).write_text("ready")
time.sleep(float(sys.argv[3]))
"""


def test_a_second_interrupt_while_ending_still_leaves_nothing_behind(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text('ready')\ntime.sleep(600)"
    )
    command = python_command(program, str(ready))
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(ready.exists)
        parent.send_signal(signal.SIGINT)
        time.sleep(0.5)  # now it waits for a launcher that ignores SIGTERM
        parent.send_signal(signal.SIGINT)
        said, _ = parent.communicate(timeout=10)
    assert json.loads(said) == [True, False]
    assert not processes_of(command.run_id)


def test_the_launcher_is_told_when_the_program_is_killed_outright(tmp_path: Path) -> None:
    told, ready = tmp_path / "told", tmp_path / "ready"
    command = python_command(TELLS_OF_SIGTERM, str(told), str(ready), "30")
    with start_parent(command, tmp_path / "log") as parent:
        wait_until(ready.exists)
        parent.kill()
    wait_until(told.exists)
    wait_until(lambda: not processes_of(command.run_id))


# -- the ending


def running_folder(path: Path, **run: Any) -> RunFolder:
    folder = RunFolder(path)
    folder.prepare()
    folder.update_run(status="running", launcher_pid=os.getpid(), **run)
    folder.log.write_text("loading\n\n=====\nfirst\nsecond\nthird\n")
    return folder


def ended(folder: RunFolder, *, exit_code: int = 1, memory: bool = False, **how: bool) -> tuple[str, int, Any]:
    result = conclude(folder, Outcome(exit_code=exit_code, seconds=12.3456, **how), killed_for_memory=memory)
    run = folder.read_run()
    assert run is not None
    assert (run["status"], run["exit_code"]) == (result.status, result.exit_code)
    assert (run["wall_seconds"], run["launcher_pid"]) == (12.346, None)
    return result.status, result.exit_code, result.failure


@pytest.mark.parametrize(
    ("kind", "wrong_input", "code"),
    [
        ("out_of_memory", False, 3),
        ("host_out_of_memory", False, 3),
        ("attestation_failed", False, 1),
        ("diverged", False, 1),
        ("failed", False, 1),
        ("failed", True, 2),
    ],
)
def test_the_rank_that_failed_has_the_word(kind: str, wrong_input: bool, code: int, tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    written = {"kind": kind, "message": "said by rank 1", "rank": 1, "wrong_input": wrong_input}
    write_json(folder.failure_json, written)
    assert ended(folder, memory=True) == (kind, code, written)


def test_a_silent_death_is_told_by_its_last_lines(tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    status, code, failure = ended(folder, exit_code=-11)
    assert (status, code) == ("failed", 1)
    assert failure["message"] == "the launcher ended with code -11: first | second | third"
    assert (failure["kind"], failure["rank"], failure["hint"]) == ("failed", None, f"see {folder.log}")
    assert json.loads(folder.failure_json.read_text()) == failure


def test_a_death_without_a_line_says_so(tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    folder.log.write_text("\n")
    assert ended(folder)[2]["message"] == "the launcher ended with code 1: no output"


def test_an_end_without_a_completed_run_is_a_failure(tmp_path: Path) -> None:
    status, code, failure = ended(running_folder(tmp_path), exit_code=0)
    assert (status, code) == ("failed", 1)
    assert failure["message"].startswith("the launcher ended with code 0")


def test_a_timeout_is_a_status(tmp_path: Path) -> None:
    status, code, failure = ended(running_folder(tmp_path), timed_out=True)
    assert (status, code, failure["message"]) == ("timed_out", 1, "still running after 12 s")


def test_an_interrupt_is_a_status_whatever_a_rank_wrote_while_it_was_ended(tmp_path: Path) -> None:
    folder = running_folder(tmp_path / "silent")
    assert ended(folder, interrupted=True)[2]["message"].startswith("ended by a signal, without a checkpoint")
    folder = running_folder(tmp_path / "spoken")
    write_json(folder.failure_json, {"kind": "failed", "message": "connection reset", "wrong_input": False})
    assert ended(folder, interrupted=True)[:2] == ("interrupted", 1)


def test_a_kill_for_lack_of_host_memory_is_out_of_memory(tmp_path: Path) -> None:
    status, code, failure = ended(running_folder(tmp_path), exit_code=-9, memory=True)
    assert (status, code) == ("host_out_of_memory", 3)
    assert "killed by the kernel" in failure["message"]


def test_a_completed_run_has_no_failure(tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    folder.update_run(status="completed")
    assert ended(folder, exit_code=0, memory=True) == ("completed", 0, None)  # the kernel killed somebody else
    assert not folder.failure_json.exists()


# -- the GPUs that may be used


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 0 , 1 ", 2),
        ("0,7,1", 1),  # CUDA stops at the first that is not there
        ("GPU-8932f937,GPU-1d2a3f4b", 2),
        ("MIG-1", 1),
        ("0,1,2,GPU-8932f937", 3),
    ],
)
def test_visible_gpus_follow_cudas_rule(variable: str | None, count: int) -> None:
    assert visible_gpus(["0", "1", "2"], cuda_visible_devices=variable) == count


def test_no_gpu_is_visible_where_none_is_installed() -> None:
    assert visible_gpus([], cuda_visible_devices=None) == visible_gpus([], cuda_visible_devices="0") == 0


# -- refusals before anything starts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a model folder shows without torch: a configuration and 1,000 bytes of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hej"}\n' * 16)
    return path


def check(model: object, rows: object, *words: str, preset: str = "ddp", n: int = 2) -> preflight.Job:
    argv = ["--model_name_or_path", str(model), "--dataset", str(rows), *words]
    return preflight.check_job(load_preset(preset), num_processes=n, training_argv=argv, cpu=True)


def test_a_sound_job_passes_with_its_batch(model: Path, rows: Path) -> None:
    job = check(model, rows, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")
    assert job.global_batch_size == 16  # 2 x 4 x 2 ranks, and 16 rows
    assert check(model, rows).global_batch_size == 16  # transformers' default of 8 a device


@pytest.mark.parametrize(
    ("preset", "n", "gpus", "message", "hint"),
    [
        ("ddp", 4, 2, "4 processes, but 2 GPUs are visible here", "`--num-processes 2`"),
        ("ddp", 1, 0, "1 processes, but 0 GPUs are visible here", "`--cpu` trains on the CPU"),
        ("ddp", 0, None, "--num-processes is 0, expected 1 or more", None),
        ("fsdp2", 1, None, "preset 'fsdp2' needs at least 2 processes, got 1", None),
        ("fsdp2_hybrid", 2, None, "preset 'fsdp2_hybrid' needs at least 4 processes, got 2", None),
        ("fsdp2_hybrid", 5, 8, "preset 'fsdp2_hybrid' needs a multiple of 2 processes, got 5", "`--num-processes 6`"),
        ("zeropp", 12, 16, "preset 'zeropp' needs a multiple of 8 processes, got 12", "`--num-processes 16`"),
        (
            "single",
            2,
            2,
            "preset 'single' trains in one process, got 2",
            "`--num-processes 1`, or `--preset ddp` for several",
        ),
        (
            "zeropp",
            2,
            None,
            "preset 'zeropp' does not run on a CPU: zero_quantized_weights runs CUDA kernels of DeepSpeed's",
            "`--preset zero3`",
        ),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(
    preset: str, n: int, gpus: int | None, message: str, hint: str | None
) -> None:
    with pytest.raises(ToolkitError) as caught:
        preflight.check_process_count(n, gpus=gpus, preset=load_preset(preset))
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


def test_as_many_processes_as_gpus_pass() -> None:
    preflight.check_process_count(2, gpus=2, preset=load_preset("fsdp2"))


def test_a_model_that_is_not_there_is_refused(rows: Path, tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "gpt2", "~no-such-user/model", "x" * 5000, str(rows)):
        with pytest.raises(ToolkitError, match="is neither a folder nor a hub id"):
            check(name, rows)


def test_a_model_folder_without_its_parts_is_refused(model: Path, rows: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ToolkitError, match=r"has no weights \(\*\.safetensors or \*\.bin\)"):
        check(model, rows)
    (model / "config.json").write_text('{"dtype": ')
    with pytest.raises(ToolkitError, match=r"config\.json is not a JSON object"):
        check(model, rows)
    (model / "config.json").unlink()
    with pytest.raises(ToolkitError, match=r"has no config\.json"):
        check(model, rows)


def test_a_dataset_that_is_not_there_is_refused_with_its_neighbour(model: Path, rows: Path) -> None:
    with pytest.raises(ToolkitError, match="no such data file") as caught:
        check(model, rows.with_name("row.jsonl"))
    assert caught.value.hint == f"did you mean `{rows}`?"


def test_too_few_rows_for_one_global_batch_are_refused(model: Path, rows: Path) -> None:
    with pytest.raises(ToolkitError, match="has 16 rows, fewer than one global batch of 18 sequences"):
        check(model, rows, "--per_device_train_batch_size", "9")


@pytest.mark.parametrize("name", preflight.POSITIVE)
def test_a_count_of_zero_is_refused(name: str, model: Path, rows: Path) -> None:
    with pytest.raises(ToolkitError, match=f"--{name} is 0, expected 1 or more"):
        check(model, rows, f"--{name}", "0")


def test_a_job_without_a_model_or_data_is_refused(model: Path) -> None:
    for argv, missing in (([], "model_name_or_path"), (["--model_name_or_path", str(model)], "dataset")):
        with pytest.raises(ToolkitError, match=f"--{missing} is missing"):
            preflight.check_job(load_preset("ddp"), num_processes=2, training_argv=argv, cpu=True)


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=f"{tmp_path} has .* free, what the run saves needs about 931322574.62 GiB"):
        preflight.check_disk(tmp_path / "not" / "yet" / "there", needed=10**18)
    preflight.check_disk(tmp_path, needed=1)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ({"max_steps": "10", "save_steps": "3"}, 4),  # after 3, 6, 9 and the last
        ({"max_steps": "10", "save_steps": "3", "save_total_limit": "2"}, 3),  # two, and the one being written
        ({"max_steps": "10", "save_steps": "0.5"}, 2),
        ({"max_steps": "10"}, 1),
        ({"save_strategy": "epoch", "save_total_limit": "1"}, 2),
        ({"save_strategy": "epoch"}, 1),
        ({"save_strategy": "no", "max_steps": "10", "save_steps": "1"}, 0),
    ],
)
def test_the_forecast_counts_the_checkpoints_that_lie_there_at_once(words: dict[str, str], count: int) -> None:
    assert preflight.checkpoints_on_disk(words) == count


def test_the_forecast_of_what_a_run_saves(model: Path) -> None:
    arguments = {"model_name_or_path": str(model), "max_steps": "4", "save_steps": "1"}
    assert preflight.saved_bytes(arguments, engine="ddp") == 1000 + 4 * 3000
    assert preflight.saved_bytes(arguments | {"save_model": "false"}, engine="deepspeed") == 4 * 5000
    assert preflight.saved_bytes(arguments | {"lora_r": "8"}, engine="ddp") == 0


def test_a_saved_model_needs_fp32_weights(model: Path) -> None:
    assert preflight.weight_bytes(model) == 1000
    (model / "config.json").write_text('{"dtype": "bfloat16"}')
    assert preflight.weight_bytes(model) == 2000
    (model / "config.json").write_text('{"torch_dtype": "float16"}')
    assert preflight.weight_bytes(model) == 2000
    assert preflight.weight_bytes(Path("owner/name")) == 0


def test_an_output_folder_with_a_finished_run_is_refused(model: Path, tmp_path: Path) -> None:
    arguments = {"model_name_or_path": str(model), "output_dir": str(tmp_path / "out")}
    assert preflight.check_output(arguments) == tmp_path / "out"
    assert not (tmp_path / "out").exists()
    write_json(tmp_path / "out" / "run.json", {"status": "completed"})
    with pytest.raises(ToolkitError, match="already holds a finished run"):
        preflight.check_output(arguments)


def test_a_job_without_an_output_folder_is_refused(model: Path) -> None:
    with pytest.raises(ToolkitError, match="--output_dir is missing"):
        preflight.check_output({"model_name_or_path": str(model)})


PEERS = {
    "failed": {"message": "Connection reset by peer", "rank": 0},
    "interrupted": {"message": "SIGTERM ended the run in step 1", "rank": 0},  # the launcher ends the others
}


@pytest.mark.parametrize("kind", PEERS)
def test_a_rank_that_a_signal_ended_is_the_cause_not_the_peer_that_lost_it(kind: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.failure_json, {"kind": kind} | PEERS[kind])
    folder.log.write_text(
        "[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7) \nRoot Cause (first observed failure):\n"
        "[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)  (SIGKILL)\n"
    )
    ended = conclude(folder, Outcome(exit_code=1, seconds=1.0), killed_for_memory=False)
    assert (ended.status, ended.exit_code) == ("failed", 1)
    assert ended.failure is not None
    assert (ended.failure["rank"], ended.failure["message"]) == (1, "rank 1 is gone in step 1: SIGKILL ended it")
    assert ended.failure["seen_by_peer"]["message"] == PEERS[kind]["message"]
    starved = conclude(folder, Outcome(exit_code=1, seconds=1.0), killed_for_memory=True)
    assert (starved.status, starved.exit_code) == ("host_out_of_memory", 3)


def test_a_rank_killed_after_another_failed_is_no_cause() -> None:
    log = (
        "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 8)  (SIGKILL)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 2 (pid: 7) \n"
    )
    assert killed_rank(log) is None


def test_ranks_that_the_agent_ended_are_no_cause() -> None:
    assert killed_rank("rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 8)  (SIGTERM)") is None

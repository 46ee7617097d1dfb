"""A forked process is the one that a cold start gives: its environment, its interpreter, its end, and its losses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import (
    CPU_PRESETS,
    MESH_OPTIONS,
    ROOT,
    accelerate_launch,
    cpu_environment,
    fork_server,
    launch_preset,
    losses,
    read,
)

from toolkit.launch.exit_status import find_killed_rank
from toolkit.launch.process import processes_of
from toolkit.launch.warm_start import (
    READ_AFTER_IMPORT,
    SERVER_VARIABLE,
    ForkedProcess,
    RefusedError,
    fork_process,
    python_words,
)

pytestmark = pytest.mark.launch

# Made for each launch, or by the test session.
OF_ONE_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
# A cold launch is recognised by the launcher's command line instead.
OF_A_FORKED_LAUNCH = {"TOOLKIT_PRESET", "TOOLKIT_WORLD_SIZE", SERVER_VARIABLE}
COLD = ("zero3", "fsdp2", "single")


def differences(forked: dict[str, Any], cold: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two processes, variables by their names."""
    both = [state | state["environment"] for state in (forked, cold)]
    names = {*both[0], *both[1]} - OF_ONE_LAUNCH - OF_A_FORKED_LAUNCH - {"environment", "random", "torch_seed"}
    names = {name for name in names if not name.startswith("PYTEST_")}
    pairs = {name: (both[0].get(name), both[1].get(name)) for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def environments_of_ranks(preset: str, prefix: Path, *, cold: bool = False) -> list[dict[str, str]]:
    """Launch ranks that only write their environment, and return it."""
    config, ranks = ROOT / "accelerate_configs" / f"{preset}.yaml", CPU_PRESETS[preset]
    how = {"script": "rank_environment.py", "num_processes": ranks, "options": MESH_OPTIONS.get(preset, ())}
    ended = accelerate_launch(config, str(prefix), **how, cold=cold)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "cold start" not in ended.stderr  # the launcher's message about a rank that the server refuses
    return [read(prefix.with_name(f"{prefix.name}{rank}.json")) for rank in range(ranks)]


@pytest.fixture(scope="module")
def cold_runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """Runs of `preset_runs` again, started cold: one per engine, and one without a process group."""
    folder = tmp_path_factory.mktemp("cold")
    for preset in COLD:
        launch_preset(preset, tiny_model, faq_alpaca, folder / preset, cold=True)
    return {preset: folder / preset for preset in COLD}


def states_of_ranks(runs: dict[str, Path], preset: str) -> list[dict[str, Any]]:
    """Read what `train_and_fingerprint.py` wrote of each rank's process before it trained."""
    return [read(runs[preset].with_name(f"{preset}.rank{rank}.json")) for rank in range(CPU_PRESETS[preset])]


def test_a_forked_rank_has_every_variable_of_a_cold_one(cold_runs: dict[str, Path], tmp_path: Path) -> None:
    """And no other variables than a cold rank has after its imports; four ranks of FSDP2, whose mesh has variables."""
    forked = environments_of_ranks("fsdp2_hybrid", tmp_path / "forked")
    cold = environments_of_ranks("fsdp2_hybrid", tmp_path / "cold", cold=True)
    (after_imports,) = (state["environment"] for state in states_of_ranks(cold_runs, "single"))
    for variables, expected in zip(forked, cold, strict=True):
        wanted = expected.keys() - OF_ONE_LAUNCH - OF_A_FORKED_LAUNCH
        assert {name: variables.get(name) for name in wanted} == {name: expected[name] for name in wanted}
        assert variables.keys() - expected.keys() - OF_A_FORKED_LAUNCH <= after_imports.keys()


@pytest.mark.parametrize("preset", COLD)
def test_a_forked_rank_has_the_environment_and_state_of_a_cold_one(
    preset: str, preset_runs: dict[str, Path], cold_runs: dict[str, Path]
) -> None:
    forked, cold = states_of_ranks(preset_runs, preset), states_of_ranks(cold_runs, preset)
    for state in forked:
        state["threads"].remove("owner")  # it waits for the end of the process that asked for this one
    different = [differences(*states) for states in zip(forked, cold, strict=True)]
    if preset == "single":  # accelerate starts a lone process in its own session, the server in a new one
        assert different[0].pop("leads_its_session") == (True, False)
    assert different == [{}] * CPU_PRESETS[preset]
    for seeds in zip(*([*state["random"], state["torch_seed"]] for state in forked), strict=True):
        assert len(set(seeds)) == CPU_PRESETS[preset]


@pytest.mark.parametrize("preset", COLD)
def test_forked_ranks_train_with_the_losses_of_a_cold_start_bit_for_bit(
    preset: str, preset_runs: dict[str, Path], cold_runs: dict[str, Path]
) -> None:
    forked, cold = (losses(runs[preset], CPU_PRESETS[preset]) for runs in (preset_runs, cold_runs))
    assert forked == cold


def test_the_launcher_names_a_forked_rank_that_a_signal_ended(tmp_path: Path) -> None:
    script = tmp_path / "rank_1_dies.py"
    script.write_text("import os, time\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)\n")
    ended = accelerate_launch(ROOT / "accelerate_configs" / "ddp.yaml", script=str(script))
    assert ended.returncode == 1
    killed = find_killed_rank(ended.stderr)
    assert killed is not None
    assert (killed.rank, killed.signal) == (1, "SIGKILL")


def test_a_rank_that_fails_ends_the_other_and_the_launcher_with_code_1(tmp_path: Path) -> None:
    script = tmp_path / "rank_1_fails.py"
    script.write_text("import os, sys, time\nsys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)\n")
    ended = accelerate_launch(ROOT / "accelerate_configs" / "ddp.yaml", script=str(script))
    assert ended.returncode == 1
    assert "no luck" in ended.stderr
    assert "exitcode  : 1" in ended.stderr


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Fork a program of a few lines; what is left of it is killed."""
    started: list[ForkedProcess] = []

    def start(program: str, *words: str, **variables: str) -> ForkedProcess:
        script = tmp_path / f"program{len(started)}.py"
        script.write_text(program)
        environment = cpu_environment() | variables
        process = fork_process(fork_server(), [sys.executable, str(script), *words], environment=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdout.close()


def output(process: ForkedProcess) -> list[str]:
    assert process.stdout is not None
    return process.stdout.read().splitlines()


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('a message')", 1),
        ("1 / 0", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import threading, os, time\nthreading.Timer(0.2, lambda: print('after')).start()", 0),
    ],
)
def test_a_forked_program_ends_as_python_ends(start: Any, program: str, code: int) -> None:
    process = start(program)
    said = output(process)
    assert process.wait(10) == code
    cold = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert cold.returncode == code
    assert said[-1:] == (cold.stdout + cold.stderr).splitlines()[-1:]


def test_a_forked_program_runs_as_main_with_its_arguments_and_its_folder_first_on_the_path(
    start: Any, tmp_path: Path
) -> None:
    process = start(
        "import sys\nprint(__name__, sys.argv[1:], sys.path[0], sys.modules['__main__'].__name__)", "--a", "b"
    )
    assert output(process) == [f"__main__ ['--a', 'b'] {tmp_path} __main__"]


def test_a_forked_module_with_a_safe_path_does_not_find_the_working_directory(tmp_path: Path) -> None:
    """`-P`, with which a rank has its checkpoint converted."""
    added = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
    paths = {}
    for options in ([], ["-P"]):
        command = [sys.executable, *options, "-m", "timeit", "-n1", "-r1", "-s", "import sys; print(sys.path)"]
        with contextlib.chdir(tmp_path):
            process = fork_process(fork_server(), command, environment=cpu_environment() | added)
        paths[*options] = output(process)[0]
        assert process.wait(30) == 0
        process.stdout.close()
    assert str(tmp_path) in paths[()]
    assert str(tmp_path) not in paths["-P",]


def test_a_forked_process_and_what_it_starts_are_found_by_the_run_s_id(start: Any) -> None:
    run_id = "0123456789abcdef" * 2
    program = "import os, time\npid = os.fork()\nprint('up') if pid else None\ntime.sleep(60)"
    process = start(program, TOOLKIT_RUN_ID=run_id)
    assert process.stdout.readline() == "up\n"
    found = processes_of(run_id)
    assert len(found) == 2
    assert process.pid in {each.pid for each in found}
    for each in found:
        each.kill()


OWNER = """
import os, sys, time
from toolkit.launch.warm_start import WarmStart, fork_process
with WarmStart() as warm_start:
    server = warm_start.server(os.environ)
    print(server.partition(":")[0], fork_process(server, [sys.executable, sys.argv[1]], environment=os.environ).pid)
    sys.stdout.flush()
    time.sleep(60)
"""


def test_a_server_and_what_it_forked_end_with_their_owner_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, "-c", OWNER, str(script)]
    environment = {name: value for name, value in cpu_environment().items() if name != SERVER_VARIABLE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = list(map(int, owner.stdout.readline().split()))
        assert len(pids) == 2, owner.stderr and owner.stderr.read()
        owner.kill()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_libraries_read_at_import_cannot_differ(start: Any) -> None:
    with pytest.raises(RefusedError, match="HF_HOME"):
        start("", HF_HOME="/elsewhere")


@pytest.mark.parametrize(("name", "value"), [("DS_ACCELERATOR", "xpu"), ("CUDA_VISIBLE_DEVICES", "0")])
def test_another_device_is_refused(start: Any, name: str, value: str) -> None:
    with pytest.raises(RefusedError, match=name):
        start("", **{name: value})


def test_a_forked_process_holds_the_pages_of_files_that_its_imports_touched(start: Any) -> None:
    """A fork does not inherit them: a rank would report over 100 MiB less than one that was started cold."""
    (line,) = output(start("import psutil; m = psutil.Process().memory_info(); print(m.rss >> 20, m.shared >> 20)"))
    resident, shared = map(int, line.split())
    assert resident > shared > 100


def test_a_forked_process_inherits_its_streams_alone(start: Any) -> None:
    program = "import os\nfor n in os.listdir('/proc/self/fd'):\n    print(n, os.path.realpath(f'/proc/self/fd/{n}'))"
    inherited = output(start(program))
    assert not [line for line in inherited if "socket:" in line]


def test_a_server_that_is_gone_is_a_refusal() -> None:
    with pytest.raises(RefusedError, match="no fork server"):
        fork_process("1:/gone", [sys.executable, "-m", "toolkit.train"], environment=os.environ)
    with pytest.raises(RefusedError, match="no fork server"):
        fork_process("", [sys.executable, "-m", "toolkit.train"], environment=os.environ)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-u", "-m", "toolkit.train"], ["-m", "toolkit.train"]),
        (["-P", "-m", "x"], ["-P", "-m", "x"]),
        (["mine.py", "-m", "x"], ["mine.py", "-m", "x"]),
        (["-c", "pass"], None),
        (["-X", "dev", "mine.py"], None),
        ([], None),
    ],
)
def test_only_a_module_or_a_script_can_be_forked(words: list[str], expected: list[str] | None) -> None:
    assert python_words([sys.executable, *words]) == expected
    assert python_words(["/usr/bin/env", *words]) is None


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "OMP_NUM_THREADS"])
def test_the_launcher_s_variables_are_read_after_import(name: str) -> None:
    assert READ_AFTER_IMPORT.fullmatch(name)


@pytest.mark.parametrize("name", ["HF_HOME", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", "LD_PRELOAD", "LANG", "HOME"])
def test_what_libraries_or_python_read_at_start_is_not(name: str) -> None:
    assert not READ_AFTER_IMPORT.fullmatch(name)

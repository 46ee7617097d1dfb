"""A forked process is the one that a cold start gives: its streams, its losses, and what is read back from it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import HERE, ForkedProcess, RefusedError, fork_process
from launching import CPU_PRESETS, attested, cpu_environment, fork_server, launch_preset, losses

from toolkit.launch.command import ProcessCommand, new_run_id
from toolkit.launch.process import start_process

pytestmark = pytest.mark.launch


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["fsdp2", "zero3", "single"])
def test_forked_ranks_train_what_cold_ones_train_bit_for_bit(
    preset: str, preset_runs: dict[str, Path], tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    launch_preset(preset, tiny_model, faq_alpaca, tmp_path / preset, cold=True)
    forked, cold, ranks = preset_runs[preset], tmp_path / preset, CPU_PRESETS[preset]
    assert losses(forked, ranks) == losses(cold, ranks)
    assert attested(forked) == attested(cold)


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
        process.wait(60)
        process.stdout.close()


def test_a_forked_program_has_its_arguments_and_its_streams_and_its_files_in_memory(start: Any, tmp_path: Path) -> None:
    """A fork does not inherit pages of files: a rank would report over 100 MiB less than one that was started cold."""
    program = (
        "import os, psutil, sys\nprint(__name__, sys.argv[1:], sys.path[0], sys.modules['__main__'].__name__)\n"
        "print(psutil.Process().memory_info().shared >> 20)\n"
        "for n in os.listdir('/proc/self/fd'):\n    print(n, os.path.realpath(f'/proc/self/fd/{n}'))"
    )
    line, shared, *inherited = start(program, "--a", "b").stdout.read().splitlines()
    assert line == f"__main__ ['--a', 'b'] {tmp_path} __main__"
    assert int(shared) > 100
    assert not [line for line in inherited if "socket:" in line]


def test_a_process_that_would_differ_from_a_cold_start_is_refused(start: Any) -> None:
    for variable in ("HF_HOME", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", "LD_PRELOAD", "LANG"):
        with pytest.raises(RefusedError, match="a variable that libraries may read"):
            start("", **{variable: "another"})
    gone = "/gone:" + fork_server().rpartition(":")[2]
    with pytest.raises(RefusedError, match="no fork server"):
        fork_process(gone, [sys.executable, "-m", "toolkit.train"], environment=cpu_environment())


def test_the_toolkit_forks_its_runs_in_this_process_and_in_those_that_a_test_starts(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('started')")
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    command = ProcessCommand(argv=[sys.executable, str(script)], environment=variables, shown="", run_id=new_run_id())
    with start_process(command, []) as process:
        assert isinstance(process, ForkedProcess)
        assert process.stdout is not None
        assert process.stdout.read() == "started\n"
    program = "import subprocess\nwith subprocess.Popen(args=['true']) as process:\n    print(type(process).__name__)"
    for environment, name in ((cpu_environment(), "WarmPopen"), ({"PYTHONPATH": HERE}, "Popen")):
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert ended.stdout == f"{name}\n"

"""`make setup`: packages that the node can use, what is left out, and DeepSpeed's CPU ops, compiled once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, cpu_environment, run_warm

from toolkit.doctor import node_packages, ops
from toolkit.doctor.node_packages import GPU_PACKAGES, left_out, main
from toolkit.engines.compiled_ops import are_compiled, path_with_ninja
from toolkit.errors import ToolkitError

NO_REAL_GPU = pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def pretend_compiled(folder: Path, *more: str) -> None:
    for op in (*ops.CPU_OPS, *more):
        (folder / op).mkdir(exist_ok=True)
        (folder / op / f"{op}.so").touch()


def test_ops_are_compiled_when_each_has_a_finished_library_newer_than_its_sources(extensions: Path) -> None:
    assert not are_compiled(ops.CPU_OPS)
    pretend_compiled(extensions)
    assert are_compiled(ops.CPU_OPS)
    (extensions / "cpu_adam" / "lock").touch()  # still being compiled
    assert not are_compiled(ops.CPU_OPS)
    (extensions / "cpu_adam" / "lock").unlink()
    os.utime(extensions / "cpu_adam" / "cpu_adam.so", (0, 0))
    assert not are_compiled(ops.CPU_OPS)


def test_the_lock_of_a_killed_compilation_is_removed_and_that_of_a_live_process_kept(
    extensions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_compiled(extensions)
    lock = extensions / "cpu_adam" / "lock"
    with lock.open("w"):
        assert ops.stale_locks() == []
        assert lock.exists()
    assert ops.stale_locks() == [lock]
    ops.compile_ops()
    assert not lock.exists()
    assert ops.main() == 0
    assert capsys.readouterr() == ("", f"DeepSpeed's CPU ops are already compiled in {extensions}\n")


def test_a_missing_compiler_or_header_is_reported_with_the_fix(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sysconfig.get_path", lambda _name: str(extensions))
        with pytest.raises(ToolkitError, match=r"Python\.h is missing .*\n  hint: apt-get install libpython3\.\d+-dev"):
            ops.check_compiler()
    monkeypatch.setenv("PATH", str(extensions))
    monkeypatch.delenv("CXX", raising=False)
    assert ops.main() == 2
    expected = "error: no C++ compiler: 'c++' is not on PATH\n  hint: apt-get install g++   (or set CXX)\n"
    assert capsys.readouterr().err == expected


def test_a_failed_compilation_reports_its_last_line_and_its_log(
    extensions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_LOAD_CODE", "raise SystemExit('ninja: build stopped')")
    with pytest.raises(ToolkitError, match=rf"ninja: build stopped\n  hint: see the log: {extensions}/compile\.log"):
        ops.compile_ops()


def test_ops_are_compiled_without_debug_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    path = ops._without_debug_information(tmp_path, os.environ["PATH"])
    (tmp_path / "file.cpp").write_text("int f() { return 7; }\n")
    subprocess.run(["c++", "-g", "-c", "file.cpp"], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    assert b"debug_info" not in (tmp_path / "file.o").read_bytes()


@pytest.mark.launch
def test_compiled_ops_load_without_compiling(tmp_path: Path) -> None:
    ops.compile_ops()
    libraries = [ops.extensions_folder() / op / f"{op}.so" for op in ops.CPU_OPS]
    before = [library.stat().st_mtime_ns for library in libraries]
    program = tmp_path / "load.py"
    program.write_text(ops._LOAD_CODE)
    environment = cpu_environment() | {"PATH": path_with_ninja()}
    loaded = run_warm([sys.executable, str(program), *ops.CPU_OPS.values()], environment)
    assert loaded.returncode == 0, loaded.stderr
    assert [library.stat().st_mtime_ns for library in libraries] == before


def test_async_io_is_compiled_on_request_where_libaio_is_installed(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "has_libaio_header", lambda: True)
    pretend_compiled(extensions)
    assert ops.main() == 0
    monkeypatch.setattr(ops, "_LOAD_CODE", "import sys; raise SystemExit(f'asked for {sys.argv[1:]}')")
    assert ops.main(["--async-io"]) == 2
    assert "'PinMemoryBuilder', 'AsyncIOBuilder']" in capsys.readouterr().err
    monkeypatch.setattr(ops, "has_libaio_header", lambda: False)
    assert ops.main(["--async-io"]) == 0
    fix = "apt-get install libaio-dev, then `python -m toolkit.doctor.ops --async-io`"
    assert capsys.readouterr().err.splitlines()[-1] == f"without NVMe offload: libaio.h is missing; {fix}"


# -- packages


@pytest.fixture
def eight_gpus(program: Callable[[str, str], None]) -> None:
    """An nvidia-smi that lists eight GPUs."""
    program("nvidia-smi", "for index in 0 1 2 3 4 5 6 7; do echo GPU $index: NVIDIA H100; done")


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_packages, "is_importable", lambda module: module not in GPU_PACKAGES)


@NO_REAL_GPU
@pytest.mark.usefixtures("without_packages")
def test_a_node_without_a_gpu_is_told_how_to_add_the_gpu_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--extras"]) == main() == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(name in lines[0] for name in GPU_PACKAGES)
    assert lines[0].endswith("there is no NVIDIA GPU here")
    assert lines[1] == "  to add it: pip install 'finetune-toolkit[gpu]'"


@NO_REAL_GPU
@pytest.mark.usefixtures("without_packages", "eight_gpus")
def test_a_node_with_a_gpu_needs_the_gpu_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_packages, "find_nvcc", lambda: None)
    monkeypatch.setattr(node_packages, "torch_cuda_version", lambda: None)
    assert main(["--extras"]) == 0
    assert capsys.readouterr().out == "gpu\n"
    packages, cuda, kernels = left_out()
    assert packages.reason == "they are not installed"
    assert cuda.reason.endswith("is a CPU build, so no GPU would be used")
    assert kernels.reason == "there is no nvcc"


@NO_REAL_GPU
@pytest.mark.usefixtures("eight_gpus")
def test_make_setup_installs_the_gpu_packages_on_a_node_with_gpus(tmp_path: Path) -> None:
    log, python = tmp_path / "calls.txt", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # pip and the compiler are only recorded; everything else is the real program.
    recorded = f'case "$*" in *"-m pip"*|*doctor.ops*) echo "$*" >> {log};; *) exec {sys.executable} "$@";; esac'
    python.write_text(f"#!/bin/sh\n{recorded}\n")
    python.chmod(0o755)
    (tmp_path / "venv" / ".set-up").touch()
    hidden = "import sys\nsys.modules.update(dict.fromkeys(['bitsandbytes', 'liger_kernel', 'pynvml']))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = ["make", f"VENV={tmp_path / 'venv'}", "setup"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    install, compile_ops = log.read_text().splitlines()
    assert "-c constraints.txt --no-build-isolation -e .[gpu]" in install
    assert compile_ops == "-m toolkit.doctor.ops"
    assert "set-up: packages for this node's GPUs" in ended.stderr
    assert "left out: GPU packages: bitsandbytes" in ended.stderr

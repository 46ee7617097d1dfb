"""DeepSpeed's CPU ops are compiled once, and a killed compilation does not block the next."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import cpu_environment, run_warm

from toolkit.cache import are_compiled, path_with_ninja
from toolkit.doctor import ops
from toolkit.errors import ToolkitError


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
        ops._drop_stale_lock(lock)
        assert lock.exists()
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


def test_the_compiler_searches_the_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    (tmp_path / "libaio.h").touch()
    assert ops.has_libaio_header()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not ops.has_libaio_header()

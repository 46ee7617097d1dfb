"""Compile DeepSpeed's CPU ops once, so that no training run has to.

    python -m toolkit.doctor.ops
    python -m toolkit.doctor.ops --async-io

DeepSpeed compiles an op when it is first used, inside the run: a minute of a first step, once for each rank that waits.
`--async-io` adds what NVMe offload needs; without libaio's header it says what to install, and does the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.cache import (
    ASYNC_IO_OPS,
    COMPILE_ASYNC_IO,
    INSTALL_LIBAIO,
    are_compiled,
    extensions_folder,
    op_library,
    op_lock,
    path_with_ninja,
    use_cached_extensions,
)
from toolkit.errors import EXIT_WRONG_INPUT, ToolkitError

# The op's library, which is also its folder's name, and the class in deepspeed.ops.op_builder.cpu that builds it:
# collectives between the ranks of one machine, and the optimizer of every offloaded preset.
CPU_OPS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}

# For NVMe offload only, since it needs libaio's header: reading and writing disks past the page cache.
ASYNC_IO_BUILDERS = dict(zip(ASYNC_IO_OPS, ("PinMemoryBuilder", "AsyncIOBuilder"), strict=True))

_LOAD_IN_A_CHILD = "import sys; from toolkit.doctor.ops import load_ops; load_ops(sys.argv[1:])"


def ops_are_compiled() -> bool:
    """Whether every op that a preset without NVMe needs is ready to load; looks at files only."""
    return are_compiled(CPU_OPS)


def compile_ops(builders: dict[str, str] = CPU_OPS) -> float:
    """Compile what is missing; the seconds that it took, 0.0 when nothing was."""
    if are_compiled(builders):
        _say(f"DeepSpeed's CPU ops are already compiled in {extensions_folder()}")
        return 0.0
    check_compiler()
    with _one_at_a_time(extensions_folder()) as folder:
        for op in builders:
            _drop_stale_lock(op_lock(folder, op))
        missing = {op: builder for op, builder in builders.items() if not are_compiled([op])}
        if not missing:
            return 0.0
        _say(f"compiling DeepSpeed's CPU ops ({', '.join(missing)}): about 30 s each on two cores, once")
        started = time.monotonic()
        _compile_in_a_child(folder / "compile.log", list(missing.values()))
        for op in missing:
            op_library(folder, op).touch()
        seconds = time.monotonic() - started
    _say(f"compiled in {seconds:.0f} s into {folder}")
    return seconds


def load_ops(builders: Sequence[str]) -> None:
    """Load each op, which compiles it if need be. Imports torch and DeepSpeed."""
    use_cached_extensions()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder import cpu

    for builder in builders:
        getattr(cpu, builder)().load(verbose=False)


def has_libaio_header() -> bool:
    """Whether the compiler finds libaio.h; asked of the preprocessor, which knows all of its folders."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        return False
    asked = [compiler, "-E", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(asked, input=b"#include <libaio.h>\n", capture_output=True, check=False).returncode == 0


def check_compiler() -> None:
    """Refuse, with the line that fixes it, a machine that cannot compile a Python extension."""
    compiler = os.environ.get("CXX") or "c++"  # torch's own choice
    if shutil.which(compiler) is None:
        raise ToolkitError(f"no C++ compiler: {compiler!r} is not on PATH", hint="apt-get install g++   (or set CXX)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise ToolkitError(
            f"Python.h is missing from {sysconfig.get_path('include')}; compiling needs Python's headers",
            hint=f"apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}-dev",
        )


def _compile_in_a_child(log: Path, builders: list[str]) -> None:
    """In a child: DeepSpeed logs to stdout and picks its accelerator for the rest of the process's life."""
    with log.open("w") as stream:
        child = subprocess.run(
            [sys.executable, "-c", _LOAD_IN_A_CHILD, *builders],
            env={**os.environ, "PATH": path_with_ninja(), "TORCH_EXTENSIONS_DIR": str(log.parent)},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if child.returncode != 0:
        last_line = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise ToolkitError(f"DeepSpeed's CPU ops do not compile: {last_line}", hint=f"the whole log: {log}")


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[Path]:
    """Hold the folder's own lock, which dies with its process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "toolkit.lock").open("w")
    except OSError as error:
        raise ToolkitError(
            f"cannot write the compiled ops to {folder}: {error.strerror}", hint="set TOOLKIT_CACHE to another folder"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is compiling DeepSpeed's CPU ops; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield folder


def _drop_stale_lock(lock: Path) -> None:
    """A killed compilation leaves torch's lock behind, and each later load would wait for it for ever."""
    if lock.exists() and not _is_open_somewhere(lock):
        lock.unlink(missing_ok=True)


def _is_open_somewhere(path: Path) -> bool:
    """Whether a live process has `path` open, as the holder of torch's lock always does."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process ended, or is not ours
            if descriptor.readlink() == path.resolve():
                return True
    return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] = ()) -> int:
    if list(argv) not in ([], ["--async-io"]):
        _say("error: the only option is --async-io")
        return EXIT_WRONG_INPUT
    try:
        if not argv or has_libaio_header():
            compile_ops(CPU_OPS | (ASYNC_IO_BUILDERS if argv else {}))
        else:
            compile_ops()
            _say(f"without NVMe offload: libaio.h is missing; {INSTALL_LIBAIO}, then `{COMPILE_ASYNC_IO}`")
    except ToolkitError as error:
        _say(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

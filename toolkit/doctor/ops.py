"""Compile DeepSpeed's CPU ops once, so that no training run has to.

    python -m toolkit.doctor.ops

DeepSpeed compiles an op when it is first used, inside the run: a minute of a first step, once for each rank that waits.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path

from toolkit.cache import torch_extensions_folder, use_cached_extensions
from toolkit.errors import ToolkitError

# The op's library, which is also its folder's name, and the class in deepspeed.ops.op_builder.cpu that builds it:
# collectives between the ranks of one machine, and the optimizer of every offloaded preset.
CPU_OPS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}

_LOAD_IN_A_CHILD = "from toolkit.doctor.ops import load_ops; load_ops()"


def extensions_folder() -> Path:
    """Where torch keeps compiled ops: the user's TORCH_EXTENSIONS_DIR, otherwise the cache's."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(named) if named else torch_extensions_folder()


def ops_are_compiled() -> bool:
    """Whether every CPU op is ready to load; looks at files only."""
    folder = extensions_folder()
    return all(_is_fresh(_library(folder, op)) and not _lock_file(folder, op).exists() for op in CPU_OPS)


def compile_ops() -> float:
    """Compile what is missing; the seconds that it took, 0.0 when nothing was."""
    if ops_are_compiled():
        _say(f"DeepSpeed's CPU ops are already compiled in {extensions_folder()}")
        return 0.0
    check_compiler()
    with _one_at_a_time(extensions_folder()) as folder:
        for op in CPU_OPS:
            _drop_stale_lock(_lock_file(folder, op))
        if ops_are_compiled():
            return 0.0
        _say(f"compiling DeepSpeed's CPU ops ({', '.join(CPU_OPS)}): about 30 s each on two cores, once")
        started = time.monotonic()
        _compile_in_a_child(folder / "compile.log")
        for op in CPU_OPS:
            _library(folder, op).touch()
        seconds = time.monotonic() - started
    _say(f"compiled in {seconds:.0f} s into {folder}")
    return seconds


def load_ops() -> None:
    """Load each op, which compiles it if need be. Imports torch and DeepSpeed."""
    use_cached_extensions()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder import cpu

    for builder in CPU_OPS.values():
        getattr(cpu, builder)().load(verbose=False)


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


def path_with_ninja() -> str:
    """PATH with this environment's programs first: torch looks for ninja there, activated or not."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _compile_in_a_child(log: Path) -> None:
    """In a child: DeepSpeed logs to stdout and picks its accelerator for the rest of the process's life."""
    with log.open("w") as stream:
        child = subprocess.run(
            [sys.executable, "-c", _LOAD_IN_A_CHILD],
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


def _library(folder: Path, op: str) -> Path:
    return folder / op / f"{op}.so"


def _is_fresh(library: Path) -> bool:
    """Installing torch or DeepSpeed anew, even the same version, makes ninja compile again: its sources are younger."""
    sources = [Path(str(distribution(name).locate_file(f"{name}/__init__.py"))) for name in ("torch", "deepspeed")]
    return library.is_file() and library.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def _lock_file(folder: Path, op: str) -> Path:
    return folder / op / "lock"


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


def main() -> int:
    try:
        compile_ops()
    except ToolkitError as error:
        _say(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compile DeepSpeed's CPU ops once, instead of in every training run.

    python -m toolkit.doctor.ops
    python -m toolkit.doctor.ops --async-io

DeepSpeed compiles an op at its first use inside a run, which takes about a minute of the first step on every rank.
`--async-io` adds the ops of NVMe offload; without libaio's header it prints what to install and compiles the others.
"""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.engines import compiled_ops
from toolkit.engines.compiled_ops import ASYNC_IO_OPS, CPU_OPS, are_compiled, check_extensions_folder, extensions_folder
from toolkit.entry_point import exit_code_of, print_message
from toolkit.errors import EXIT_INVALID_INPUT, ToolkitError
from toolkit.installation import require
from toolkit.presets.spec import PresetSpec

# Direct disk I/O for NVMe offload; separate because it needs libaio's header.
ASYNC_IO_BUILDERS = dict(zip(ASYNC_IO_OPS, ("PinMemoryBuilder", "AsyncIOBuilder"), strict=True))

_LOAD_CODE = "import sys; from toolkit.doctor.ops import load_ops; load_ops(sys.argv[1:])"


def compile_ops(builders: dict[str, str] = CPU_OPS) -> None:
    """Compile the ops that are missing. Raises ToolkitError where that fails, and for a folder of others."""
    require(*compiled_ops.LIBRARIES)
    check_extensions_folder()
    folder = extensions_folder()
    if are_compiled(builders):
        print_message(f"DeepSpeed's CPU ops are already compiled in {folder}")
        return
    check_compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "toolkit.lock").open("w", encoding="utf-8")
    except OSError as error:
        hint = "set TOOLKIT_CACHE to another folder"
        raise ToolkitError(f"cannot write the compiled ops to {folder}: {error.strerror}", hint=hint) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends
        for stale in stale_locks():
            stale.unlink(missing_ok=True)
        missing = {op: builder for op, builder in builders.items() if not are_compiled([op])}
        if not missing:
            return
        print_message(f"compiling DeepSpeed's CPU ops ({', '.join(missing)}): about a minute each on two cores, once")
        started = time.monotonic()
        _compile_in_child_process(folder / "compile.log", missing.values())
        for op in missing:
            compiled_ops.op_library(folder, op).touch()
        print_message(f"compiled in {time.monotonic() - started:.0f} s into {folder}")


def compile_for_run(presets: Iterable[PresetSpec], *, on_cpu: bool) -> None:
    """Compile what ranks on a CPU would compile in their first step, silently; ops for a GPU are left to DeepSpeed."""
    used = [preset for preset in presets if on_cpu and preset.traits.compiles_ops]
    ops = {op: builder for op, builder in CPU_OPS.items() if op != "cpu_adam" or any(each.offloads for each in used)}
    if used and not are_compiled(ops):
        compile_ops(ops)


def load_ops(builders: Sequence[str]) -> None:
    """Load each op, which compiles it if necessary. Imports torch and DeepSpeed."""
    compiled_ops.use_cached_extensions()
    check_extensions_folder()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder import cpu

    for builder in builders:
        getattr(cpu, builder)().load(verbose=False)


def has_libaio_header() -> bool:
    """Return True if the compiler's preprocessor finds libaio.h."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        return False
    command = [compiler, "-E", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=b"#include <libaio.h>\n", capture_output=True, check=False).returncode == 0


def check_compiler() -> None:
    """Raise ToolkitError, with the command to run, if Python extensions cannot be compiled."""
    compiler = os.environ.get("CXX") or "c++"  # torch's own choice
    if shutil.which(compiler) is None:
        raise ToolkitError(f"no C++ compiler: {compiler!r} is not on PATH", hint="apt-get install g++   (or set CXX)")
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        hint = f"apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise ToolkitError(f"Python.h is missing from {include}; compiling needs Python's headers", hint=hint)


def _compile_in_child_process(log: Path, builders: Iterable[str]) -> None:
    """DeepSpeed logs to stdout, and fixes its accelerator for the lifetime of the process."""
    command = [sys.executable, "-c", _LOAD_CODE, *builders]
    with log.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory() as scratch:
        path = _without_debug_information(Path(scratch), compiled_ops.path_with_ninja())
        environment = os.environ | {"PATH": path, "TORCH_EXTENSIONS_DIR": str(log.parent)}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        child = subprocess.run(command, env=environment, check=False, **streams)
    if child.returncode != 0:
        last_line = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ToolkitError(f"DeepSpeed's CPU ops do not compile: {last_line}", hint=f"see the log: {log}")


def _without_debug_information(folder: Path, path: str) -> str:
    """Put a `c++` with `-g0` in front of PATH, except for a compiler of the user's own; ninja sees the same command.

    GCC 12 spends a third of its time for async_io on debug information.
    """
    compiler = shutil.which("c++", path=path)
    if compiler is None or os.environ.get("CXX"):
        return path
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{path}"


def stale_locks() -> list[Path]:
    """Return the locks of killed compilations, for which torch waits forever; a live one keeps its file open."""
    locks = {lock.resolve(): lock for lock in extensions_folder().glob("*/lock")}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with suppress(OSError):  # the process ended, or belongs to another user
            locks.pop(descriptor.readlink(), None)
    return sorted(locks.values())


def main(argv: Sequence[str] = ()) -> int:
    """Compile the ops and return the exit code."""
    if list(argv) not in ([], ["--async-io"]):
        print_message("error: the only option is --async-io")
        return EXIT_INVALID_INPUT
    builders = CPU_OPS | (ASYNC_IO_BUILDERS if argv and has_libaio_header() else {})
    code = exit_code_of(lambda: compile_ops(builders))
    if argv and not code and builders == CPU_OPS:
        fix = f"{compiled_ops.INSTALL_LIBAIO}, then `{compiled_ops.COMPILE_ASYNC_IO}`"
        print_message(f"without NVMe offload: libaio.h is missing; {fix}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

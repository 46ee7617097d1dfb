"""Fork the runs of tests from a process that has already imported torch and the training script: 8 s faster each.

The server is multiprocessing's own, with `preloaded` imported. The first process of a run is `accelerate launch`
itself, whose ranks are then forked too: its own code builds their environment, monitors and ends them, so that exit
codes and log lines are those of a cold start. The toolkit itself knows nothing of it: `warm_popen` replaces the
`Popen` with which it starts a run, and `sitecustomize` does so in each Python that a test starts.
"""

import atexit
import ctypes
import hashlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from warm_popen import ColdPopen, fork_runs

from toolkit.launch.command import RUN_ID_VARIABLE

HERE = str(Path(__file__).parent)
# A running server: its address, and a digest of the variables that libraries have read while it imported them.
SERVER_VARIABLE, PRELOADED = "TOOLKIT_FORK_SERVER", "preloaded"
# The value in the server's environment, as long as a run's id, which overwrites it in each forked process.
RUN_ID_PLACEHOLDER = "0" * 32
# Variables that are read when a process group, an engine or a run is created, not when a library is imported.
READ_AFTER_IMPORT = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|TOOLKIT)_\w+|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|OMP_NUM_THREADS"
    r"|PYTORCH_NVML_BASED_CUDA_CHECK|TORCH_EXTENSIONS_DIR|TORCHINDUCTOR_CACHE_DIR|NCCL_(P2P|IB)_DISABLE"
    r"|PYTHON(PATH|UTF8|IOENCODING|UNBUFFERED)|PATH|PWD|OLDPWD|SHLVL|_|PYTEST_\w+"
)
# Of these, a new process ignores those that its parent ignores, such as SIGHUP under nohup, and no others.
INHERITED_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
_own_server: Any = forkserver.ForkServer()


class RefusedError(Exception):
    """The process cannot be forked like a cold start; the message is the reason."""


class ForkedProcess(ColdPopen[str]):
    """A forked process. It gets SIGTERM when the process that asked for it ends, even if that is killed."""

    def __init__(self, process: Any, args: Sequence[str], stdout: IO[str] | None) -> None:
        self._process, self.args, self.pid, self.returncode = process, args, process.pid, None
        self.stdin, self.stdout, self.stderr = None, stdout, None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        code: int | None = self._process.exitcode
        self.returncode = code
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code. Raises TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


def fork_server(environment: Mapping[str, str]) -> str:
    """Return the server for `fork_process`: the one that this process was given, or its own, which ends with it."""
    if SERVER_VARIABLE in os.environ:
        return os.environ[SERVER_VARIABLE]
    if _own_server._forkserver_pid is None:
        before = dict(os.environ)
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), HERE]))
        added = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", RUN_ID_VARIABLE: RUN_ID_PLACEHOLDER}
        _replace_environment({**environment, **added})
        try:
            _own_server.set_forkserver_preload([PRELOADED, __name__])
            _own_server.ensure_running()
            _own_server.read_at_import = _read_at_import(os.environ)
        finally:
            _replace_environment(before)
    return f"{_own_server._forkserver_address}:{_own_server.read_at_import}"


def _read_at_import(environment: Mapping[str, str]) -> str:
    """A digest of the variables that libraries may read when they are imported, without those that the imports set."""
    set_by_imports = getattr(sys.modules.get(PRELOADED), "SET_BY_IMPORTS", {})  # in a process that was forked itself
    ignored = {*set_by_imports.items(), ("DS_ACCELERATOR", "cpu")}
    kept = [item for item in environment.items() if item not in ignored and not READ_AFTER_IMPORT.fullmatch(item[0])]
    return hashlib.sha256(repr(sorted(kept)).encode()).hexdigest()


def _replace_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def fork_process(
    server: str,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    inherit: Sequence[int] = (),
) -> ForkedProcess:
    """Start a Python program in this process's working directory; its stdin is empty, its limits are the server's.

    Without `stdout`, the process's `stdout` is a pipe for both streams. `inherit` are further file descriptors that the
    process keeps open, under other numbers.

    Raises RefusedError if it would not be like a cold start, or the server does not run.
    """
    words, (address, _, read_at_import) = python_words(argv), server.rpartition(":")
    if words is None:
        raise RefusedError(f"{argv[0]} is not this environment's Python")
    if read_at_import != _read_at_import(environment):
        raise RefusedError("a variable that libraries may read when they are imported differs from the fork server's")
    reader, writer = os.pipe() if stdout is None else (None, stdout)
    numbers = (writer, writer if stderr is None else stderr, *inherit)
    descriptors = [Connection(os.dup(number), readable=False) for number in numbers]  # which multiprocessing passes on
    client: Any = forkserver._forkserver
    client._forkserver_address, client.ensure_running = address, lambda: None  # it would start another server
    if client._forkserver_alive_fd is None:  # the server is to end with its owner, whoever else is connected
        client._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    ignored = [number for number in INHERITED_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    arguments = (words, dict(environment), server, str(Path.cwd()), descriptors, ignored)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=arguments)
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # it is not imported over there
    try:
        process.start()
    except (OSError, EOFError) as error:
        if reader is not None:
            os.close(reader)
        raise RefusedError(f"no fork server answers: {error}") from None
    finally:
        sys.modules["__main__"] = main
        if reader is not None:
            os.close(writer)
    lines = None if reader is None else os.fdopen(reader, encoding="utf-8", errors="replace")
    return ForkedProcess(process, argv, lines)


def python_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words after this environment's Python, if they run a module or a script; None otherwise."""
    python, *words = map(str, argv)
    words = words[words[:1] == ["-u"] :]
    runs = len(words) > 1 if words[:1] == ["-m"] else bool(words) and words[0].endswith(".py")
    return words if runs and python == sys.executable else None


# -- in the forked process


def _run(
    words: list[str],
    environment: dict[str, str],
    server: str,
    folder: str,
    descriptors: list[Any],
    ignored: Sequence[signal.Signals],
) -> None:
    """Become the program: it has the session, streams, folder and environment that the caller gave it."""
    os.setsid()
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), name="owner", daemon=True).start()
    for number, stream in enumerate(descriptors[:2], start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.chdir(folder)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    run_id, shown = environment.get(RUN_ID_VARIABLE, ""), libc.getenv(RUN_ID_VARIABLE.encode())
    if shown and len(run_id) == len(RUN_ID_PLACEHOLDER):  # in /proc/PID/environ, where the run's processes are found
        ctypes.memmove(shown, run_id.encode(), len(run_id))
    preloaded: Any = sys.modules[PRELOADED]
    _replace_environment(preloaded.SET_BY_IMPORTS | environment)
    preloaded.start_like_a_new_process()
    is_module = words[0] == "-m"
    target = words[1] if is_module else str(Path(folder, words[0]).resolve())
    if target in ("accelerate.commands.launch", "torch.distributed.run"):
        _fork_ranks(server)
    elif target.startswith("toolkit"):
        fork_runs()
    sys.argv[:] = [target, *words[1 + is_module :]]
    path = [folder if is_module else str(Path(target).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = list(dict.fromkeys(filter(None, [*path, *preloaded.LIBRARY_PATH])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in INHERITED_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _end_with(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _fork_ranks(server: str) -> None:
    """Let this process, a launcher, fork its ranks too; those that are refused start cold."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    cold_start: Any = subprocess.Popen

    def start(args: Any, *, env: Any = None, stdout: Any = None, stderr: Any = None, **options: Any) -> Any:
        if python_words(args) is not None and set(options) <= {"start_new_session"}:
            out, err = (number if stream is None else stream.fileno() for number, stream in ((1, stdout), (2, stderr)))
            try:
                return fork_process(server, args, environment=env or os.environ, stdout=out, stderr=err)
            except RefusedError as error:
                print(f"cold start: {error}", file=sys.stderr, flush=True)
        return cold_start(args, env=env, stdout=stdout, stderr=stderr, **options)

    subprocess.Popen = subprocess_handler.Popen = start  # type: ignore[assignment,misc]

"""Fork runs from a process that has already imported torch and the training script: on CPUs, and in tests.

    with WarmStart() as warm_start:
        server = warm_start.server(environment)
        process = fork_process(server, [sys.executable, "-m", "toolkit.train", ...], environment=environment)
        process.wait()

The server is multiprocessing's own, with `toolkit.train.preloaded` imported. The first process of a run is
`accelerate launch` itself, whose ranks are then forked too: its own code builds their environment, monitors and ends
them, so that exit codes and log lines are those of a cold start. A forked process has the session, environment, working
directory, resource limits and streams that it would have from `subprocess.Popen`; it only skips its imports. What
cannot be changed after the imports is refused, and the caller then starts the process cold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import psutil

from toolkit.launch.environment import RUN_ID_VARIABLE

# A running server, as `PID:ADDRESS`.
SERVER_VARIABLE, PRELOADED = "TOOLKIT_FORK_SERVER", "toolkit.train.preloaded"
# The value in the server's environment, as long as a run's id, which overwrites it in each forked process.
RUN_ID_PLACEHOLDER = "0" * 32
# What the preloaded imports set where there is no GPU.
CPU_OF_DEEPSPEED = ("DS_ACCELERATOR", "cpu")
# Programs that start ranks as child processes.
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")
# Variables that are read when a process group, an engine or a run is created, not when a library is imported.
READ_AFTER_IMPORT = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|TOOLKIT)_\w+|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|OMP_NUM_THREADS"
    r"|PYTORCH_NVML_BASED_CUDA_CHECK|TORCH_EXTENSIONS_DIR|TORCHINDUCTOR_CACHE_DIR|NCCL_(P2P|IB)_DISABLE"
    r"|TORCH_FORCE_WEIGHTS_ONLY_LOAD|PYTHON(PATH|UTF8|IOENCODING|UNBUFFERED)|PATH|PWD|OLDPWD|SHLVL|_|PYTEST_\w+"
)


class RefusedError(Exception):
    """The process cannot be forked like a cold start; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a forked process becomes; pickled for it."""

    argv: list[str]
    """Without the interpreter: `-m toolkit.train ...`, or `script.py ...`; `-P` before it keeps its folder off the
    path."""
    environment: dict[str, str]
    server: str
    folder: str
    limits: dict[str, tuple[int, int]]
    streams: tuple[Any, Any]
    inherit: tuple[Any, ...]


class _Descriptor:
    """A file descriptor that multiprocessing passes on with a pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.number),)


def _received(duplicate: Any) -> int:
    return int(duplicate.detach())


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that launchers use.

    It gets SIGTERM when the process that asked for it ends, even if that is killed.
    """

    def __init__(self, process: Any, args: Sequence[str], stdout: IO[str] | None) -> None:
        self._process, self.args, self.stdout = process, args, stdout
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code. Raises TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def python_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words after this environment's Python, if they run a module or a script; None otherwise.

    >>> python_words([sys.executable, "-u", "-m", "toolkit.train", "--max_steps", "8"])
    ['-m', 'toolkit.train', '--max_steps', '8']
    >>> python_words(["tee", "train.log"])
    """
    words = list(map(str, argv))
    if words[:1] != [sys.executable]:
        return None
    words = words[2 if words[1:2] == ["-u"] else 1 :]
    program = words[words[:1] == ["-P"] :]
    runs = len(program) > 1 if program[:1] == ["-m"] else bool(program) and program[0].endswith(".py")
    return words if runs else None


def fork_process(
    server: str,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    inherit: Sequence[int] = (),
) -> ForkedProcess:
    """Start a Python program in the working directory and with the resource limits of this process; stdin is empty.

    Without `stdout`, the process's `stdout` is a pipe for both streams. `inherit` are further file descriptors that the
    process keeps open, under other numbers.

    Raises RefusedError if it would not be like a cold start, or the server does not run.
    """
    words = python_words(argv)
    if words is None:
        raise RefusedError(f"{argv[0]} is not this environment's Python")
    check_environment(server, environment)
    reader, writer = os.pipe() if stdout is None else (None, stdout)
    program = Program(
        argv=words,
        environment=dict(environment),
        server=server,
        folder=str(Path.cwd()),
        limits={name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
        streams=(_Descriptor(writer), _Descriptor(writer if stderr is None else stderr)),
        inherit=tuple(map(_Descriptor, inherit)),
    )
    try:
        process = _start(program)
    except (OSError, EOFError) as error:
        if reader is not None:
            os.close(reader)
        raise RefusedError(f"no fork server answers: {error}") from None
    finally:
        if reader is not None:
            os.close(writer)
    lines = None if reader is None else os.fdopen(reader, encoding="utf-8", errors="replace")
    return ForkedProcess(process, argv, lines)


def check_environment(server: str, environment: Mapping[str, str]) -> None:
    """Raise RefusedError where a variable differs that a library may have read while the server imported it."""
    try:
        process = psutil.Process(int(server.partition(":")[0]))
        for _ in range(1000):  # Linux shows no variables for a moment while a process is started
            if imported := process.environ():
                break
            time.sleep(0.001)
    except (psutil.Error, ValueError):
        raise RefusedError(f"no fork server runs at {server}") from None
    set_by_imports = getattr(sys.modules.get(PRELOADED), "SET_BY_IMPORTS", {})  # in a launcher that was forked itself
    for name in sorted({*imported, *environment}):
        value = environment.get(name)
        alike = value in (imported.get(name), set_by_imports.get(name)) or (name, value) == CPU_OF_DEEPSPEED
        if not alike and not READ_AFTER_IMPORT.fullmatch(name):
            raise RefusedError(
                f"libraries may read {name} when they are imported, and it has changed since the fork server started"
            )


def _start(program: Program) -> Any:
    """Start a process of the server that the program names, as multiprocessing does for a server of its own."""
    server: Any = forkserver._forkserver
    server._forkserver_address = program.server.partition(":")[2]
    server.ensure_running = lambda: None  # it would start another server for each process that has started none
    if server._forkserver_alive_fd is None:  # the server is to end with its owner, whoever else is connected
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(program,))
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # it is not imported over there
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


# -- in the forked process


def _run(program: Program) -> None:
    """Become the program: it has the session, streams, limits, folder and environment that the caller gave it."""
    os.setsid()
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), name="owner", daemon=True).start()
    for number, stream in enumerate((program.streams[0], program.streams[1]), start=1):
        os.dup2(stream, number)
    for stream in set(program.streams):
        os.close(stream)
    for name, limits in program.limits.items():
        if resource.getrlimit(getattr(resource, name)) != limits:
            resource.setrlimit(getattr(resource, name), limits)
    os.chdir(program.folder)
    _set_environment(program.environment)
    preloaded: Any = sys.modules[PRELOADED]
    preloaded.start_like_a_new_process(program.environment.get("OMP_NUM_THREADS", ""))
    words = program.argv
    if words[0] == "-m" and words[1] in LAUNCHERS:
        _fork_ranks(program.server)
    sys.path[:] = [*filter(None, program.environment.get("PYTHONPATH", "").split(os.pathsep)), *preloaded.LIBRARY_PATH]
    _run_as_main(words, program.folder)


def _end_with(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _set_environment(environment: Mapping[str, str]) -> None:
    """Set the variables, and keep those that the imports have set; the run's id is shown in /proc/PID/environ too."""
    set_by_imports = {name: os.environ[name] for name in sys.modules[PRELOADED].SET_BY_IMPORTS}
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    run_id, shown = environment.get(RUN_ID_VARIABLE, ""), libc.getenv(RUN_ID_VARIABLE.encode())
    if shown and len(run_id) == len(RUN_ID_PLACEHOLDER):
        ctypes.memmove(shown, run_id.encode(), len(run_id))
    os.environ.clear()
    os.environ.update(set_by_imports | dict(environment))


def _fork_ranks(server: str) -> None:
    """Let this process, a launcher, fork its ranks too; those that are refused start cold."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    cold_start: Any = subprocess.Popen

    def start(args: Any, *, env: Any = None, stdout: Any = None, stderr: Any = None, **options: Any) -> Any:
        if python_words(args) is not None and set(options) <= {"start_new_session"}:
            files = [number if stream is None else stream.fileno() for number, stream in ((1, stdout), (2, stderr))]
            try:
                given = os.environ if env is None else env
                return fork_process(server, args, environment=given, stdout=files[0], stderr=files[1])
            except RefusedError as error:
                print(f"cold start: {error}", file=sys.stderr, flush=True)
        return cold_start(args, env=env, stdout=stdout, stderr=stderr, **options)

    subprocess.Popen = subprocess_handler.Popen = start  # type: ignore[assignment,misc]


def _run_as_main(words: list[str], folder: str) -> None:
    """Run the module or the script as `__main__`. Whatever ends it ends the process as it would end Python."""
    safe_path = words[0] == "-P"
    words = words[safe_path:]
    is_module = words[0] == "-m"
    target = words[1] if is_module else str(Path(folder, words[0]).resolve())
    sys.argv[:] = [target, *words[1 + is_module :]]
    program_folder = [] if safe_path else [folder if is_module else str(Path(target).parent)]
    sys.path[:] = list(dict.fromkeys([*program_folder, *sys.path]))  # Python removes duplicates, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


# -- the server


class WarmStart:
    """A context manager for a server that is started with the first of several runs, and ends with this process.

    Inside a process that was given a server (`SERVER_VARIABLE`), that one is used.
    """

    def __init__(self) -> None:
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload([PRELOADED])

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server; what it has forked runs on."""
        self._server._stop()

    def server(self, environment: Mapping[str, str]) -> str:
        """Return the server for `fork_process`; start it if it does not run.

        `environment` must agree with that of the processes to fork, but for what libraries read after their import.
        """
        if SERVER_VARIABLE in os.environ:
            return os.environ[SERVER_VARIABLE]
        if self._server._forkserver_pid is None:
            with _environment({**environment, "PYTHONUNBUFFERED": "1", RUN_ID_VARIABLE: RUN_ID_PLACEHOLDER}):
                self._server.ensure_running()
        return f"{self._server._forkserver_pid}:{self._server._forkserver_address}"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_python(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a Python program to its end, and return its exit code and what it wrote to stderr.

    It is forked from the server that the environment names, and started cold without one, or where it is refused.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        Path(os.devnull).open("w") as nothing,
    ):
        process: ForkedProcess | subprocess.Popen[bytes]
        try:
            server, out, err = os.environ.get(SERVER_VARIABLE, ""), nothing.fileno(), errors.fileno()
            process = fork_process(server, command, environment=environment, stdout=out, stderr=err)
        except RefusedError:
            process = subprocess.Popen(command, env=environment, stdout=nothing, stderr=errors)
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        return code, errors.read()

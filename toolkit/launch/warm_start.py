"""Start runs from a fork server: a process that has already imported torch and the training script.

    with WarmStart() as warm_start:
        path = warm_start.socket_path(environment, on_line=print)
        process = fork_process(path, [sys.executable, "-m", "toolkit.train", ...], environment=environment)
        process.wait()

A forked process has its own session, CUDA context and process group, and the environment, working directory, limits and
streams that it would have from `subprocess.Popen`; it only skips its imports. The server, `toolkit.train.fork_server`,
refuses requests for which this would not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from toolkit.launch.environment import RUN_ID_VARIABLE

# Names the socket of a running fork server, from which runs are then started.
SOCKET_VARIABLE = "TOOLKIT_FORK_SERVER"
# The value in the server's environment, as long as a run's id, which overwrites it in each forked process.
RUN_ID_PLACEHOLDER = "0" * 32
START_SECONDS = 120.0
STOP_SECONDS = 20.0
MESSAGE_BYTES = 64 * 1024


def server_in_environment() -> str | None:
    """Return the socket of the fork server that the environment names, for the runs of any command."""
    return os.environ.get(SOCKET_VARIABLE)


class RefusedError(Exception):
    """The fork server cannot start this process like a cold start; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCommand:
    """A program that this environment's Python runs: `-m toolkit.train ...` or `script.py ...`."""

    target: str
    """Name of the module, or path of the script."""
    is_module: bool
    arguments: list[str]
    safe_path: bool = False
    """`-P`: the program's folder is not on `sys.path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRequest:
    """What the fork server needs to fork a process; sent as JSON."""

    command: PythonCommand
    environment: dict[str, str]
    working_directory: str
    cgroups: str
    """/proc/self/cgroup of the client."""
    limits: dict[str, tuple[int, int]]
    """Soft and hard resource limit, by the name of the constant in `resource`."""
    cpus: list[int]
    niceness: int
    umask: int
    ignored_signals: list[int]

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ForkRequest:
        """Read what `to_json` wrote."""
        content = json.loads(text)
        limits = {name: (soft, hard) for name, (soft, hard) in content["limits"].items()}
        return cls(**content | {"command": PythonCommand(**content["command"]), "limits": limits})


def python_command(argv: Sequence[str]) -> PythonCommand | None:
    """Parse the argv of a program that this environment's Python runs; return None for any other program.

    >>> python_command([sys.executable, "-u", "-m", "toolkit.train", "--max_steps", "8"])
    PythonCommand(target='toolkit.train', is_module=True, arguments=['--max_steps', '8'], safe_path=False)
    >>> python_command(["tee", "train.log"])
    """
    words = [str(word) for word in argv]
    if len(words) < 2 or words[0] != sys.executable:
        return None
    words, safe_path = words[1:], words[1] == "-P"
    if words[0] in ("-u", "-P"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return PythonCommand(target=words[1], is_module=True, arguments=words[2:], safe_path=safe_path)
    if words and words[0].endswith(".py"):
        return PythonCommand(target=words[0], is_module=False, arguments=words[1:], safe_path=safe_path)
    return None


class ForkedProcess:
    """A process that a fork server started, with the methods of `subprocess.Popen` that launchers use.

    The server sends it SIGTERM when its owner exits or closes it.
    """

    def __init__(self, connection: socket.socket, args: Sequence[str], pid: int, stdout: IO[str] | None) -> None:
        self.args, self.pid, self.stdout = args, pid, stdout
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._receive(timeout_seconds=0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code. Raises TimeoutExpired after `timeout` seconds."""
        code = self._receive(timeout_seconds=timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the connection without waiting; the server sends the process SIGTERM."""
        self.returncode = -signal.SIGTERM
        self._connection.close()

    def _receive(self, *, timeout_seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_seconds)[0]:
            message = _receive(self._connection)
            # No message means that the server was killed; the kernel then sends its children SIGTERM.
            self.returncode = -signal.SIGTERM if message is None else int(message["exit_code"])
            self._connection.close()
        return self.returncode


def fork_process(
    socket_path: str,
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

    Raises RefusedError if the server refuses to fork it, or does not run.
    """
    command = python_command(argv)
    if command is None:
        raise RefusedError(f"{argv[0]} is not this environment's Python")
    request = ForkRequest(
        command=command,
        environment=dict(environment),
        working_directory=str(Path.cwd()),
        cgroups=Path("/proc/self/cgroup").read_text("utf-8"),
        limits={name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
        cpus=sorted(os.sched_getaffinity(0)),
        niceness=os.nice(0),
        umask=_umask(),
        ignored_signals=[n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
    )
    reader, writer = os.pipe() if stdout is None else (None, stdout)
    try:
        connection, pid = _request(socket_path, request, [writer, writer if stderr is None else stderr, *inherit])
    except RefusedError:
        if reader is not None:
            os.close(reader)
        raise
    finally:
        if reader is not None:
            os.close(writer)
    lines = None if reader is None else os.fdopen(reader, encoding="utf-8", errors="replace")
    return ForkedProcess(connection, argv, pid, lines)


def run_python(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a Python program to its end, and return its exit code and what it wrote to stderr.

    It is forked from the server that the environment names, and started cold without one, or where it refuses.
    """
    server = server_in_environment()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process: ForkedProcess | subprocess.Popen[bytes] | None = None
        with contextlib.suppress(RefusedError), Path(os.devnull).open("w") as nothing:
            if server is not None:
                out, err = nothing.fileno(), errors.fileno()
                process = fork_process(server, command, environment=environment, stdout=out, stderr=err)
        if process is None:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        return code, errors.read()


def _request(socket_path: str, request: ForkRequest, descriptors: list[int]) -> tuple[socket.socket, int]:
    """Return the connection for a forked process, and its pid."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    content = os.memfd_create("request")  # a message is limited to about 200 KB
    try:
        connection.connect(socket_path)
        with os.fdopen(os.dup(content), "w") as file:
            file.write(request.to_json())
        socket.send_fds(connection, [b"start"], [content, *descriptors])
        answer = _receive(connection)
    except OSError as error:
        connection.close()
        raise RefusedError(f"no fork server answers at {socket_path}: {error}") from None
    finally:
        os.close(content)
    if answer is None or "pid" not in answer:
        connection.close()
        raise RefusedError((answer or {}).get("refused", "the process could not be forked"))
    return connection, int(answer["pid"])


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Receive one message; None if the server has closed the connection."""
    try:
        content = connection.recv(MESSAGE_BYTES)
    except OSError:
        return None
    return json.loads(content) if content else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServer:
    """A running fork server. When its owner stops it or exits, it ends all of its processes and exits."""

    process: subprocess.Popen[bytes]
    socket_path: str

    def stop(self) -> None:
        """End the server and its processes, and remove its socket."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(Path(self.socket_path).parent, ignore_errors=True)


def start_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Start a fork server and wait until it has imported everything.

    `environment` must agree with that of the processes to fork, except for what the server can change after its
    imports. Raises RefusedError if the server does not start.
    """
    folder = tempfile.mkdtemp(prefix="toolkit-fork-server-")  # only this user can open it
    path = str(Path(folder) / "socket")
    given = dict(environment) | {"PYTHONUNBUFFERED": "1", RUN_ID_VARIABLE: RUN_ID_PLACEHOLDER}
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.train.fork_server", path],
        env=given,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    server, deadline = ForkServer(process=process, socket_path=path), time.monotonic() + START_SECONDS
    while not Path(path).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            server.stop()
            raise RefusedError(f"the fork server did not start (exit code {process.poll()})")
        time.sleep(0.02)
    return server


class WarmStart:
    """A context manager for a fork server that is started with the first of several runs.

    Inside a process that was given a server (`SOCKET_VARIABLE`), that one is used.
    """

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._failed = False

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()

    def socket_path(self, environment: Mapping[str, str], *, on_line: Callable[[str], None]) -> str | None:
        """Return the path of the server's socket; start the server with this environment if it does not run.

        If it fails to start, `on_line` gets the reason once, and None, for a cold start, is returned.
        """
        if server_in_environment() is not None:
            return server_in_environment()
        if self._server is None and not self._failed:
            try:
                self._server = start_fork_server(environment)
            except RefusedError as error:
                self._failed = True
                on_line(f"cold start: {error}")
        return None if self._server is None else self._server.socket_path

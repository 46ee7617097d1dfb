"""Fork server: import the training script once, and fork launchers and ranks that skip their imports.

    python -m toolkit.train.fork_server SOCKET       # exits when its stdin is closed

`toolkit.launch.warm_start` is the client. Each connection gets one forked process. The first one of a run is
`accelerate launch` itself; the ranks that it would start with `python -m toolkit.train` are forked as well. The
launcher's own code still builds the environment of the ranks, monitors them, ends them and reports them, so exit codes
and log lines are those of any other launch.

On a node without a GPU, ranks of DeepSpeed are forked from a second server, a fork of the first one that has imported
torch's compiler too, as DeepSpeed does: in the other ranks, its 45 MiB would add to the host memory that is measured
(unless bitsandbytes is installed: peft imports it in every rank, and it imports the compiler).

A forked process must behave like one that was started cold:

- The server computes nothing and never initialises CUDA.
- The environment, working directory, resource limits, streams and signal handlers are those of the request.
- Anything that cannot be changed after the imports is a reason to refuse, and the client then starts the process cold:
  another control group, another `toolkit` on the path, or an environment variable that libraries may have read while
  they were imported (all except `READ_AFTER_IMPORT`).

Two differences remain: the processes of one server share the seed of string hashes, and numpy's BLAS uses the number of
threads that OMP_NUM_THREADS had when the server started.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import importlib
import importlib.machinery
import json
import locale
import os
import random
import re
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from toolkit.launch.environment import RUN_ID_VARIABLE, UTF8_VARIABLES
from toolkit.launch.process import end_with_parent
from toolkit.launch.warm_start import RUN_ID_PLACEHOLDER, ForkRequest, RefusedError, fork_process, python_command
from toolkit.train.rank_process import garbage_collector_off, prepare_environment

# Variables that are read when a process group, an engine or a run is created, not when a library is imported.
READ_AFTER_IMPORT = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|TOOLKIT)_\w+"
    r"|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    r"|OMP_NUM_THREADS|TORCH_EXTENSIONS_DIR|TORCHINDUCTOR_CACHE_DIR|DS_ACCELERATOR|NCCL_(P2P|IB)_DISABLE"
    r"|PYTORCH_NVML_BASED_CUDA_CHECK|TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    r"|PYTHONPATH|PYTHONUNBUFFERED|PATH|PWD|OLDPWD|SHLVL|_|PYTEST_CURRENT_TEST"
)
# Programs that start ranks as child processes.
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")
# DeepSpeed imports it when it creates an engine. It calls torch.compile, which imports torch's compiler (1 s).
DEEPSPEED_COMPILES = "deepspeed.runtime.zero.muon.original_muon"
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
GRACE_SECONDS = 15.0
REQUEST_SECONDS = 10.0
MAX_DESCRIPTORS = 64  # of one request: its content, stdout, stderr, and what the process inherits


def main(socket_path: str) -> None:
    """Import everything, then serve on the socket until stdin is closed."""
    environment = dict(os.environ)
    set_by_imports = import_training_script()
    check_forkable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The client waits for the socket's name, so it gets its name once it accepts connections.
    listener.bind(f"{socket_path}.starting")
    listener.listen(64)
    Path(f"{socket_path}.starting").rename(socket_path)
    Server(listener, socket_path, environment=environment, set_by_imports=set_by_imports).serve()


def import_training_script() -> dict[str, str]:
    """Import what every rank imports, like `toolkit.train.__main__`; return the variables that the libraries set.

    DeepSpeed too, which accelerate imports in every rank if it is installed. It selects its device when it is imported,
    so on a node with GPUs the rank imports it.
    """
    # Without NVML, the check for GPUs initialises the CUDA driver, which forked processes could not use any more.
    os.environ[NVML_CHECK] = "1"
    with garbage_collector_off():
        prepare_environment()
        before = set(os.environ)
        import torch

        import toolkit.train.script  # noqa: F401

        if not torch.cuda.is_available():
            import deepspeed  # noqa: F401

            before.discard(NVML_CHECK)  # DeepSpeed sets it too
        read_tables()
    return {name: value for name, value in os.environ.items() if name not in before}


def read_tables() -> None:
    """Fill caches that depend on the installed libraries alone: 0.2 s of each rank otherwise.

    transformers compiles a thousand patterns for the weights of all its architectures when a model is loaded; the
    toolkit reads what `TrainingArguments` accepts from its source.
    """
    from transformers import conversion_mapping

    from toolkit.job.script_arguments import argument_words
    from toolkit.versions import accelerator_config_types, training_argument_defaults, training_argument_types

    build = getattr(conversion_mapping, "get_checkpoint_conversion_mapping", None)
    if build is not None:  # transformers 5.23
        build("llama")
    for read in (argument_words, accelerator_config_types, training_argument_defaults, training_argument_types):
        read()


def check_forkable() -> None:
    """Assert that CUDA is not initialised and that this is the only Python thread.

    numpy's BLAS may have threads of its own; it restarts them after a fork.
    """
    import torch

    assert not torch.cuda.is_initialized(), "the fork server must not initialise CUDA"
    assert threading.active_count() == 1, "the fork server must not start threads"


def resident_file_pages() -> list[tuple[int, int]]:
    """Return address and length in bytes of every range of file-backed memory that is resident in this process.

    After a fork, such pages are not resident until the new process touches them. It would therefore report 130 MiB less
    host memory than a process that imported the libraries itself, so `make_resident` restores them (20 ms).
    """
    page = resource.getpagesize()
    stretches: list[tuple[int, int]] = []
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in maps:
            addresses, access, _, _, inode, *_ = line.split()
            if inode == "0" or "r" not in access:
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            entries = array.array("Q", os.pread(pagemap.fileno(), (end - start) // page * 8, start // page * 8))
            for number, entry in enumerate(entries):
                if entry >> 63:  # present
                    address = start + number * page
                    if stretches and sum(stretches[-1]) == address:
                        stretches[-1] = (stretches[-1][0], stretches[-1][1] + page)
                    else:
                        stretches.append((address, page))
    return stretches


def make_resident(stretches: Sequence[tuple[int, int]]) -> None:
    """Make these ranges resident in this process. Has no effect before Linux 5.14."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, length in stretches:
        libc.madvise(address, length, MADV_POPULATE_READ)


class Server:
    """Forks a process per request, reports its exit, and ends it if its owner disconnects."""

    def __init__(
        self,
        requests: socket.socket,
        socket_path: str,
        *,
        environment: Mapping[str, str],
        set_by_imports: dict[str, str],
    ) -> None:
        self.requests, self.socket_path = requests, socket_path
        self.environment, self.set_by_imports = environment, set_by_imports
        self.file_pages = resident_file_pages()
        self.selector = selectors.DefaultSelector()
        self.connections: dict[int, socket.socket] = {}
        """Connection to the owner of each process, by pid; processes whose owner disconnected have none."""
        self.running: dict[int, int] = {}
        """File descriptor (pidfd) of each process, by pid."""
        self.deepspeed: DeepSpeedServer | None = None
        """Started with the first rank of DeepSpeed."""

    def serve(self) -> None:
        """Serve until stdin is closed, then end all processes."""
        self.selector.register(self.requests, selectors.EVENT_READ, self.accept)
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self.end_all()
                    return
                key.data()

    def accept(self) -> None:
        """Read one request from a new connection."""
        connection, _ = self.requests.accept()
        connection.settimeout(REQUEST_SECONDS)
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 16, MAX_DESCRIPTORS)
        except OSError:
            connection.close()
            return
        if len(descriptors) < 3:
            connection.close()
            return
        self.answer(connection, descriptors)

    def answer(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Fork the process of a request, or refuse it. `descriptors` are its content, its streams, and the rest."""
        request = read_request(descriptors[0])
        refusal = why_refused(request, self.environment)
        if refusal is not None:
            send(connection, {"refused": refusal})
            connection.close()
        elif runs_deepspeed(request) and "deepspeed" in sys.modules:
            self.deepspeed = self.deepspeed or self.start_deepspeed_server(connection, descriptors)
            self.deepspeed.forward(connection, descriptors)
        else:
            self.fork(request, connection, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def start_deepspeed_server(self, connection: socket.socket, descriptors: list[int]) -> DeepSpeedServer:
        """Fork the second server, which imports torch's compiler before it answers its first request.

        That request is forwarded like all others: its connection and descriptors are closed in the new process.
        """
        channel, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                self.close_connections()
                channel.close()
                connection.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                make_resident(self.file_pages)  # its own processes inherit what is resident here
                with garbage_collector_off():
                    importlib.import_module(DEEPSPEED_COMPILES)
                    importlib.import_module("cpuinfo").get_cpu_info()  # 1 s; `prepare_environment` caches the result
                check_forkable()
                ForwardedRequests(
                    requests, self.socket_path, environment=self.environment, set_by_imports=self.set_by_imports
                ).serve()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        requests.close()
        return DeepSpeedServer(pid=pid, channel=channel)

    def close_connections(self) -> None:
        """Close what a forked process inherits: a copy of a connection would hide that its owner disconnected."""
        for connection in self.connections.values():
            connection.close()
        for pidfd in self.running.values():
            os.close(pidfd)
        if self.deepspeed is not None:
            self.deepspeed.channel.close()
        self.requests.close()
        self.selector.close()

    def fork(self, request: ForkRequest, connection: socket.socket, descriptors: list[int]) -> None:
        """Fork the process of a request; `descriptors` are its content, stdout, stderr, and those that it inherits."""
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.run_child(request, connection, descriptors, server_pid)
        pidfd = os.pidfd_open(pid)
        self.running[pid], self.connections[pid] = pidfd, connection
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self.reap(pid))
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.lose_owner(pid))

    def reap(self, pid: int) -> None:
        """Report a process's exit to its owner."""
        pidfd = self.running.pop(pid)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        connection = self.connections.pop(pid, None)
        if connection is not None:
            self.selector.unregister(connection)
            send(connection, {"exit_code": os.waitstatus_to_exitcode(status)})
            connection.close()

    def lose_owner(self, pid: int) -> None:
        """End a process whose owner disconnected; an owner sends nothing else on its connection."""
        connection = self.connections.pop(pid)
        self.selector.unregister(connection)
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def end_all(self) -> None:
        """Send SIGTERM to every process, and SIGKILL to those that still run after `GRACE_SECONDS`."""
        deadline = time.monotonic() + GRACE_SECONDS
        if self.deepspeed is not None:
            self.deepspeed.channel.close()
        for pid in self.running:
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so its pid is still its own
        while self.running and time.monotonic() < deadline:
            for key, _ in self.selector.select(0.1):
                if key.data is not None and key.data != self.accept:
                    key.data()
        for pid in list(self.running):
            os.kill(pid, signal.SIGKILL)
            self.reap(pid)
        if self.deepspeed is not None:
            os.waitpid(self.deepspeed.pid, 0)  # it ends its processes in the same time

    def run_child(
        self, request: ForkRequest, connection: socket.socket, descriptors: list[int], server_pid: int
    ) -> NoReturn:
        """Run the program in the forked process, and exit."""
        code = 1
        try:
            os.close(descriptors[0])
            become(request, descriptors[1:], server_pid, self.set_by_imports)
            make_resident(self.file_pages)
            self.close_connections()
            send(connection, {"pid": os.getpid()})
            connection.close()
            if request.command.target in LAUNCHERS:
                start_ranks_by_fork(self.socket_path)
            code = run_program(request)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)


class ForwardedRequests(Server):
    """The second server, whose requests arrive through the first one; it ends with it."""

    def serve(self) -> None:
        """Serve until the first server closes its end of the channel, then end all processes."""
        self.selector.register(self.requests, selectors.EVENT_READ, self.accept)
        self.connected = True
        while self.connected:
            for key, _ in self.selector.select():
                key.data()
        self.end_all()

    def accept(self) -> None:
        """Read one request with its connection."""
        content, descriptors, _, _ = socket.recv_fds(self.requests, 16, MAX_DESCRIPTORS + 1)
        if content:
            self.answer(socket.socket(fileno=descriptors[0]), descriptors[1:])
        else:
            self.connected = False
            self.selector.unregister(self.requests)

    def answer(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Fork the process of a request that the first server has checked."""
        self.fork(read_request(descriptors[0]), connection, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedServer:
    """The second server, as the first one sees it."""

    pid: int
    channel: socket.socket

    def forward(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Pass a request on; if the second server has ended, the client starts the process cold."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.channel, [b"start"], [connection.fileno(), *descriptors])
        connection.close()


def read_request(descriptor: int) -> ForkRequest:
    """Read the content of a request; the descriptor stays open."""
    with os.fdopen(os.dup(descriptor)) as file:
        file.seek(0)
        return ForkRequest.from_json(file.read())


def runs_deepspeed(request: ForkRequest) -> bool:
    """Return True for a rank that accelerate runs with DeepSpeed."""
    return request.environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def why_refused(request: ForkRequest, environment: Mapping[str, str]) -> str | None:
    """Return why a forked process would differ from one that was started cold, or None if it would not.

    `environment` is the server's before its imports. What a rank starts has what the rank set too, as this process.
    """
    alike = {name for name, value in request.environment.items() if os.environ.get(name) == value}
    # In a locale of UTF-8 they change nothing.
    without_effect = set(UTF8_VARIABLES) if locale.getencoding().lower() == "utf-8" else set()
    for name in sorted({*environment, *request.environment} - without_effect - alike):
        if environment.get(name) != request.environment.get(name) and not READ_AFTER_IMPORT.fullmatch(name):
            return f"libraries may read {name} when they are imported, and it has changed since the fork server started"
    device = request.environment.get("DS_ACCELERATOR", "cpu")
    if device != "cpu" and "deepspeed" in sys.modules:
        return f"DS_ACCELERATOR is {device}, and DeepSpeed has selected the CPU when the fork server started"
    if Path("/proc/self/cgroup").read_text("utf-8") != request.cgroups:
        return "the fork server runs in another control group, which may have another memory limit"
    added = set(path_entries(request.environment)) - {*path_entries(environment), request.working_directory}
    if added:  # such a folder may hold a sitecustomize.py, which Python imports at its start
        return f"PYTHONPATH has {', '.join(sorted(added))}, which the fork server was started without"
    found = importlib.machinery.PathFinder.find_spec("toolkit", search_path(request, environment))
    if found is None or found.origin != sys.modules["toolkit"].__file__:
        return f"in {request.working_directory} `import toolkit` finds another toolkit"
    return None


def search_path(request: ForkRequest, environment: Mapping[str, str]) -> list[str]:
    """Return `sys.path` as Python initialises it for the request: the program's folder, then PYTHONPATH."""
    folder, command = Path(request.working_directory), request.command
    program = folder if command.is_module else (folder / command.target).resolve().parent
    first = [] if command.safe_path else [str(program)]
    added = [str(folder / entry) for entry in path_entries(request.environment)]
    own = {sys.path[0], *path_entries(environment)}
    rest = [entry for entry in sys.path if entry not in own]
    return list(dict.fromkeys([*first, *added, *rest]))  # Python removes duplicates, too


def path_entries(environment: Mapping[str, str]) -> list[str]:
    """Return the folders in PYTHONPATH."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def become(request: ForkRequest, descriptors: list[int], server_pid: int, set_by_imports: dict[str, str]) -> None:
    """Give this process the session, streams, limits, working directory and environment of the request."""
    os.setsid()
    end_with_parent()
    if os.getppid() != server_pid:
        os._exit(1)  # the server exited before prctl took effect
    set_signal_handlers(request.ignored_signals)
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    for descriptor in descriptors[:2]:
        os.close(descriptor)
    set_limits(request)
    os.chdir(request.working_directory)
    show_run_id(request.environment.get(RUN_ID_VARIABLE))
    sys.path[:] = search_path(request, os.environ)
    os.environ.clear()
    os.environ.update(set_by_imports | request.environment)
    set_random_seeds()
    set_threads(request.environment.get("OMP_NUM_THREADS"))


def set_signal_handlers(ignored: Sequence[int]) -> None:
    """Handle signals like Python after its start: it ignores two more than its parent, and handles SIGINT itself."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler: Any = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ):
            handler = signal.SIG_IGN
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def set_limits(request: ForkRequest) -> None:
    """Set resource limits, CPU affinity, niceness and umask."""
    for name, limits in request.limits.items():
        if resource.getrlimit(getattr(resource, name)) != limits:
            resource.setrlimit(getattr(resource, name), limits)
    if os.sched_getaffinity(0) != set(request.cpus):
        os.sched_setaffinity(0, request.cpus)
    os.nice(max(0, request.niceness - os.nice(0)))
    os.umask(request.umask)


def set_random_seeds() -> None:
    """Seed the generators of Python, numpy and torch from the operating system, as each process does at its start."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()


def show_run_id(run_id: str | None) -> None:
    """Overwrite the placeholder in /proc/PID/environ, by which the toolkit finds every process of a run."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(RUN_ID_VARIABLE.encode())
    if run_id is not None and address and len(run_id) == len(RUN_ID_PLACEHOLDER):
        ctypes.memmove(address, run_id.encode(), len(run_id))


def set_threads(omp_num_threads: str | None) -> None:
    """Set the number of threads as OMP_NUM_THREADS does, which OpenMP reads when torch is imported."""
    import torch

    if omp_num_threads and omp_num_threads.isdigit() and int(omp_num_threads) != torch.get_num_threads():
        torch.set_num_threads(int(omp_num_threads))


def start_ranks_by_fork(socket_path: str) -> None:
    """Make this process, a launcher, fork its ranks from the server; those that the server refuses start cold."""
    cold_start: Any = subprocess.Popen

    def start(args: Any, *rest: Any, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        outputs = [options.get(name) for name in ("stdout", "stderr")]
        own_session = {"start_new_session"} >= {name for name in options if name not in ("stdout", "stderr")}
        if not rest and own_session and isinstance(args, list | tuple) and python_command(args):
            files = [
                number if output is None else output.fileno() for number, output in zip((1, 2), outputs, strict=True)
            ]
            try:
                given = os.environ if env is None else env
                return fork_process(socket_path, args, environment=given, stdout=files[0], stderr=files[1])
            except RefusedError as error:
                print(f"cold start: {error}", file=sys.stderr, flush=True)
        return cold_start(args, *rest, env=env, **options)

    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = subprocess_handler.Popen = start  # type: ignore[assignment,misc]


def run_program(request: ForkRequest) -> int:
    """Run the program as `__main__`, and return its exit code. KeyboardInterrupt ends the process with SIGINT."""
    sys.argv[:] = [request.command.target, *request.command.arguments]
    code = 0
    try:
        if request.command.is_module:
            runpy.run_module(request.command.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(request.working_directory, request.command.target)), run_name="__main__")
    except SystemExit as leaving:
        code = exit_code_of(leaving)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def exit_code_of(leaving: SystemExit) -> int:
    """Return the exit code of `sys.exit(...)`; a message is printed to stderr and means 1."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1])

"""A `subprocess.Popen` with which `toolkit.launch.process.start_process` forks runs from a fork server."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ColdPopen = subprocess.Popen


class WarmPopen(ColdPopen):  # type: ignore[type-arg]
    """Fork what is started as the toolkit starts a run, where the environment names a server; start the rest cold."""

    def __new__(cls, args: Sequence[str], *_: Any, **options: Any) -> Any:
        environment = options.get("env") or os.environ
        server = environment.get("TOOLKIT_FORK_SERVER")
        is_run = "pass_fds" in options and "start_new_session" in options and options.get("stdout") == subprocess.PIPE
        if server is not None and is_run:
            from fork_server import RefusedError, fork_process

            try:
                return fork_process(server, args, environment=environment, inherit=options["pass_fds"])
            except RefusedError as refusal:
                print(f"cold start: {refusal}", file=sys.stderr, flush=True)
        return super().__new__(cls)


def fork_runs() -> None:
    """Let this process fork the runs that it starts."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]

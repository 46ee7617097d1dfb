"""`toolkit cluster ssh`: one script for every node, and the line that starts it on all of them.

For nodes without a scheduler that share a file system. A torchrun on each node finds the others through the head.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cluster.cluster_job import ClusterJob
from toolkit.cluster.job_files import Place, node_script, python_of, render
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

_HOST = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._:@]{0,252}[A-Za-z0-9])?")
DEFAULT_PORT = 29500
FILE_PLACEHOLDER = "job.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """What only ssh needs. Raises ToolkitError for values that are no hosts."""

    host: Annotated[
        tuple[str, ...], typer.Option(help="a node, by the name that the others reach it by; the first is the head")
    ] = ()
    port: Annotated[int, typer.Option(help="free port on the head")] = DEFAULT_PORT

    def __post_init__(self) -> None:
        check_range("--port", self.port, Range(lowest=1024, highest=65535))
        for host in self.host:
            if not _HOST.fullmatch(host):
                raise ToolkitError(
                    f"--host is {host[:80]!r}, expected a host name or an address", hint="`--host node1`"
                )
        if len(set(self.host)) < len(self.host):
            raise ToolkitError(f"--host {', '.join(self.host)} names a node twice", hint="one `--host` for each node")


def script_file(job: ClusterJob, ssh: SshOptions) -> str:
    """Return the script that runs on every node. Raises ToolkitError unless there is one host for each node."""
    options = job.options
    if len(ssh.host) != options.max_nodes:
        raise ToolkitError(
            f"--nodes {options.nodes} needs {options.max_nodes} --host, got {len(ssh.host)}",
            hint=" ".join(f"--host node{number + 1}" for number in range(min(options.max_nodes, 8))),
        )
    hosts = [host.rpartition("@")[2] for host in ssh.host]
    place = Place(attempt="$ATTEMPT", head=hosts[0], port=str(ssh.port), peer=hosts[1] if len(hosts) > 1 else None)
    return render(
        "ssh.sh.j2",
        options,
        start_line=start_line(ssh, str(options.output or FILE_PLACEHOLDER)),
        folder=Path.cwd(),
        output_dir=job.output_dir,
        script=node_script(job, place, python=shlex.quote(python_of(options, shares_files=True))),
    )


def start_line(ssh: SshOptions, file: str) -> str:
    """Return one line of shell that starts the script on every node, and waits for all of them."""
    path = os.path.abspath(file)  # noqa: PTH100  (the file need not exist yet)
    loop = f'for host in {" ".join(ssh.host)}; do ssh -n $host "bash {shlex.quote(path)} $attempt" & done; wait'
    return f"attempt=$(date +%s); {loop}"

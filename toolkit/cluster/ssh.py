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

from toolkit.cluster.cluster_job import ClusterJob, python_of, written_by
from toolkit.cluster.node_script import Place, node_script
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


def check_hosts(job: ClusterJob, ssh: SshOptions) -> None:
    """Raise ToolkitError unless there is one host for each node."""
    if len(ssh.host) != job.options.max_nodes:
        raise ToolkitError(
            f"--nodes {job.options.nodes} needs {job.options.max_nodes} --host, got {len(ssh.host)}",
            hint=" ".join(f"--host node{number + 1}" for number in range(min(job.options.max_nodes, 8))),
        )


def script_file(job: ClusterJob, ssh: SshOptions) -> str:
    """Return the script that runs on every node, with the line that starts it as a comment."""
    check_hosts(job, ssh)
    hosts = [host.rpartition("@")[2] for host in ssh.host]
    peer = hosts[1] if len(hosts) > 1 else None
    place = Place(attempt="$ATTEMPT", head=hosts[0], port=str(ssh.port), peer=peer)
    file = str(job.options.output or FILE_PLACEHOLDER)
    lines = [
        "#!/bin/bash",
        *written_by(),
        "# On all nodes, within 10 minutes, with one new number for all of them:",
        f"#   {start_line(ssh, file)}",
        "# To stop and save: `kill -TERM` torchrun on one node. The same line again resumes.",
        'export ATTEMPT="${1:?give the same new number on every node: bash job.sh 1}"',
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        f"logs={shlex.quote(str(job.output_dir))}/logs",
        'mkdir -p "$logs" || exit',
        'exec >> "$logs/$ATTEMPT-$HOSTNAME.log" 2>&1',
        *node_script(job, place, python=shlex.quote(python_of(job.options, shares_files=True))),
    ]
    return "\n".join(lines) + "\n"


def start_line(ssh: SshOptions, file: str) -> str:
    """Return one line of shell that starts the script on every node, and waits for all of them."""
    path = os.path.abspath(file)  # noqa: PTH100  (the file need not exist yet)
    loop = f'for host in {" ".join(ssh.host)}; do ssh -n $host "bash {shlex.quote(path)} $attempt" & done; wait'
    return f"attempt=$(date +%s); {loop}"

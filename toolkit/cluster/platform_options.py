"""The options of one platform: SLURM, Kubernetes, SkyPilot, ssh.

They are read for `--help` of every command, so nothing that a job needs is imported here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from typer import Option

from toolkit.cluster.options import Words, check_pattern, check_printable, limit_seconds
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

RENDEZVOUS_PORT = 29500
CPUS_PER_RANK = 4  # the rank, its data loader, and two threads of NCCL; SLURM's own default is one for the whole node
_RESOURCE = "[a-z0-9]([-a-z0-9./]*[a-z0-9])?=[0-9]+[A-Za-z]*"
_DNS_NAME = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_HOST = "[A-Za-z0-9]([-A-Za-z0-9._:@]{0,252}[A-Za-z0-9])?"


class NodeMount(NamedTuple):
    """A source, as the engine names it, and the folder where the nodes see it."""

    source: str
    path: Path


def read_mounts(mounts: Sequence[str], *, expected: str) -> list[NodeMount]:
    """Read SOURCE=/PATH options. Raises ToolkitError for anything else."""
    for text in mounts:
        if not re.fullmatch("(?s).+=/[^=]+", text) or not text.isprintable():
            raise ToolkitError(f"--mount is {text[:80]!r}, expected SOURCE=/PATH", hint=f"`--mount {expected}`")
    return [NodeMount(source, Path(path)) for source, _, path in (text.rpartition("=") for text in mounts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What only SLURM needs. Raises ToolkitError for values that make no job."""

    time_limit: Annotated[str | None, Option(help="MINUTES, HH:MM:SS or D-HH:MM:SS; default: the partition's")] = None
    partition: Annotated[str | None, Option(help="partition to run in")] = None
    account: Annotated[str | None, Option(help="account to charge")] = None
    qos: Annotated[str | None, Option(help="quality of service")] = None
    cpus_per_task: Annotated[int | None, Option(help=f"CPU cores per node; default {CPUS_PER_RANK} per rank")] = None
    sbatch_option: Annotated[Words, Option(help='another option of sbatch, for example "mem=0"; repeatable')] = ()
    module: Annotated[Words, Option(help="environment module to load; repeatable")] = ()
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"], Option(help="what runs --container: pyxis (enroot) or apptainer")
    ] = "pyxis"
    container_mounts: Annotated[
        str | None, Option(help="SOURCE:TARGET,... for the container; the working directory is always mounted")
    ] = None
    requeue: Annotated[bool, Option("--requeue/--no-requeue", help="put an interrupted run back into the queue")] = True
    repeats: Annotated[
        int | None, Option(help="with several --preset: trials of each row; default: as `toolkit compare`")
    ] = None
    submit: Annotated[bool, Option("--submit", help="submit the file with sbatch")] = False

    def __post_init__(self) -> None:
        check_range("--cpus-per-task", self.cpus_per_task, Range(lowest=1, highest=4096))
        check_range("--repeats", self.repeats, Range(lowest=1, highest=1000))
        if self.time_limit is not None:
            limit_seconds(self.time_limit)
        words = {"--partition": self.partition, "--account": self.account, "--qos": self.qos}
        words |= {"--container-mounts": self.container_mounts}
        check_printable({name: word or "" for name, word in words.items()})
        check_printable({"--module": self.module, "--sbatch-option": self.sbatch_option})

    @property
    def mounts(self) -> str:
        """What a container sees, for the shell."""
        more = "" if self.container_mounts is None else f",{shlex.quote(self.container_mounts)}"
        return f'"$PWD:$PWD"{more}'


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """What only Kubernetes needs. Raises ToolkitError for values that make no object."""

    kind: Annotated[
        Literal["jobset", "trainjob"], Option(help="jobset, or trainjob: Kubeflow Trainer v2 with a runtime")
    ] = "jobset"
    mount: Annotated[
        Words, Option(help="CLAIM=/PATH: a PersistentVolumeClaim (ReadWriteMany) in every pod; repeatable")
    ] = ()
    namespace: Annotated[str | None, Option(help="namespace; default: that of kubectl's context")] = None
    resource: Annotated[Words, Option(help='limit of a pod beside its GPUs, for example "rdma/ib=8"; repeatable')] = ()
    shm_gib: Annotated[int, Option(help="size of /dev/shm")] = 16
    time_limit: Annotated[str | None, Option(help="MINUTES, HH:MM:SS or D-HH:MM:SS; default: none")] = None
    job_restarts: Annotated[int, Option(help="restarts of all pods after one was evicted, lost or failed")] = 3
    submit: Annotated[bool, Option("--submit", help="submit the objects with `kubectl apply`")] = False

    def __post_init__(self) -> None:
        check_range("--job-restarts", self.job_restarts, Range(lowest=0, highest=1000))
        check_range("--shm-gib", self.shm_gib, Range(lowest=1, highest=4096))
        if self.time_limit is not None:
            limit_seconds(self.time_limit)
        for text in self.resource:
            check_pattern("--resource", text, _RESOURCE, "NAME=AMOUNT", hint='`--resource "memory=64Gi"`')
        if self.namespace is not None:
            check_pattern("--namespace", self.namespace, _DNS_NAME, "lower-case letters, digits and dashes")
        for mount in self.mounts:
            if not re.fullmatch(_DNS_NAME, mount.source):
                raise ToolkitError(f"--mount {mount.source[:80]!r} is no name of a claim", hint="`kubectl get pvc`")

    @property
    def mounts(self) -> list[NodeMount]:
        return read_mounts(self.mount, expected="my-claim=/runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotOptions:
    """What only SkyPilot needs. Raises ToolkitError for values that make no task."""

    gpu: Annotated[str | None, Option(help="SkyPilot's name of the GPU, for example H100 (`sky gpus list`)")] = None
    mount: Annotated[
        Words, Option(help="SOURCE=/PATH: a bucket (s3://...) or a local folder, mounted on every node; repeatable")
    ] = ()
    infra: Annotated[str | None, Option(help="where to run: aws, gcp/us-central1, kubernetes, ...")] = None
    spot: Annotated[bool, Option("--spot", help="use spot instances; the job is recovered on others")] = False
    workdir: Annotated[str | None, Option(help="local folder to copy to every node; training starts in it")] = None
    install: Annotated[Words, Option(help="shell line that installs on a new node, once; repeatable")] = ()
    job_restarts: Annotated[
        int, Option(help="restarts of the job after an error of its own; preemptions are not counted")
    ] = 0
    submit: Annotated[bool, Option("--submit", help="submit the task with `sky jobs launch`")] = False

    def __post_init__(self) -> None:
        check_range("--job-restarts", self.job_restarts, Range(lowest=0, highest=1000))
        check_printable({"--install": self.install, "--infra": (self.infra or "",)})

    @property
    def mounts(self) -> list[NodeMount]:
        return read_mounts(self.mount, expected="s3://bucket=/runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """What only ssh needs. Raises ToolkitError for values that are no hosts."""

    host: Annotated[Words, Option(help="a node, by the name that the others reach it by; the first is the head")] = ()
    port: Annotated[int, Option(help="free port on the head")] = RENDEZVOUS_PORT

    def __post_init__(self) -> None:
        check_range("--port", self.port, Range(lowest=1024, highest=65535))
        for host in self.host:
            check_pattern("--host", host, _HOST, "a host name or an address", hint="`--host node1`")
        if len(set(self.host)) < len(self.host):
            raise ToolkitError(f"--host {', '.join(self.host)} names a node twice", hint="one `--host` for each node")

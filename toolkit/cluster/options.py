"""The options of `toolkit cluster`: one job specification for all engines, and what only one of them needs.

They are read for `--help` of every command, so nothing that a job needs is imported here.

>>> JobOptions(preset=("zero2",), nodes="2:1")
Traceback (most recent call last):
toolkit.errors.ToolkitError: --nodes is '2:1', expected a number, or MIN:MAX for an elastic run
  hint: `--nodes 2`, or `--nodes 1:2`
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from typer import Option

from toolkit.errors import ToolkitError
from toolkit.files.secrets import is_secret_name
from toolkit.flags import JsonOutput, PresetNames, TrainingArguments
from toolkit.job.argument_values import Range, check_range
from toolkit.launch.options import MAX_RESTARTS

MAX_NODES = 10_000
MAX_GPUS_PER_NODE = 1024
MAX_NAME = 40  # a job's name is part of host names, of which Kubernetes allows 63 characters with what it appends
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DAY_SECONDS = 24 * 60 * 60
Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What runs, on how many nodes, and what each node needs. Raises ToolkitError for values that make no job."""

    preset: PresetNames
    nodes: Annotated[str, Option(help="number of nodes; MIN:MAX for an elastic run that survives lost nodes")]
    gpus_per_node: Annotated[int, Option(help="ranks per node, one per GPU; with --cpu, processes")] = 8
    training_arguments: TrainingArguments = ()
    name: Annotated[str | None, Option(help="name of the job; default: the preset's")] = None
    max_restarts: Annotated[
        int | None, Option(help="restarts by torchrun after a failed rank or node; default 0, elastic 3")
    ] = None
    env: Annotated[Words, Option(help="NAME=VALUE, or NAME: the value at submission, not in the file; repeatable")] = ()
    setup: Annotated[Words, Option(help="shell line to run on each node before training; repeatable")] = ()
    container: Annotated[str | None, Option(help="container image to run in")] = None
    python: Annotated[
        str | None, Option(help="Python on the nodes; default: this one, or `python` elsewhere and in containers")
    ] = None
    save_seconds: Annotated[
        float | None, Option(help="seconds that a checkpoint takes; default: as --saves-of measured")
    ] = None
    saves_of: Annotated[Path | None, Option(help="run folder whose measured saves are used; default: --output_dir")] = (
        None
    )
    preflight: Annotated[
        bool, Option("--preflight", help="run `toolkit doctor` on every node first, and compare the nodes")
    ] = False
    cpu: Annotated[bool, Option("--cpu", help="train on CPUs, for tests")] = False
    check_files: Annotated[
        bool,
        Option("--check-files/--no-check-files", help="read model and data here; --no-... if only the nodes have them"),
    ] = True
    output: Annotated[Path | None, Option(help="write the job file here instead of to stdout")] = None
    as_json: JsonOutput = False

    def __post_init__(self) -> None:
        check_range("--gpus-per-node", self.gpus_per_node, Range(lowest=1, highest=MAX_GPUS_PER_NODE))
        check_range("--max-restarts", self.max_restarts, Range(lowest=0, highest=MAX_RESTARTS))
        check_range("--save-seconds", self.save_seconds, Range(above=0, highest=DAY_SECONDS))
        if not re.fullmatch("[0-9]{1,6}(:[0-9]{1,6})?", self.nodes) or self.min_nodes > self.max_nodes:
            raise ToolkitError(
                f"--nodes is {self.nodes[:40]!r}, expected a number, or MIN:MAX for an elastic run",
                hint="`--nodes 2`, or `--nodes 1:2`",
            )
        for count in (self.min_nodes, self.max_nodes):
            check_range("--nodes", count, Range(lowest=1, highest=MAX_NODES))
        if not self.preset:
            raise ToolkitError("missing option '--preset'", hint="`--preset zero2`; `toolkit presets` lists them")
        for item in self.env:
            name, equals, value = item.partition("=")
            if not _VARIABLE.fullmatch(name) or not value.isprintable():
                message = f"--env is {item[:80]!r}, expected NAME=VALUE or NAME"
                raise ToolkitError(message, hint="`--env NCCL_DEBUG=INFO`")
            if equals and is_secret_name(name):
                message = f"--env {name}=... would write a secret into the job file"
                raise ToolkitError(message, hint=f"`--env {name}`")
        if self.name is not None:
            expected = "at most 40 lower-case letters, digits and dashes"
            check_pattern("--name", self.name, "[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", expected, hint="`--name my-run`")
        check_printable({"--setup": self.setup, "--container": (self.container or "",)})

    @property
    def min_nodes(self) -> int:
        return int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        return int(self.nodes.rpartition(":")[2])

    @property
    def elastic(self) -> bool:
        return self.min_nodes != self.max_nodes

    @property
    def world_sizes(self) -> range:
        """The numbers of ranks with which the job may run."""
        per_node = self.gpus_per_node
        return range(self.min_nodes * per_node, self.max_nodes * per_node + 1, per_node)

    @property
    def restarts(self) -> int:
        """`max_restarts`, by default 0; 3 for an elastic run, which counts each node that is lost."""
        return self.max_restarts if self.max_restarts is not None else 3 if self.elastic else 0

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with a value that is written into the job file."""
        return dict(item.split("=", 1) for item in self.env if "=" in item)

    @property
    def passed_variables(self) -> list[str]:
        """Names of variables whose values are taken from the environment at submission."""
        return [item for item in self.env if "=" not in item]


def limit_seconds(text: str) -> int:
    """Return SLURM's time limit in seconds: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    found = re.fullmatch("(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)
    if found is None:
        hint = "`--time-limit 4:00:00`"
        raise ToolkitError(f"--time-limit is {text[:40]!r}, expected MINUTES, HH:MM:SS or D-HH:MM:SS", hint=hint)
    days, *parts = (None if part is None else int(part) for part in found.groups())
    units = (3600, 60, 1) if days is not None or None not in parts else (60, 1)
    return (days or 0) * DAY_SECONDS + sum((part or 0) * unit for part, unit in zip(parts, units, strict=False))


def check_pattern(option: str, value: str, pattern: str, expected: str, *, hint: str | None = None) -> None:
    """Raise ToolkitError for a value of an option that is not what the pattern describes."""
    if not re.fullmatch(pattern, value):
        raise ToolkitError(f"{option} is {value[:80]!r}, expected {expected}", hint=hint)


def check_printable(options: Mapping[str, Sequence[str]]) -> None:
    """Raise ToolkitError for a value of an option with a line break: it would be another line of the job file."""
    for option, lines in options.items():
        if not all(line.isprintable() for line in lines):
            raise ToolkitError(f"{option} has a line break or a control character", hint=f"repeat `{option}`")


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

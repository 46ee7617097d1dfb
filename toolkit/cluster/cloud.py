"""Nodes without a shared file system, in containers or clouds: `toolkit cluster kubernetes` and `skypilot`.

On Kubernetes a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime, starts one pod per node. The pods
find each other by the headless service of the JobSet: the head is the pod with index 0. A failed pod ends all pods, and
the JobSet starts all of them again; the run then resumes. On SkyPilot a task of several nodes is started with `sky jobs
launch`, which recovers it after a preemption.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import typer

from toolkit.cluster.cluster_job import ClusterJob
from toolkit.cluster.job_files import Place, node_script, python_of, render
from toolkit.cluster.options import JobOptions, check_printable, limit_seconds
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9./]*[a-z0-9])?=[0-9]+[A-Za-z]*")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# What Kubernetes replaces in a command: a variable in $(NAME), and two dollar signs by one.
_EXPANDED = re.compile(r"\$(?=\([A-Za-z_][-\w.]*\))|\$\$+")


# The task's id stays after a recovery: the number of the job on its cluster and the head's address change.
SKYPILOT_PLACE = Place(attempt="$ATTEMPT", head="$HEAD_NODE", peer="$PEER_NODE")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMount:
    """A source, as the engine names it, and the folder where the nodes see it."""

    source: str
    path: PurePosixPath

    @classmethod
    def read(cls, text: str, *, expected: str) -> NodeMount:
        """Read SOURCE=/PATH. Raises ToolkitError for anything else."""
        source, _, path = text.rpartition("=")
        if not source or not path.startswith("/") or path == "/" or not text.isprintable():
            raise ToolkitError(f"--mount is {text[:80]!r}, expected SOURCE=/PATH", hint=f"`--mount {expected}`")
        return cls(source=source, path=PurePosixPath(path))


def check_mounted(output_dir: Path, mounts: Sequence[NodeMount], *, example: str) -> None:
    """Raise ToolkitError where the run folder is in no mount: each node would write into a folder of its own."""
    if not output_dir.is_absolute() or not any(output_dir.is_relative_to(mount.path) for mount in mounts):
        shown = ", ".join(str(mount.path) for mount in mounts) or "none"
        raise ToolkitError(
            f"--output_dir {output_dir} is in no folder that all nodes mount ({shown}): each would write its own",
            hint=f"`{example}`, and `--output_dir /runs/NAME`",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """What only Kubernetes needs. Raises ToolkitError for values that make no object."""

    kind: Annotated[
        Literal["jobset", "trainjob"], typer.Option(help="jobset, or trainjob: Kubeflow Trainer v2 with a runtime")
    ] = "jobset"
    mount: Annotated[
        tuple[str, ...],
        typer.Option(help="CLAIM=/PATH: a PersistentVolumeClaim (ReadWriteMany) in every pod; repeatable"),
    ] = ()
    namespace: Annotated[str | None, typer.Option(help="namespace; default: that of kubectl's context")] = None
    resource: Annotated[
        tuple[str, ...], typer.Option(help='limit of a pod beside its GPUs, for example "rdma/ib=8"; repeatable')
    ] = ()
    shm_gib: Annotated[
        int, typer.Option(help="size of /dev/shm, through which ranks of a node and data loaders exchange data")
    ] = 16
    time_limit: Annotated[str | None, typer.Option(help="MINUTES, HH:MM:SS or D-HH:MM:SS; default: none")] = None
    job_restarts: Annotated[int, typer.Option(help="restarts of all pods after one was evicted, lost or failed")] = 3
    submit: Annotated[bool, typer.Option("--submit", help="submit the objects with `kubectl apply`")] = False

    def __post_init__(self) -> None:
        check_range("--job-restarts", self.job_restarts, Range(lowest=0, highest=1000))
        check_range("--shm-gib", self.shm_gib, Range(lowest=1, highest=4096))
        if self.time_limit is not None:
            limit_seconds(self.time_limit)
        for text in self.resource:
            if not _RESOURCE.fullmatch(text):
                raise ToolkitError(
                    f"--resource is {text[:80]!r}, expected NAME=AMOUNT", hint='`--resource "memory=64Gi"`'
                )
        if self.namespace is not None and not _DNS_NAME.fullmatch(self.namespace):
            raise ToolkitError(
                f"--namespace is {self.namespace[:80]!r}, expected lower-case letters, digits and dashes"
            )
        for mount in self.mounts:
            if not _DNS_NAME.fullmatch(mount.source):
                raise ToolkitError(f"--mount {mount.source[:80]!r} is no name of a claim", hint="`kubectl get pvc`")

    @property
    def mounts(self) -> list[NodeMount]:
        return [NodeMount.read(text, expected="my-claim=/runs") for text in self.mount]


def manifest(job: ClusterJob, kubernetes: KubernetesOptions) -> str:
    """Return the objects. Raises ToolkitError for what they cannot express."""
    if job.options.container is None:
        raise ToolkitError("--container is missing: a pod runs an image", hint="`--container my-registry/image:tag`")
    if kubernetes.kind == "trainjob" and job.options.elastic:
        raise ToolkitError(
            f"--nodes {job.options.nodes} with --kind trainjob: Kubeflow Trainer v2 has a fixed number of nodes",
            hint="`--kind jobset`",
        )
    check_mounted(job.output_dir, kubernetes.mounts, example="--mount my-claim=/runs")
    # The names of the first two pods in the headless service of the JobSet.
    head, peer = (f"{job.name}-node-0-{index}.{job.name}" for index in (0, 1))
    place = Place(attempt="$ATTEMPT", head=head, peer=peer if job.options.min_nodes > 1 else None)
    script = f'export ATTEMPT="{job.name}-$RESTART_ATTEMPT"\n'
    script += node_script(job, place, python=python_of(job.options, shares_files=False))
    gpus = {} if job.options.cpu else {"nvidia.com/gpu": str(job.options.gpus_per_node)}
    resources = {name: amount for name, _, amount in (text.rpartition("=") for text in kubernetes.resource)}
    return render(
        "kubernetes.yaml.j2",
        job.options,
        job=job,
        kubernetes=kubernetes,
        command={"command": ["bash", "-c", literal(script)]},
        limits=gpus | resources,
        deadline=None if kubernetes.time_limit is None else limit_seconds(kubernetes.time_limit),
    )


def literal(text: str) -> str:
    """Return a text that Kubernetes gives a container unchanged.

    >>> literal("echo $(HOME) $HOME $(hostname -i) $$")
    'echo $$(HOME) $HOME $(hostname -i) $$$$'
    """
    return _EXPANDED.sub(lambda found: found[0] * 2, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotOptions:
    """What only SkyPilot needs. Raises ToolkitError for values that make no task."""

    gpu: Annotated[str | None, typer.Option(help="SkyPilot's name of the GPU, for example H100 (`sky gpus list`)")] = (
        None
    )
    mount: Annotated[
        tuple[str, ...],
        typer.Option(help="SOURCE=/PATH: a bucket (s3://...) or a local folder, mounted on every node; repeatable"),
    ] = ()
    infra: Annotated[str | None, typer.Option(help="where to run: aws, gcp/us-central1, kubernetes, ...")] = None
    spot: Annotated[bool, typer.Option("--spot", help="use spot instances; the job is recovered on others")] = False
    workdir: Annotated[str | None, typer.Option(help="local folder to copy to every node; training starts in it")] = (
        None
    )
    install: Annotated[
        tuple[str, ...], typer.Option(help="shell line that installs on a new node, once; repeatable")
    ] = ()
    job_restarts: Annotated[
        int, typer.Option(help="restarts of the job after an error of its own; preemptions are not counted")
    ] = 0
    submit: Annotated[bool, typer.Option("--submit", help="submit the task with `sky jobs launch`")] = False

    def __post_init__(self) -> None:
        check_range("--job-restarts", self.job_restarts, Range(lowest=0, highest=1000))
        check_printable({"--install": self.install, "--infra": (self.infra or "",)})

    @property
    def mounts(self) -> list[NodeMount]:
        return [NodeMount.read(text, expected="s3://bucket=/runs") for text in self.mount]


def task_file(job: ClusterJob, sky: SkyPilotOptions) -> str:
    """Return the task. Raises ToolkitError for an elastic job, and for a run folder that no mount holds."""
    if job.options.elastic:
        raise ToolkitError(
            f"--nodes {job.options.nodes} on SkyPilot: a task has a fixed number of nodes, and is recovered as a whole",
            hint=f"`--nodes {job.options.max_nodes}`",
        )
    if sky.gpu is None and not job.options.cpu:
        raise ToolkitError("--gpu is missing: SkyPilot chooses the instance by its GPU", hint="`--gpu H100`")
    check_mounted(job.output_dir, sky.mounts, example="--mount s3://my-bucket=/runs")
    resources = {
        "infra": sky.infra,
        "accelerators": None if job.options.cpu else {str(sky.gpu): job.options.gpus_per_node},
        "use_spot": sky.spot or None,
        "image_id": None if job.options.container is None else f"docker:{job.options.container}",
        "job_recovery": {"max_restarts_on_errors": sky.job_restarts} if sky.job_restarts else None,
    }
    return render(
        "skypilot.yaml.j2",
        job.options,
        job=job,
        sky=sky,
        resources={name: value for name, value in resources.items() if value is not None},
        script=node_script(job, SKYPILOT_PLACE, python=python_of(job.options, shares_files=False)),
    )


def submit_command(options: JobOptions) -> list[str]:
    """Return the command that submits a task; secrets are taken from the environment by their names."""
    return ["sky", "jobs", "launch", "--yes", *(f"--secret={name}" for name in options.passed_variables)]

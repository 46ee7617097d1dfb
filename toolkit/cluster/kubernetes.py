"""`toolkit cluster kubernetes`: a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime.

Both start one pod per node, which find each other by the headless service of the JobSet: the head is the pod with index
0. A failed pod ends all pods, and the JobSet starts all of them again; the run then resumes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from toolkit.cluster.cluster_job import ClusterJob
from toolkit.cluster.job_files import Place, node_script, python_of, render
from toolkit.cluster.options import NodeMount, check_mounted, limit_seconds
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9./]*[a-z0-9])?=[0-9]+[A-Za-z]*")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# What Kubernetes replaces in a command: a variable in $(NAME), and two dollar signs by one.
_EXPANDED = re.compile(r"\$(?=\([A-Za-z_][-\w.]*\))|\$\$+")


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

"""`toolkit cluster kubernetes`: a JobSet, or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime.

Both start one pod per node, which find each other by the headless service of the JobSet: the head is the pod with index
0. A failed pod ends all pods, and the JobSet starts all of them again; the run then resumes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from toolkit.cluster.cluster_job import ClusterJob, python_of, written_by
from toolkit.cluster.mounts import NodeMount, check_mounted
from toolkit.cluster.node_script import Place, node_script
from toolkit.cluster.options import limit_seconds
from toolkit.cluster.yaml_documents import yaml_documents
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

REPLICATED_JOB = "node"  # Kubeflow Trainer v2 expects this name of the trainer's job and container
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
GPU_RESOURCE = "nvidia.com/gpu"
SHM_VOLUME = "shm"
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
    documents = _train_job(job, kubernetes) if kubernetes.kind == "trainjob" else [_job_set(job, kubernetes)]
    return "\n".join([*written_by(), *_secret_comment(job)]) + "\n" + yaml_documents(documents)


def secret_name(job: ClusterJob) -> str:
    """Return the name of the Secret from which the pods take the variables that are passed by name."""
    return f"{job.name}-env"


def _secret_comment(job: ClusterJob) -> list[str]:
    names = job.options.passed_variables
    literals = " ".join(f'--from-literal={name}="${name}"' for name in names)
    return [f"# First: kubectl create secret generic {secret_name(job)} {literals}"] if names else []


def _metadata(job: ClusterJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    namespace = {} if kubernetes.namespace is None else {"namespace": kubernetes.namespace}
    return {"name": job.name, **namespace}


def _job_set(job: ClusterJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    pod = _pod(job, kubernetes, container=_container(job, kubernetes))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, kubernetes),
        "spec": _job_set_spec(job, kubernetes, pod=pod, labels={}),
    }


def _job_set_spec(
    job: ClusterJob, kubernetes: KubernetesOptions, *, pod: dict[str, Any], labels: dict[str, str]
) -> dict[str, Any]:
    options, elastic = job.options, job.options.elastic
    template: dict[str, Any] = {"metadata": {"labels": labels}} if labels else {}
    template["spec"] = {
        "parallelism": options.max_nodes,
        "completions": options.max_nodes,
        "completionMode": "Indexed",
        # Elastic: a lost pod is replaced, and joins the others. Otherwise the JobSet starts all of them again.
        "backoffLimit": options.restarts if elastic else 0,
        **_deadline(kubernetes),
        **({"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if elastic else {}),
        "template": {"spec": pod},
    }
    return {
        "failurePolicy": {"maxRestarts": kubernetes.job_restarts},
        # The head's name exists before its pod is ready: the others look for it at once.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }


def _deadline(kubernetes: KubernetesOptions) -> dict[str, int]:
    limit = kubernetes.time_limit
    return {} if limit is None else {"activeDeadlineSeconds": limit_seconds(limit)}


def _pod(job: ClusterJob, kubernetes: KubernetesOptions, *, container: dict[str, Any]) -> dict[str, Any]:
    shm = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{kubernetes.shm_gib}Gi"}}
    claims = [
        {"name": f"mount-{index}", "persistentVolumeClaim": {"claimName": mount.source}}
        for index, mount in enumerate(kubernetes.mounts)
    ]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.signal_seconds,
        "containers": [container],
        "volumes": [shm, *claims],
    }


def _container(job: ClusterJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    """Return the container of a pod; under a TrainJob, its runtime's."""
    peer = f"{job.name}-{REPLICATED_JOB}-0-1.{job.name}"
    head = f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}"
    place = Place(attempt="$ATTEMPT", head=head, peer=peer if job.options.min_nodes > 1 else None)
    return {
        "name": REPLICATED_JOB,
        "image": job.options.container,
        "command": _command(job, place),
        "env": _env(job),
        "resources": {"limits": _limits(job, kubernetes)},
        "volumeMounts": _volume_mounts(kubernetes),
    }


def _command(job: ClusterJob, place: Place) -> list[str]:
    script = [f'export ATTEMPT="{job.name}-$RESTART_ATTEMPT"']
    script += node_script(job, place, python=python_of(job.options, shares_files=False))
    return ["bash", "-c", literal("\n".join(script) + "\n")]


def literal(text: str) -> str:
    """Return a text that Kubernetes gives a container unchanged.

    >>> literal("echo $(HOME) $HOME $(hostname -i) $$")
    'echo $$(HOME) $HOME $(hostname -i) $$$$'
    """
    return _EXPANDED.sub(lambda found: found[0] * 2, text)


def _env(job: ClusterJob) -> list[dict[str, Any]]:
    attempt = {"fieldRef": {"fieldPath": f"metadata.labels['{RESTART_LABEL}']"}}
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": name}}}
        for name in job.options.passed_variables
    ]
    return [{"name": "RESTART_ATTEMPT", "valueFrom": attempt}, *secrets]


def _limits(job: ClusterJob, kubernetes: KubernetesOptions) -> dict[str, Any]:
    gpus = {} if job.options.cpu else {GPU_RESOURCE: str(job.options.gpus_per_node)}
    return gpus | {name: amount for name, _, amount in (text.rpartition("=") for text in kubernetes.resource)}


def _volume_mounts(kubernetes: KubernetesOptions) -> list[dict[str, str]]:
    mounts = [{"name": f"mount-{index}", "mountPath": str(mount.path)} for index, mount in enumerate(kubernetes.mounts)]
    return [{"name": SHM_VOLUME, "mountPath": "/dev/shm"}, *mounts]


def _train_job(job: ClusterJob, kubernetes: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a TrainingRuntime with what the pods have, and the TrainJob with what they run."""
    container = _container(job, kubernetes)
    moved = {name: container.pop(name) for name in ("command", "resources")}
    pod = _pod(job, kubernetes, container=container)
    spec = _job_set_spec(job, kubernetes, pod=pod, labels={ANCESTOR_LABEL: "trainer"})
    metadata, options = _metadata(job, kubernetes), job.options
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {"mlPolicy": {"numNodes": options.max_nodes, "torch": {}}, "template": {"spec": spec}},
    }
    trainer = {
        "image": options.container,
        "command": moved["command"],
        "numNodes": options.max_nodes,
        "numProcPerNode": options.gpus_per_node,
        "resourcesPerNode": moved["resources"],
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}, "trainer": trainer},
    }
    return [runtime, train_job]

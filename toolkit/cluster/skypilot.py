"""`toolkit cluster skypilot`: a task of several nodes for `sky jobs launch`, which recovers it after a preemption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from toolkit.cluster.cluster_job import ClusterJob, python_of, written_by
from toolkit.cluster.mounts import NodeMount, check_mounted
from toolkit.cluster.node_script import Place, node_script
from toolkit.cluster.yaml_documents import yaml_documents
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

# The task's id stays after a recovery: the number of the job on its cluster and the head's address change.
PLACE = Place(attempt="$ATTEMPT", head="$HEAD_NODE", peer="$PEER_NODE")
PROLOGUE = [
    'export HEAD_NODE=$(sed -n 1p <<< "$SKYPILOT_NODE_IPS") PEER_NODE=$(sed -n 2p <<< "$SKYPILOT_NODE_IPS")',
    'export ATTEMPT="$SKYPILOT_TASK_ID-${SKYPILOT_INTERNAL_JOB_ID:-0}-$HEAD_NODE"',
    'echo "node $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES, head $HEAD_NODE, attempt $ATTEMPT"',
]


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
        for option, lines in {"--install": self.install, "--infra": (self.infra or "",)}.items():
            if any(not line.isprintable() for line in lines):
                raise ToolkitError(f"{option} has a line break or a control character", hint=f"repeat `{option}`")

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
    return "\n".join(written_by()) + "\n" + yaml_documents([_task(job, sky)])


def _task(job: ClusterJob, sky: SkyPilotOptions) -> dict[str, Any]:
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.options.max_nodes, "resources": _resources(job, sky)}
    if sky.workdir is not None:
        task["workdir"] = sky.workdir
    if job.options.passed_variables:
        task["secrets"] = dict.fromkeys(job.options.passed_variables)
    if sky.mounts:
        task["file_mounts"] = {str(mount.path): _source(mount) for mount in sky.mounts}
    if sky.install:
        task["setup"] = "\n".join(sky.install) + "\n"
    python = python_of(job.options, shares_files=False)
    task["run"] = "\n".join([*PROLOGUE, *node_script(job, PLACE, python=python)]) + "\n"
    return task


def _source(mount: NodeMount) -> str | dict[str, str]:
    """A bucket is mounted: every node sees what the others write. A local folder is copied."""
    return {"source": mount.source, "mode": "MOUNT"} if "://" in mount.source else mount.source


def _resources(job: ClusterJob, sky: SkyPilotOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if sky.infra is not None:
        found["infra"] = sky.infra
    if not job.options.cpu:
        found["accelerators"] = {str(sky.gpu): job.options.gpus_per_node}
    if sky.spot:
        found["use_spot"] = True
    if job.options.container is not None:
        found["image_id"] = f"docker:{job.options.container}"
    if sky.job_restarts:
        found["job_recovery"] = {"max_restarts_on_errors": sky.job_restarts}
    return found


def submit_command(job: ClusterJob) -> list[str]:
    """Return the command that submits a task; secrets are taken from the environment by their names."""
    return ["sky", "jobs", "launch", "--yes", *(f"--secret={name}" for name in job.options.passed_variables)]

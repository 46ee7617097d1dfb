"""`toolkit cluster skypilot`: a task of several nodes for `sky jobs launch`, which recovers it after a preemption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit.cluster.cluster_job import ClusterJob
from toolkit.cluster.job_files import Place, node_script, python_of, render
from toolkit.cluster.options import JobOptions, NodeMount, check_mounted, check_printable
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range

# The task's id stays after a recovery: the number of the job on its cluster and the head's address change.
PLACE = Place(attempt="$ATTEMPT", head="$HEAD_NODE", peer="$PEER_NODE")


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
        script=node_script(job, PLACE, python=python_of(job.options, shares_files=False)),
    )


def submit_command(options: JobOptions) -> list[str]:
    """Return the command that submits a task; secrets are taken from the environment by their names."""
    return ["sky", "jobs", "launch", "--yes", *(f"--secret={name}" for name in options.passed_variables)]

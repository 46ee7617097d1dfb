"""`toolkit cluster`: the job file that starts a run on several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

from toolkit.cli.options import expand_options
from toolkit.cluster.options import JobOptions, KubernetesOptions, SkyPilotOptions, SlurmOptions, SshOptions
from toolkit.entry_point import print_message

if TYPE_CHECKING:
    from toolkit.cluster.cluster_job import ClusterJob

cluster_app = typer.Typer(
    no_args_is_help=True, help="Write the job file that trains on several nodes, or submit it: torchrun on each node."
)


@cluster_app.command()
@expand_options
def slurm(job: JobOptions, slurm: SlurmOptions) -> None:
    """Write an sbatch file: one torchrun per node, SIGTERM in time to save, requeue and resume.

    With several --preset it runs `toolkit compare` on the nodes: each trial is one srun.

    After `--`: training arguments, as for `toolkit train`, with --output_dir on a file system of all nodes.
    """
    from toolkit.cluster.job_files import comparison_file, deliver, job_file

    submit = ["sbatch"] if slurm.submit else None
    if len(job.preset) > 1:
        deliver(comparison_file(job, slurm), job, submit=submit, suffix=".sbatch")
        return
    if slurm.repeats is not None:
        print_message("--repeats has no effect: it is for a comparison, with several --preset")
    _write(job, lambda each: job_file(each, slurm), shares_files=True, submit=submit, suffix=".sbatch")


@cluster_app.command()
@expand_options
def skypilot(job: JobOptions, sky: SkyPilotOptions) -> None:
    """Write a SkyPilot task of several nodes, for `sky jobs launch`: recovered after a preemption.

    After `--`: training arguments, as for `toolkit train`, with --output_dir in a folder of --mount.
    """
    from toolkit.cluster.job_files import task_file

    # Secrets are taken from the environment by their names.
    submit = ["sky", "jobs", "launch", "--yes", *(f"--secret={name}" for name in job.passed_variables)]
    submitted = submit if sky.submit else None
    _write(job, lambda each: task_file(each, sky), shares_files=False, submit=submitted, suffix=".yaml")


@cluster_app.command()
@expand_options
def kubernetes(job: JobOptions, kubernetes: KubernetesOptions) -> None:
    """Write a JobSet, or a TrainJob of Kubeflow Trainer v2: one pod per node, restarted together.

    After `--`: training arguments, as for `toolkit train`, with --output_dir in a folder of --mount.
    """
    from toolkit.cluster.job_files import manifest

    submit = ["kubectl", "apply", "-f"] if kubernetes.submit else None
    _write(job, lambda each: manifest(each, kubernetes), shares_files=False, submit=submit, suffix=".yaml")


@cluster_app.command()
@expand_options
def ssh(job: JobOptions, ssh: SshOptions) -> None:
    """Write one script for nodes without a scheduler, and the line that starts it on all of them.

    After `--`: training arguments, as for `toolkit train`, with --output_dir on a file system of all nodes.
    """
    from toolkit.cluster.job_files import script_file, start_line

    _write(job, lambda each: script_file(each, ssh), shares_files=True, submit=None, suffix=".sh")
    if job.output is not None:
        print_message(f"start it on all nodes: {start_line(ssh, str(job.output))}")


def _write(
    options: JobOptions,
    text_of: Callable[[ClusterJob], str],
    *,
    shares_files: bool,
    submit: Sequence[str] | None,
    suffix: str,
) -> None:
    from toolkit.cluster.cluster_job import prepare_job
    from toolkit.cluster.job_files import deliver

    job = prepare_job(options, shares_files=shares_files)
    text = text_of(job)
    warnings, save = list(job.warnings), job.save_time
    if not job.job.saves_checkpoints:
        warnings.append("--save_strategy no: a run that is stopped starts again from its first step")
    for line in warnings:
        print_message(f"warning: {line}")
    if job.job.saves_checkpoints:
        print_message(f"{save.grace_seconds} s to save after SIGTERM: one takes {save.seconds:g} s ({save.source})")
    deliver(text, options, submit=submit, suffix=suffix, warnings=warnings, grace_seconds=save.grace_seconds)

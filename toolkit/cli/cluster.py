"""`toolkit cluster`: the job file that starts a run on several nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from toolkit.cli.options import expand_options
from toolkit.cluster.options import JobOptions
from toolkit.cluster.slurm import SlurmOptions
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

    After `--`: training arguments, as for `toolkit train`; --output_dir must be on a file system of all nodes.
    """
    from toolkit.cluster.cluster_job import prepare_job
    from toolkit.cluster.slurm import job_file
    from toolkit.cluster.submission import deliver

    prepared = prepare_job(job, shares_files=True)
    text = job_file(prepared, slurm)
    _report(prepared)
    deliver(text, output=job.output, submit=["sbatch"] if slurm.submit else None, suffix=".sbatch")


def _report(job: ClusterJob) -> None:
    """Print what the file assumes."""
    for line in job.warnings:
        print_message(f"warning: {line}")
    if not job.saves:
        print_message("warning: --save_strategy no: a run that is stopped starts again from its first step")
    else:
        save = job.save_time
        print_message(f"SIGTERM {job.signal_seconds} s before the end: a save takes {save.seconds:g} s ({save.source})")

"""Several presets in one SLURM job: `toolkit compare` on its nodes, each trial one srun of torchrun.

`--nodes 2` compares the presets on two nodes, `--nodes 1:2` also on one: the report then has the scaling over nodes.
Before the time limit SLURM signals the batch shell, which puts the job back into the queue. The ledger has every
finished trial, so nothing complete is repeated.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.cluster_job import (
    check_job_arguments,
    check_no_secrets,
    check_world_sizes,
    preset_word,
    world_sizes,
)
from toolkit.cluster.job_files import group_arguments, python_of, render
from toolkit.cluster.options import JobOptions
from toolkit.cluster.slurm import SlurmOptions, sbatch_values
from toolkit.errors import ToolkitError
from toolkit.files.reading import user_path
from toolkit.job.argument_reading import without_flags
from toolkit.job.job import Job
from toolkit.job.job_checks import refuse_arguments_of_comparison
from toolkit.launch.command import NVME_PATH_VARIABLE
from toolkit.launch.preflight import check_required
from toolkit.presets import load_preset

# Names of `toolkit.compare`, which starts its runs through this package; a test holds them equal.
COMPARISON_FILE, LEDGER_FILE = "comparison.json", "ledger.jsonl"
# The batch shell only has to requeue the job; SLURM may send the signal up to a minute early.
SIGNAL_SECONDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonJob:
    """A checked comparison: what its job file needs."""

    options: JobOptions
    name: str
    training_argv: tuple[str, ...]
    """Training arguments without the output folder."""
    output_dir: Path
    """Folder of the comparison."""


def prepare_comparison(options: JobOptions) -> ComparisonJob:
    """Check every preset at every number of nodes. Raises ToolkitError for the first problem."""
    argv = [*options.training_arguments]
    check_no_secrets(argv)
    job = Job.from_argv(argv)
    check_required(job, ("model_name_or_path", "dataset", "output_dir", "max_steps"))
    refuse_arguments_of_comparison(job.without("output_dir"))
    for preset in map(load_preset, options.preset):
        if preset.uses_nvme:
            raise ToolkitError(
                f"preset {preset.name!r} offloads to a disk of each node, which a comparison checks on one node only",
                hint=f"compare it on one node; a job of its own takes `--env {NVME_PATH_VARIABLE}=...`",
            )
        check_world_sizes(options, preset, job)
        check_job_arguments(options, preset, argv)
    if options.container is not None:
        raise ToolkitError(
            "--container with several presets: a comparison starts srun itself, which containers do not have",
            hint="leave it out, and use `--setup` or `--module`; or one `--preset`",
        )
    return ComparisonJob(
        options=options,
        name=options.name or "compare",
        training_argv=tuple(without_flags(argv, ["output_dir"])),
        output_dir=user_path(str(job.output_dir)),
    )


def comparison_file(job: ComparisonJob, slurm: SlurmOptions) -> str:
    """Return the sbatch file."""
    options = job.options
    compare = [
        f"{shlex.quote(python_of(options, shares_files=True))} -m toolkit compare",
        " ".join(f"--preset {shlex.quote(preset_word(load_preset(preset)))}" for preset in options.preset),
        f"--nproc-per-node {options.gpus_per_node} --num-processes {','.join(map(str, world_sizes(options)))}",
        *([] if slurm.repeats is None else [f"--repeats {slurm.repeats}"]),
        *(["--cpu"] if options.cpu else []),
        '--output-dir "$output_dir" "${resume[@]}" --',
        *group_arguments(job.training_argv),
    ]
    return render(
        "comparison.sbatch.j2",
        options,
        name=job.name,
        output_dir=job.output_dir,
        compare=compare,
        comparison_file=COMPARISON_FILE,
        ledger_file=LEDGER_FILE,
        signal_seconds=SIGNAL_SECONDS,
        **sbatch_values(options, slurm, output_dir=job.output_dir, preset=None),
    )

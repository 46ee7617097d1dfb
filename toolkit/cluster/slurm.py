"""SLURM: an sbatch file that starts torchrun once per node, and one that compares presets.

The script of the nodes is a quoted here-document: nothing in it is expanded on the first node. SIGTERM goes to the job
step, not to the batch shell, early enough for the checkpoint. The job is requeued only if the run was interrupted, has
written a checkpoint in this attempt, and was not cancelled: a run that failed would fail again.

Several presets are `toolkit compare` on the job's nodes (`--nodes 1:2` compares on one and on two). Before the time
limit SLURM signals the batch shell, which requeues the job; the ledger has every finished trial.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from toolkit.cluster.cluster_job import (
    ClusterJob,
    check_job_arguments,
    check_named_inputs,
    check_secrets,
    check_world_sizes,
    preset_word,
)
from toolkit.cluster.job_files import Place, doctor_command, group_arguments, node_script, python_of, render
from toolkit.cluster.options import JobOptions, limit_seconds
from toolkit.cluster.platform_options import CPUS_PER_RANK, SlurmOptions
from toolkit.errors import ToolkitError
from toolkit.files.paths import user_path
from toolkit.job.argument_reading import without_flags
from toolkit.job.job import Job
from toolkit.job.job_checks import refuse_arguments_of_comparison
from toolkit.launch.command import NVME_PATH_VARIABLE
from toolkit.launch.preflight import check_required
from toolkit.presets.preset import load_preset
from toolkit.presets.spec import PresetSpec

# SLURM kills a job at its limit: with less than this left after the signal's time it would never train.
MIN_TRAINING_SECONDS = 60
PLACE = Place(head="$HEAD_NODE", port="$HEAD_PORT", peer="$PEER_NODE", checked=True)
# Names of `toolkit.compare`, which starts its runs through this package; a test holds them equal.
COMPARISON_FILE, LEDGER_FILE = "comparison.json", "ledger.jsonl"
# The batch shell of a comparison only has to requeue the job; SLURM may send the signal up to a minute early.
SIGNAL_SECONDS = 60


def job_file(job: ClusterJob, slurm: SlurmOptions) -> str:
    """Return the sbatch file. Raises ToolkitError for a time limit in which the run could only stop."""
    if slurm.time_limit is not None and limit_seconds(slurm.time_limit) < job.signal_seconds + MIN_TRAINING_SECONDS:
        raise ToolkitError(
            f"--time-limit {slurm.time_limit} is too short: the run is stopped {job.signal_seconds} s before its end"
            f" to save ({job.save_time.seconds:g} s, {job.save_time.source})",
            hint="a longer `--time-limit`, or `--save-seconds` as measured",
        )
    # An interrupted run goes back into the queue if it has checkpoints to resume from.
    requeues = slurm.requeue and job.job.saves_checkpoints
    python = python_of(job.options, shares_files=True)
    script = node_script(job, PLACE, python=python)
    values = sbatch_values(job.options, slurm, output_dir=job.output_dir, preset=job.preset)
    return render("slurm.sbatch.j2", job.options, job=job, name=job.name, requeues=requeues, script=script, **values)


def sbatch_values(
    options: JobOptions, slurm: SlurmOptions, *, output_dir: Path, preset: PresetSpec | None
) -> dict[str, Any]:
    """Return what every sbatch template needs; `inside` precedes a command that runs in an apptainer container."""
    python = python_of(options, shares_files=True)
    doctor = doctor_command(options, python, output_dir=output_dir, preset=preset)
    inside = ""
    if options.container is not None and slurm.container_runtime == "apptainer":
        gpus = "" if options.cpu else "--nv "
        inside = f"apptainer exec {gpus}--bind {slurm.mounts} {shlex.quote(options.container)} "
    return {
        "slurm": slurm,
        "doctor": "; ".join([*options.setup, f"exec {doctor}"]),
        "compare_nodes": "; ".join([*options.setup, f'exec {python} -m toolkit doctor --compare "$@"']),
        "inside": inside,
        "cpus_per_task": slurm.cpus_per_task or options.gpus_per_node * (1 if options.cpu else CPUS_PER_RANK),
    }


def comparison_file(options: JobOptions, slurm: SlurmOptions) -> str:
    """Return the sbatch file of a comparison. Raises ToolkitError for a preset that cannot train on some nodes."""
    argv = [*options.training_arguments]
    check_secrets(argv)
    job = Job.from_argv(argv)
    check_required(job, ("model_name_or_path", "dataset", "output_dir", "max_steps"))
    check_named_inputs(job)
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
    output_dir = user_path(str(job.output_dir))
    compare = [
        f"{python_of(options, shares_files=True)} -m toolkit compare",
        " ".join(f"--preset {shlex.quote(preset_word(load_preset(preset)))}" for preset in options.preset),
        f"--nproc-per-node {options.gpus_per_node} --num-processes {','.join(map(str, options.world_sizes))}",
        *([] if slurm.repeats is None else [f"--repeats {slurm.repeats}"]),
        *(["--cpu"] if options.cpu else []),
        '--output-dir "$output_dir" "${resume[@]}" --',
        *group_arguments(without_flags(argv, ["output_dir"])),
    ]
    return render(
        "comparison.sbatch.j2",
        options,
        name=options.name or "compare",
        output_dir=output_dir,
        compare=compare,
        comparison_file=COMPARISON_FILE,
        ledger_file=LEDGER_FILE,
        signal_seconds=SIGNAL_SECONDS,
        **sbatch_values(options, slurm, output_dir=output_dir, preset=None),
    )

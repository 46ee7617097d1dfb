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
    python_of,
    world_sizes,
    written_by,
)
from toolkit.cluster.node_script import CONTINUED, group_arguments, required_lines
from toolkit.cluster.options import JobOptions
from toolkit.cluster.slurm import SlurmOptions, directives, each_node, modules, preflight
from toolkit.errors import ToolkitError
from toolkit.files.reading import user_path
from toolkit.job.argument_checks import refuse_arguments_of_comparison
from toolkit.job.script_arguments import read_arguments, without_flags
from toolkit.launch.environment import NVME_PATH_VARIABLE
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
    arguments = read_arguments(argv)
    check_required(arguments, ("model_name_or_path", "dataset", "output_dir", "max_steps"))
    refuse_arguments_of_comparison({name: value for name, value in arguments.items() if name != "output_dir"})
    for preset in map(load_preset, options.preset):
        if preset.uses_nvme:
            raise ToolkitError(
                f"preset {preset.name!r} offloads to a disk of each node, which a comparison checks on one node only",
                hint=f"compare it on one node; a job of its own takes `--env {NVME_PATH_VARIABLE}=...`",
            )
        check_world_sizes(options, preset, arguments)
        check_job_arguments(options, preset, argv)
    _check_no_container(options)
    return ComparisonJob(
        options=options,
        name=options.name or "compare",
        training_argv=tuple(without_flags(argv, ["output_dir"])),
        output_dir=user_path(str(arguments["output_dir"])),
    )


def _check_no_container(options: JobOptions) -> None:
    if options.container is not None:
        raise ToolkitError(
            "--container with several presets: a comparison starts srun itself, which containers do not have",
            hint="leave it out, and use `--setup` or `--module`; or one `--preset`",
        )


def comparison_file(job: ComparisonJob, slurm: SlurmOptions) -> str:
    """Return the sbatch file."""
    options = job.options
    folder = job.output_dir
    checks = [*each_node(options, slurm), *preflight(options, slurm, output_dir=folder, preset=None)]
    parts = [
        ["#!/bin/bash", *written_by(), *_directives(job, slurm)],
        [*modules(slurm), *_prologue(job)],
        checks if options.preflight else [],
        _requeue() if slurm.requeue else [],
        _compare(job, slurm),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _directives(job: ComparisonJob, slurm: SlurmOptions) -> list[str]:
    ends = [f"--signal=B:TERM@{SIGNAL_SECONDS}", "--requeue"] if slurm.requeue else ["--no-requeue"]
    return directives(job.options, slurm, name=job.name, nodes=str(job.options.max_nodes), ends=ends)


def _prologue(job: ComparisonJob) -> list[str]:
    options = job.options
    return [
        f"output_dir={shlex.quote(str(job.output_dir))}",
        'export ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        'logs="$output_dir.logs"',
        'mkdir -p "$logs" && touch "$logs/$ATTEMPT.started"',
        *(f"export {name}={shlex.quote(value)}" for name, value in options.variables.items()),
        *required_lines(options),
        *options.setup,
        "resume=()",
        f'[[ -e "$output_dir/{COMPARISON_FILE}" ]] && resume=(--resume)',
    ]


def _requeue() -> list[str]:
    """Requeue at the signal, if this attempt has finished a trial; a cancelled job is no longer RUNNING."""
    return [
        "requeue() {",
        '    state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)',
        f'    [[ $state == RUNNING && "$output_dir/{LEDGER_FILE}" -nt "$logs/$ATTEMPT.started" ]] || return',
        '    echo "$(date -Is) back into the queue; finished trials are kept"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "}",
        "trap requeue TERM",
    ]


def _compare(job: ComparisonJob, slurm: SlurmOptions) -> list[str]:
    options = job.options
    parts = [
        f"{shlex.quote(python_of(options, shares_files=True))} -m toolkit compare",
        " ".join(f"--preset {shlex.quote(preset_word(load_preset(preset)))}" for preset in options.preset),
        f"--nproc-per-node {options.gpus_per_node} --num-processes {','.join(map(str, world_sizes(options)))}",
        *([] if slurm.repeats is None else [f"--repeats {slurm.repeats}"]),
        *(["--cpu"] if options.cpu else []),
        '--output-dir "$output_dir" "${resume[@]}" --',
        *group_arguments(job.training_argv),
    ]
    # The first wait ends when this shell gets a signal.
    return [CONTINUED.join(parts) + " &", 'wait "$!" || wait "$!"', 'exit "$?"']

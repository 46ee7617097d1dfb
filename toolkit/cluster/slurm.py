"""`toolkit cluster slurm`: an sbatch file that starts torchrun once per node, and puts an interrupted run back in line.

The choices that the file depends on:

- The script of the nodes is a quoted here-document: nothing in it is expanded on the first node.
- SIGTERM goes to the job step, not to the batch shell, early enough for the checkpoint.
- The job is requeued only if the run says that it was interrupted, has written a checkpoint in this attempt, and the
  job was not cancelled. A run that failed would fail again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.cluster.cluster_job import ClusterJob, python_of, written_by
from toolkit.cluster.node_script import Place, doctor_command, node_script
from toolkit.cluster.options import JobOptions, limit_seconds
from toolkit.errors import ToolkitError
from toolkit.job.argument_values import Range, check_range
from toolkit.presets import Preset

CPUS_PER_RANK = 4  # the rank, its data loader, and two threads of NCCL; SLURM's own default is one for the whole node
# SLURM kills a job at its limit: with less than this left after the signal's time it would never train.
MIN_TRAINING_SECONDS = 60
# slurm.conf's KillWait is 30 s by default: ranks on other nodes end within it, or are killed.
SRUN_WAIT = "--wait=60"
NODE_SCRIPT_END = "END_OF_NODE_SCRIPT"
PLACE = Place(attempt="$ATTEMPT", head="$HEAD_NODE", port="$HEAD_PORT", peer="$PEER_NODE", checked=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """What only SLURM needs. Raises ToolkitError for values that make no job."""

    time_limit: Annotated[
        str | None, typer.Option(help="MINUTES, HH:MM:SS or D-HH:MM:SS; default: the partition's")
    ] = None
    partition: Annotated[str | None, typer.Option(help="partition to run in")] = None
    account: Annotated[str | None, typer.Option(help="account to charge")] = None
    qos: Annotated[str | None, typer.Option(help="quality of service")] = None
    cpus_per_task: Annotated[int | None, typer.Option(help=f"CPU cores per node; default {CPUS_PER_RANK} per rank")] = (
        None
    )
    sbatch_option: Annotated[
        tuple[str, ...], typer.Option(help='another option of sbatch, for example "mem=0"; repeatable')
    ] = ()
    module: Annotated[tuple[str, ...], typer.Option(help="environment module to load; repeatable")] = ()
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"], typer.Option(help="what runs --container: pyxis (enroot) or apptainer")
    ] = "pyxis"
    container_mounts: Annotated[
        str | None, typer.Option(help="SOURCE:TARGET,... for the container; the working directory is always mounted")
    ] = None
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="put an interrupted run back into the queue")
    ] = True
    repeats: Annotated[
        int | None, typer.Option(help="with several --preset: trials of each row; default: as `toolkit compare`")
    ] = None
    submit: Annotated[bool, typer.Option("--submit", help="submit the file with sbatch")] = False

    def __post_init__(self) -> None:
        check_range("--cpus-per-task", self.cpus_per_task, Range(lowest=1, highest=4096))
        check_range("--repeats", self.repeats, Range(lowest=1, highest=1000))
        if self.time_limit is not None:
            limit_seconds(self.time_limit)
        words = {"--partition": self.partition, "--account": self.account, "--qos": self.qos}
        words |= {"--container-mounts": self.container_mounts}
        words |= {"--module": " ".join(self.module), "--sbatch-option": " ".join(self.sbatch_option)}
        for name, value in words.items():
            if value is not None and not value.isprintable():
                raise ToolkitError(f"{name} has a line break or a control character", hint=f"repeat `{name}`")


def job_file(job: ClusterJob, slurm: SlurmOptions) -> str:
    """Return the sbatch file. Raises ToolkitError for a time limit in which the run could only stop."""
    if slurm.time_limit is not None and limit_seconds(slurm.time_limit) < job.signal_seconds + MIN_TRAINING_SECONDS:
        raise ToolkitError(
            f"--time-limit {slurm.time_limit} is too short: the run is stopped {job.signal_seconds} s before its end"
            f" to save ({job.save_time.seconds:g} s, {job.save_time.source})",
            hint="a longer `--time-limit`, or `--save-seconds` as measured",
        )
    parts = [
        ["#!/bin/bash", *written_by(), *_job_directives(job, slurm)],
        _prologue(job, slurm),
        _node_script(job),
        each_node(job.options, slurm),
        preflight(job.options, slurm, output_dir=job.output_dir, preset=job.preset) if job.options.preflight else [],
        _train(job, slurm),
        _requeue() if requeues(job, slurm) else ['exit "$code"'],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def requeues(job: ClusterJob, slurm: SlurmOptions) -> bool:
    """Return True if an interrupted run goes back into the queue: it must have checkpoints to resume from."""
    return slurm.requeue and job.saves


def directives(options: JobOptions, slurm: SlurmOptions, *, name: str, nodes: str, ends: Sequence[str]) -> list[str]:
    """Return the #SBATCH lines; `ends` says what happens before the time limit and after it."""
    cpus = slurm.cpus_per_task or options.gpus_per_node * (1 if options.cpu else CPUS_PER_RANK)
    found = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    found += [] if options.cpu else [f"--gpus-per-node={options.gpus_per_node}"]
    named = {"time": slurm.time_limit, "partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    found += [f"--{name}={value}" for name, value in named.items() if value is not None]
    found += [f"--output={name}-%j.log", "--open-mode=append", *ends]
    found += [f"--{line.lstrip('-')}" for line in slurm.sbatch_option]
    return [f"#SBATCH {line}" for line in found]


def _job_directives(job: ClusterJob, slurm: SlurmOptions) -> list[str]:
    nodes = job.options.nodes.replace(":", "-")
    signal = [f"--signal=TERM@{job.signal_seconds}"] if job.saves else []
    requeue = "--requeue" if requeues(job, slurm) else "--no-requeue"
    ends = [*signal, requeue, *(["--no-kill"] if job.options.elastic else [])]
    return directives(job.options, slurm, name=job.name, nodes=nodes, ends=ends)


def modules(slurm: SlurmOptions) -> list[str]:
    """Return the line that loads environment modules."""
    return [f"module load {' '.join(map(shlex.quote, slurm.module))}"] if slurm.module else []


def _prologue(job: ClusterJob, slurm: SlurmOptions) -> list[str]:
    """Name the attempt, its head and port, and the folders."""
    return [
        f"# A save takes {job.save_time.seconds:g} s ({job.save_time.source}).",
        *modules(slurm),
        f"output_dir={shlex.quote(str(job.output_dir))}",
        'export ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"if (( ${{#nodes[@]}} < {job.options.min_nodes} )); then",
        f'    echo "error: ${{#nodes[@]}} nodes were allocated, expected {job.options.nodes}" >&2',
        "    exit 2",
        "fi",
        "export HEAD_NODE=${nodes[0]} PEER_NODE=${nodes[1]:-} HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "# This shell runs on the head: take the first port on which nothing listens.",
        'while (exec 3<>"/dev/tcp/$HEAD_NODE/$HEAD_PORT") 2>/dev/null; do HEAD_PORT=$((HEAD_PORT + 1)); done',
        'logs="$output_dir/logs"',
        'mkdir -p "$logs"',
        'echo "$(date -Is) attempt $ATTEMPT on ${nodes[*]}, head $HEAD_NODE:$HEAD_PORT; logs: $logs/$ATTEMPT-NODE.log"',
    ]


def _node_script(job: ClusterJob) -> list[str]:
    """Define the script that runs once on each node; the here-document keeps every `$` for the node."""
    python = shlex.quote(python_of(job.options, shares_files=True))
    lines = node_script(job, PLACE, python=python)
    return [f"node_script=$(cat <<'{NODE_SCRIPT_END}'", *lines, NODE_SCRIPT_END, ")"]


def each_node(options: JobOptions, slurm: SlurmOptions) -> list[str]:
    """Define srun with one task per node, each in the container where there is one."""
    words = ['srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1']
    words += ['--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    if options.container is not None and slurm.container_runtime == "pyxis":
        words += [f"--container-image={shlex.quote(options.container)}", f"--container-mounts={_mounts(slurm)}"]
        words += ['--container-workdir="$PWD"']
    return [f"each_node=({' '.join(words)})"]


def _mounts(slurm: SlurmOptions) -> str:
    more = "" if slurm.container_mounts is None else f",{shlex.quote(slurm.container_mounts)}"
    return f'"$PWD:$PWD"{more}'


def _inside(options: JobOptions, slurm: SlurmOptions) -> str:
    """Return what precedes a command that is to run in an apptainer container; empty otherwise."""
    if options.container is None or slurm.container_runtime == "pyxis":
        return ""
    gpus = "" if options.cpu else "--nv "
    return f"apptainer exec {gpus}--bind {_mounts(slurm)} {shlex.quote(options.container)} "


def preflight(options: JobOptions, slurm: SlurmOptions, *, output_dir: Path, preset: Preset | None) -> list[str]:
    """Let every node describe itself, and compare the nodes, before a rank starts."""
    python = shlex.quote(python_of(options, shares_files=True))
    inside = _inside(options, slurm)
    command = doctor_command(options, python, output_dir=output_dir, preset=preset)
    doctor = shlex.quote("; ".join([*options.setup, f"exec {command}"]))
    compare = shlex.quote("; ".join([*options.setup, f'exec {python} -m toolkit doctor --compare "$@"']))
    return [
        'doctor="$logs/$ATTEMPT-doctor"',
        '"${each_node[@]}" --output="$doctor-%N.json" --error="$doctor-%N.err" \\',
        f"    {inside}bash -c {doctor} ||",
        '    { echo "error: toolkit doctor found errors: $doctor-*.json" >&2; exit 2; }',
        f'"${{each_node[@]}}" --nodes=1 --ntasks=1 {inside}bash -c {compare} bash "$doctor"-*.json || exit 2',
    ]


def _train(job: ClusterJob, slurm: SlurmOptions) -> list[str]:
    # An elastic run outlives the loss of a node; any other ends on all nodes with the first that fails.
    ends = "--no-kill --kill-on-bad-exit=0 --wait=0" if job.options.elastic else f"--kill-on-bad-exit=1 {SRUN_WAIT}"
    return [
        "trap : TERM  # the shell outlives a preemption's SIGTERM, and reads the run's status",
        'started="$logs/$ATTEMPT.started"',
        'touch "$started"',
        f'"${{each_node[@]}}" {ends} --output="$logs/$ATTEMPT-%N.log" \\',
        f'    {_inside(job.options, slurm)}bash -c "$node_script" &',
        'wait "$!" || wait "$!"  # the first wait ends when this shell gets a signal',
        "code=$?",
        'echo "$(date -Is) srun ended with $code"',
    ]


def _requeue() -> list[str]:
    """Requeue a run that was interrupted, and saved, in this attempt; a cancelled job is no longer RUNNING."""
    return [
        'failure="$output_dir/failure.json"',
        'status=$(sed -n \'s/^ *"kind": "\\([a-z_]*\\)".*/\\1/p\' "$failure" 2>/dev/null | head -n 1)',
        'saved=$(find "$output_dir" -path "*/checkpoint-*/manifest.json" -newer "$started" -print -quit)',
        'state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)',
        "if [[ $status == interrupted && $failure -nt $started && -n $saved && $state == RUNNING ]]",
        "then",
        '    echo "$(date -Is) interrupted after ${saved%/*}: back into the queue"',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # SLURM ends this shell',
        "fi",
        'exit "$code"',
    ]

"""The shell script that every engine runs on each node: settings, checks, then torchrun in its place.

>>> print(group_arguments(["--bf16", "true", "--dataset", "a.jsonl", "b.jsonl"]))
['--bf16 true', '--dataset a.jsonl b.jsonl']
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.cluster_job import ClusterJob, preset_word
from toolkit.cluster.node_setup import ADDRESS_VARIABLE
from toolkit.cluster.options import JobOptions
from toolkit.launch.command import torchrun_words
from toolkit.launch.environment import NVME_PATH_VARIABLE
from toolkit.presets import Preset
from toolkit.record.heartbeat import HANG_TIMEOUT_VARIABLE

RENDEZVOUS_PORT = 29500
PREFLIGHT_SECONDS = 600  # nodes of one job start minutes apart where images are pulled
CONTINUED = " \\\n    "


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an engine's variables tell a node its place; each is a word for the shell."""

    attempt: str
    """An id that no other attempt has."""
    head: str
    port: str = str(RENDEZVOUS_PORT)
    peer: str | None = None
    """Another node than the head."""
    checked: bool = False
    """The engine's file runs the preflight checks itself."""


def node_script(job: ClusterJob, place: Place, *, python: str) -> list[str]:
    """Return the lines of the script; its last command is torchrun, which gets the engine's signals."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    settings = _node_settings(job, place, python)
    checks = preflight(job, place, python) if job.options.preflight and not place.checked else []
    return [
        *_hang_comment(job),
        *exports,
        *required_lines(job.options),
        *job.options.setup,
        *settings,
        *checks,
        *torchrun(job, place, python),
    ]


def _hang_comment(job: ClusterJob) -> list[str]:
    if not job.options.elastic or job.environment.get(HANG_TIMEOUT_VARIABLE) != str(job.hang_timeout_minutes):
        return []
    return [
        f"# {HANG_TIMEOUT_VARIABLE}: a node that loses power closes no connection; the others notice it when no rank",
        f"# has made progress for this long: twice a save ({job.save_time.source}) and a step, and half a minute.",
    ]


def doctor_command(options: JobOptions, python: str, *, output_dir: Path, preset: Preset | None) -> str:
    """Return the command that checks a node for a job; clocks of nodes compare through the shared run folder.

    Without the model: `doctor` plans the memory of one node's ranks, and on several nodes each rank holds less.
    """
    words = [f"{python} -m toolkit doctor --json --output-dir {shlex.quote(str(output_dir))}"]
    words += [f"--num-processes {options.gpus_per_node}"]
    words += [] if options.cpu else [f"--gpus-per-node {options.gpus_per_node}"]
    if preset is not None:
        words += [f"--preset {shlex.quote(preset_word(preset))}"]
        words += [f"--nvme-path {shlex.quote(options.variables[NVME_PATH_VARIABLE])}"] if preset.uses_nvme else []
    return " ".join(words)


def required_lines(options: JobOptions) -> list[str]:
    """Return the lines that end the script where a variable that is passed by its name is not set."""
    return [f': "${{{name}:?is not set: the job was written with --env {name}}}"' for name in options.passed_variables]


def preflight(job: ClusterJob, place: Place, python: str) -> list[str]:
    """Return the lines with which every node describes itself in the shared run folder, and compares all of them.

    SLURM's file does this before it starts the script.
    """
    folder = shlex.quote(str(job.output_dir))
    doctor = doctor_command(job.options, python, output_dir=job.output_dir, preset=job.preset)
    return [
        f'checks={folder}/preflight/"{place.attempt}"',
        'mkdir -p "$checks" || exit 2',
        f'{doctor} > "$checks/$HOSTNAME.part" || exit 2',
        'mv "$checks/$HOSTNAME.part" "$checks/$HOSTNAME.json"',
        f"for _ in $(seq {PREFLIGHT_SECONDS}); do",
        '    reports=("$checks"/*.json)',
        f"    (( ${{#reports[@]}} >= {job.options.min_nodes} )) && break",
        "    sleep 1",
        "done",
        f'{python} -m toolkit doctor --compare "${{reports[@]}}" || exit 2',
    ]


def _node_settings(job: ClusterJob, place: Place, python: str) -> list[str]:
    """The lines that check the node and choose its network interface; a single node has no network to choose."""
    if job.options.max_nodes == 1:
        return []
    peer = [] if place.peer is None else [f'--peer "{place.peer}"']
    gpus = [] if job.options.cpu else [f"--gpus {job.options.gpus_per_node}"]
    words = [f"{python} -m toolkit.cluster.node_setup", f'--head "{place.head}" --port "{place.port}"', *peer, *gpus]
    words.append(f'--attempt "{place.attempt}"')
    return [f"settings=$({' '.join(words)}) || exit", 'eval "$settings"']


def torchrun(job: ClusterJob, place: Place, python: str) -> list[str]:
    """Return the command that starts this node's ranks."""
    options = job.options
    address = [] if options.max_nodes == 1 else [f'--local-addr "${ADDRESS_VARIABLE}"']
    words = torchrun_words(
        nnodes=options.nodes,
        processes_per_node=options.gpus_per_node,
        attempt=place.attempt,
        endpoint=f"{place.head}:{place.port}",
    )
    parts = [
        f"exec {python} {words[0]}",
        *words[1:],
        *address,
        f"--max-restarts {options.restarts} --shutdown-timeout {job.shutdown_seconds}",
        "-m toolkit.train",
        *group_arguments(job.training_argv),
    ]
    return CONTINUED.join(parts).splitlines()


def group_arguments(words: Sequence[str]) -> list[str]:
    """Return training arguments for the shell, each flag together with its values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return [" ".join(group) for group in groups]

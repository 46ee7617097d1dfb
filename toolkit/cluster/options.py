"""The options that every `toolkit cluster` command has: one job specification for all engines.

>>> JobOptions(preset=("zero2",), nodes="2:1")
Traceback (most recent call last):
toolkit.errors.ToolkitError: --nodes is '2:1', expected a number, or MIN:MAX for an elastic run
  hint: `--nodes 2`, or `--nodes 1:2`
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from toolkit.errors import ToolkitError
from toolkit.files.secrets import is_secret_name
from toolkit.flags import JsonOutput, PresetNames, TrainingArguments
from toolkit.job.argument_values import Range, check_range
from toolkit.launch.options import MAX_RESTARTS

MAX_NODES = 10_000
MAX_GPUS_PER_NODE = 1024
# A job's name is part of host names, of which Kubernetes allows 63 characters with what it appends.
MAX_NAME = 40
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DAY_SECONDS = 24 * 60 * 60
Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What runs, on how many nodes, and what each node needs. Raises ToolkitError for values that make no job."""

    preset: PresetNames
    nodes: Annotated[str, Option(help="number of nodes; MIN:MAX for an elastic run that survives lost nodes")]
    gpus_per_node: Annotated[int, Option(help="ranks per node, one per GPU; with --cpu, processes")] = 8
    training_arguments: TrainingArguments = ()
    name: Annotated[str | None, Option(help="name of the job; default: the preset's")] = None
    max_restarts: Annotated[
        int | None, Option(help="restarts by torchrun after a failed rank or node; default 0, elastic 3")
    ] = None
    env: Annotated[Words, Option(help="NAME=VALUE, or NAME: the value at submission, not in the file; repeatable")] = ()
    setup: Annotated[Words, Option(help="shell line to run on each node before training; repeatable")] = ()
    container: Annotated[str | None, Option(help="container image to run in")] = None
    python: Annotated[
        str | None, Option(help="Python on the nodes; default: this one, or `python` elsewhere and in containers")
    ] = None
    save_seconds: Annotated[
        float | None, Option(help="seconds that a checkpoint takes; default: as --saves-of measured")
    ] = None
    saves_of: Annotated[Path | None, Option(help="run folder whose measured saves are used; default: --output_dir")] = (
        None
    )
    preflight: Annotated[
        bool, Option("--preflight", help="run `toolkit doctor` on every node first, and compare the nodes")
    ] = False
    cpu: Annotated[bool, Option("--cpu", help="train on CPUs, for tests")] = False
    check_files: Annotated[
        bool,
        Option("--check-files/--no-check-files", help="read model and data here; --no-... if only the nodes have them"),
    ] = True
    output: Annotated[Path | None, Option(help="write the job file here instead of to stdout")] = None
    as_json: JsonOutput = False

    def __post_init__(self) -> None:
        check_range("--gpus-per-node", self.gpus_per_node, Range(lowest=1, highest=MAX_GPUS_PER_NODE))
        check_range("--max-restarts", self.max_restarts, Range(lowest=0, highest=MAX_RESTARTS))
        check_range("--save-seconds", self.save_seconds, Range(above=0, highest=DAY_SECONDS))
        if not re.fullmatch("[0-9]{1,6}(:[0-9]{1,6})?", self.nodes) or self.min_nodes > self.max_nodes:
            raise ToolkitError(
                f"--nodes is {self.nodes[:40]!r}, expected a number, or MIN:MAX for an elastic run",
                hint="`--nodes 2`, or `--nodes 1:2`",
            )
        for count in (self.min_nodes, self.max_nodes):
            check_range("--nodes", count, Range(lowest=1, highest=MAX_NODES))
        if not self.preset:
            raise ToolkitError("missing option '--preset'", hint="`--preset zero2`; `toolkit presets` lists them")
        for item in self.env:
            name, equals, value = item.partition("=")
            if not _VARIABLE.fullmatch(name) or not value.isprintable():
                message = f"--env is {item[:80]!r}, expected NAME=VALUE or NAME"
                raise ToolkitError(message, hint="`--env NCCL_DEBUG=INFO`")
            if equals and is_secret_name(name):
                message = f"--env {name}=... would write a secret into the job file"
                raise ToolkitError(message, hint=f"`--env {name}`")
        if self.name is not None:
            expected = "at most 40 lower-case letters, digits and dashes"
            check_pattern("--name", self.name, "[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", expected, hint="`--name my-run`")
        check_printable({"--setup": self.setup, "--container": (self.container or "",)})

    @property
    def min_nodes(self) -> int:
        return int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        return int(self.nodes.rpartition(":")[2])

    @property
    def elastic(self) -> bool:
        return self.min_nodes != self.max_nodes

    @property
    def world_sizes(self) -> range:
        """The numbers of ranks with which the job may run."""
        per_node = self.gpus_per_node
        return range(self.min_nodes * per_node, self.max_nodes * per_node + 1, per_node)

    @property
    def restarts(self) -> int:
        """`max_restarts`, by default 0; 3 for an elastic run, which counts each node that is lost."""
        return self.max_restarts if self.max_restarts is not None else 3 if self.elastic else 0

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with a value that is written into the job file."""
        return dict(item.split("=", 1) for item in self.env if "=" in item)

    @property
    def passed_variables(self) -> list[str]:
        """Names of variables whose values are taken from the environment at submission."""
        return [item for item in self.env if "=" not in item]


def limit_seconds(text: str) -> int:
    """Return SLURM's time limit in seconds: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    found = re.fullmatch("(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)
    if found is None:
        raise ToolkitError(
            f"--time-limit is {text[:40]!r}, expected MINUTES, HH:MM:SS or D-HH:MM:SS", hint="`--time-limit 4:00:00`"
        )
    days, *parts = (None if part is None else int(part) for part in found.groups())
    units = (3600, 60, 1) if days is not None or None not in parts else (60, 1)
    return (days or 0) * DAY_SECONDS + sum((part or 0) * unit for part, unit in zip(parts, units, strict=False))


def check_pattern(option: str, value: str, pattern: str, expected: str, *, hint: str | None = None) -> None:
    """Raise ToolkitError for a value of an option that is not what the pattern describes."""
    if not re.fullmatch(pattern, value):
        raise ToolkitError(f"{option} is {value[:80]!r}, expected {expected}", hint=hint)


def check_printable(options: Mapping[str, Sequence[str]]) -> None:
    """Raise ToolkitError for a value of an option with a line break: it would be another line of the job file."""
    for option, lines in options.items():
        if not all(line.isprintable() for line in lines):
            raise ToolkitError(f"{option} has a line break or a control character", hint=f"repeat `{option}`")

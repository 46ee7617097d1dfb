"""Which trials a comparison has, in which order, and that a resumed one is still the same comparison.

>>> Trial(preset="zero2", num_processes=2, repeat=0).id
'zero2-n2-r0'
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.compare.results import Scaling
from toolkit.errors import ToolkitError
from toolkit.presets import Preset
from toolkit.presets.preset import QUANTIZED_KEYS
from toolkit.runs.argv import read_arguments
from toolkit.runs.folder import read_json, write_json

SPEC_FILE = "comparison.json"
SCHEMA_VERSION = 2  # 1 had one repeat of each trial
# A comparison chooses these itself, the same for every trial.
OWN_ARGUMENTS = {
    "output_dir": "--output",
    "save_model": None,
    "save_strategy": None,
    "untimed_steps": "--untimed-steps",
    "resume_from_checkpoint": "--resume",
    "stop_when_steps_within": "--target-interval",
    "stop_after_minutes": "--trial-minutes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one preset, or of a variant, in fresh processes."""

    preset: str
    num_processes: int
    repeat: int

    @property
    def row(self) -> str:
        """Name of the row that it is a repeat of."""
        return row_name(self.preset, self.num_processes)

    @property
    def id(self) -> str:
        return f"{self.row}-r{self.repeat}"


def row_name(preset: str, num_processes: int) -> str:
    return f"{preset}-n{num_processes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared; two comparisons with equal fields may share a folder."""

    presets: list[str]
    """Names of what is compared: presets, then variants."""
    preset_files: dict[str, dict[str, str]]
    """Name to the text of each file of its preset."""
    promises: dict[str, dict[str, Any]]
    """Name to what its preset promises: `engine`, `sharding`, and whether it `quantises` what it sends."""
    loads: dict[str, str]
    """Name to what `load_preset` takes."""
    extra_arguments: dict[str, list[str]]
    """Name to the training arguments that it alone has."""
    num_processes: list[int]
    training_arguments: list[str]
    untimed_steps: int
    reference: str
    cpu: bool
    repeats: int = 1
    order_seed: int = 0
    target_interval: float | None = None
    trial_minutes: float | None = None
    scaling: Scaling | None = None
    find_max_batch: int | None = None
    """Search each row's largest micro-batch up to this one, and compare there."""
    batches: dict[str, dict[str, int]] = field(default_factory=dict)
    """Row name to the batch arguments that it alone has: strong scaling, and each row's largest micro-batch."""

    def trials(self) -> list[Trial]:
        """In the running order: rounds of one repeat each, each round in an order of its own, by the seed."""
        rows = [(preset, n) for n in self.num_processes for preset in self.presets]
        shuffled = random.Random(self.order_seed)
        ordered = []
        for repeat in range(self.repeats):
            this_round = shuffled.sample(rows, len(rows)) if self.repeats > 1 else rows
            ordered += [Trial(preset=preset, num_processes=n, repeat=repeat) for preset, n in this_round]
        return ordered

    def rows(self) -> list[tuple[str, int]]:
        """Preset and number of processes of each row, as asked for."""
        return [(preset, n) for n in self.num_processes for preset in self.presets]

    def training_argv(self, preset: str, num_processes: int, folder: Path) -> list[str]:
        """The user's arguments, then this row's, then the comparison's own."""
        own: dict[str, Any] = {
            **self.batches.get(row_name(preset, num_processes), {}),
            "output_dir": folder,
            "save_model": "false",
            "save_strategy": "no",
            "untimed_steps": self.untimed_steps,
        }
        if self.target_interval is not None:
            own["stop_when_steps_within"] = self.target_interval
        if self.trial_minutes is not None:
            own["stop_after_minutes"] = self.trial_minutes
        words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        return [*self.training_arguments, *self.extra_arguments.get(preset, []), *words]

    def promised(self, preset: str, num_processes: int) -> dict[str, Any]:
        """What a trial must attest. On a GPU accelerate wraps nothing where there is nobody to reduce with."""
        promise = self.promises[preset]
        alone = promise["engine"] == "ddp" and num_processes == 1 and not self.cpu
        return {"engine": "none" if alone else promise["engine"], "sharding": promise["sharding"]}

    def arguments(self, preset: str, num_processes: int) -> dict[str, Any]:
        """Training arguments of a row by name, without the comparison's own."""
        words = [*self.training_arguments, *self.extra_arguments.get(preset, [])]
        return read_arguments(words) | self.batches.get(row_name(preset, num_processes), {})


def plan_comparison(
    presets: Mapping[str, Preset],
    *,
    loads: Mapping[str, str],
    num_processes: Sequence[int],
    training_arguments: Sequence[str],
    untimed_steps: int,
    reference: str | None,
    cpu: bool,
    **method: Any,
) -> Comparison:
    """The comparison that was asked for. Without a reference, `ddp` is it where present, else the first preset.

    Raises ToolkitError for a reference that is not compared.
    """
    names = list(presets)
    chosen = reference or ("ddp" if "ddp" in names else names[0])
    if chosen not in names:
        raise ToolkitError(f"--reference {chosen} is not among the presets compared: {', '.join(names)}")
    return Comparison(
        presets=names,
        preset_files={name: preset.texts() for name, preset in presets.items()},
        promises={name: promise_of(preset) for name, preset in presets.items()},
        loads=dict(loads),
        num_processes=list(dict.fromkeys(num_processes)),
        training_arguments=list(training_arguments),
        untimed_steps=untimed_steps,
        reference=chosen,
        cpu=cpu,
        **method,
    )


def promise_of(preset: Preset) -> dict[str, Any]:
    """What a trial of this preset is held to, and what sets it apart by design."""
    zero = (preset.deepspeed_config() or {}).get("zero_optimization") or {}
    quantises = any(zero.get(key) for key in QUANTIZED_KEYS)
    return {"engine": preset.engine, "sharding": preset.sharding, "quantises": quantises}


def refuse_own_arguments(arguments: Mapping[str, Any], max_steps: int, untimed_steps: int) -> None:
    """Arguments that a comparison sets itself, and steps that would all be untimed."""
    for name, option in OWN_ARGUMENTS.items():
        if name in arguments:
            instead = "" if option is None else f"; `toolkit compare` has `{option}`"
            raise ToolkitError(f"--{name} is set by the comparison itself", hint=f"remove it{instead}")
    if untimed_steps < 0:
        raise ToolkitError(f"--untimed-steps is {untimed_steps}, expected 0 or more")
    if 0 < max_steps <= untimed_steps:
        raise ToolkitError(
            f"--max_steps {max_steps} leaves no timed step after {untimed_steps} untimed ones",
            hint=f"`--max_steps {untimed_steps + 8}` or more",
        )


def open_comparison(folder: Path, comparison: Comparison, *, resume: bool) -> None:
    """Write the specification into a new folder, or hold it against the one that is being resumed.

    Raises ToolkitError for a folder that holds a comparison and no `--resume`, another comparison, or no room.
    """
    wanted = {"schema_version": SCHEMA_VERSION, **asdict(comparison)}
    present = read_json(folder / SPEC_FILE)
    if present is None:
        try:
            write_json(folder / SPEC_FILE, wanted)
        except OSError as error:
            raise ToolkitError(f"--output {folder} cannot be written: {error.strerror}") from None
        return
    if not resume:
        raise ToolkitError(f"{folder} already holds a comparison", hint="add `--resume`, or name another folder")
    check_version(folder, present)
    for key, value in wanted.items():
        if present.get(key) != value:
            raise ToolkitError(
                f"{folder} holds another comparison: its {key} is {_short(present.get(key))}, now {_short(value)}",
                hint="name another folder: `--output DIR`",
            )


def read_comparison(folder: Path) -> Comparison:
    """The specification in a comparison's folder."""
    present = read_json(folder / SPEC_FILE)
    if present is None:
        raise ToolkitError(f"{folder} holds no comparison", hint="name a folder of `toolkit compare`")
    check_version(folder, present)
    return Comparison(**{key: value for key, value in present.items() if key != "schema_version"})


def check_version(folder: Path, present: Mapping[str, Any]) -> None:
    """An older comparison had one repeat of each trial, whose figures cannot stand beside repeats."""
    if present.get("schema_version") != SCHEMA_VERSION:
        raise ToolkitError(
            f"{folder} holds a comparison of an older toolkit, with single runs; it cannot be gone on with",
            hint=f"`toolkit report {folder}` still reads it; name another folder: `--output DIR`",
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

"""Which trials a comparison has, and that a resumed one is still the same comparison.

>>> Trial(preset="zero2", num_processes=2).id
'zero2-n2'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.presets import Preset
from toolkit.runs.folder import read_json, write_json

SPEC_FILE = "comparison.json"
SCHEMA_VERSION = 1
# A comparison chooses these itself, the same for every trial.
OWN_ARGUMENTS = ("output_dir", "save_model", "save_strategy", "untimed_steps", "resume_from_checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of one preset in fresh processes."""

    preset: str
    num_processes: int

    @property
    def id(self) -> str:
        return f"{self.preset}-n{self.num_processes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared; two comparisons with equal fields may share a folder."""

    presets: list[str]
    preset_files: dict[str, dict[str, str]]
    """Preset name to the text of each of its files."""
    num_processes: list[int]
    training_arguments: list[str]
    untimed_steps: int
    reference: str
    cpu: bool

    def trials(self) -> list[Trial]:
        """In the order of the presets, for each number of processes."""
        return [Trial(preset=preset, num_processes=n) for n in self.num_processes for preset in self.presets]

    def training_argv(self, folder: Path) -> list[str]:
        """The user's arguments, then the comparison's own."""
        own = {"output_dir": folder, "save_model": "false", "save_strategy": "no", "untimed_steps": self.untimed_steps}
        return [*self.training_arguments, *(word for name, value in own.items() for word in (f"--{name}", str(value)))]


def plan_comparison(
    presets: Sequence[Preset],
    *,
    num_processes: Sequence[int],
    training_arguments: Sequence[str],
    untimed_steps: int,
    reference: str | None,
    cpu: bool,
) -> Comparison:
    """The comparison that was asked for. Without a reference, `ddp` is it where present, else the first preset.

    Raises ToolkitError for a preset named twice or a reference that is not compared.
    """
    names = [preset.name for preset in presets]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ToolkitError(f"--preset {repeated[0]} is given twice", hint="name each preset once")
    chosen = reference or ("ddp" if "ddp" in names else names[0])
    if chosen not in names:
        raise ToolkitError(f"--reference {chosen} is not among the presets compared: {', '.join(names)}")
    return Comparison(
        presets=names,
        preset_files={preset.name: preset.texts() for preset in presets},
        num_processes=list(dict.fromkeys(num_processes)),
        training_arguments=list(training_arguments),
        untimed_steps=untimed_steps,
        reference=chosen,
        cpu=cpu,
    )


def refuse_own_arguments(arguments: dict[str, Any], max_steps: int, untimed_steps: int) -> None:
    """Arguments that a comparison sets itself, and steps that would all be untimed."""
    for name in OWN_ARGUMENTS:
        if name in arguments:
            raise ToolkitError(
                f"--{name} is set by the comparison itself", hint=f"remove it; see `toolkit compare --help` for {name}"
            )
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
    for key, value in wanted.items():
        if present.get(key) != value:
            raise ToolkitError(
                f"{folder} holds another comparison: its {key} is {_short(present.get(key))}, now {_short(value)}",
                hint="name another folder: `--output DIR`",
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

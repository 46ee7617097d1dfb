"""In how many processes a preset can train: the one rule, of launcher, planner, rehearsal and conversion.

check_trains_in(load_preset("fsdp2"), 1, given="got 1", option="--num-processes")
# ToolkitError: preset 'fsdp2' needs at least 2 processes, got 1
"""

from __future__ import annotations

from toolkit.errors import ToolkitError
from toolkit.presets.preset import Preset


def why_not(preset: Preset, world_size: int) -> str | None:
    """What keeps a preset from this number of processes, or None."""
    if world_size < preset.min_world_size:
        return f"needs at least {preset.min_world_size} processes"
    if preset.max_world_size is not None and world_size > preset.max_world_size:
        return "trains in one process" if preset.max_world_size == 1 else f"takes {preset.max_world_size} at most"
    if world_size % preset.world_size_multiple:
        return f"needs a multiple of {preset.world_size_multiple} processes"
    return None


def next_world_size(preset: Preset, world_size: int) -> int:
    """The smallest number of processes from `world_size` on that the preset trains in, or the largest one below.

    >>> next_world_size(load_preset("zeropp"), 12)
    16
    """
    multiple = preset.world_size_multiple
    up = max(preset.min_world_size, world_size + -world_size % multiple)
    return up if preset.max_world_size is None else min(up, preset.max_world_size)


def check_trains_in(preset: Preset, world_size: int, *, given: str, option: str) -> None:
    """Refuse a number of processes that the preset does not train in.

    `given` ends the message (`got 3`), `option` is the word to type (`--num-processes`).
    """
    reason = why_not(preset, world_size)
    if reason is None:
        return
    hint = f"`{option} {next_world_size(preset, world_size)}`"
    if preset.max_world_size is not None and world_size > preset.max_world_size:
        hint += ", or `--preset ddp` for several"
    elif world_size < preset.min_world_size:
        hint += ", or `--preset ddp` for fewer"
    raise ToolkitError(f"preset {preset.name!r} {reason}, {given}", hint=hint)

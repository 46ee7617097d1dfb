"""What this run was started as: the preset's file and the number of processes that were asked for.

`toolkit train` says it in the environment. A plain `accelerate launch --config_file F --num_processes N`
hands its ranks neither, so they are read from the launcher's own command line, among this process's parents.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from toolkit.presets import Preset, load_preset, read_preset

PRESET_VARIABLE = "TOOLKIT_PRESET"
WORLD_SIZE_VARIABLE = "TOOLKIT_WORLD_SIZE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the attestation holds the live objects against; None where nobody said."""

    preset: Preset | None
    world_size: int | None
    dp_shard_size: int | None = None
    """Ranks that share one copy of the model in a hybrid mesh."""


def find_promise() -> Promise:
    """From the environment, or from the command line of the `accelerate launch` above this process."""
    if PRESET_VARIABLE in os.environ:
        world_size = os.environ.get(WORLD_SIZE_VARIABLE)
        preset = load_preset(os.environ[PRESET_VARIABLE])
        asked = int(world_size) if world_size else None
        shard_size = preset.dp_shard_size(asked) if asked else None
        return Promise(preset=preset, world_size=asked, dp_shard_size=shard_size)
    for parent in psutil.Process().parents():
        try:
            words, folder = parent.cmdline(), Path(parent.cwd())
        except psutil.Error:
            continue
        options = launcher_options(words)
        if options is not None:
            return promise_of_command(options, folder)
    return Promise(preset=None, world_size=None)


def launcher_options(words: list[str]) -> list[str] | None:
    """What follows accelerate's launcher in an argv, or None where the argv is another program's."""
    names = [Path(word).name for word in words[:4]]
    for position, name in enumerate(names):
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[position + 1 :]
        if name == "accelerate" and words[position + 1 : position + 2] == ["launch"]:
            return words[position + 2 :]
    return None


def promise_of_command(options: list[str], folder: Path) -> Promise:
    """What `accelerate launch` was asked for; its flags win over its file."""
    words = _before_script(options)
    named = _value_of(words, "config_file")
    if named is None:
        return Promise(preset=None, world_size=_whole(_value_of(words, "num_processes")))
    path = folder / named
    asked = _value_of(words, "num_processes") or yaml.safe_load(path.read_text()).get("num_processes")
    shard_size = _whole(_value_of(words, "parallelism_config_dp_shard_size"))
    return Promise(preset=read_preset(path), world_size=_whole(asked), dp_shard_size=shard_size)


def _before_script(options: list[str]) -> list[str]:
    """The launcher's own options; the script's arguments may repeat their names."""
    ends = [position for position, word in enumerate(options) if word in ("-m", "--module") or word.endswith(".py")]
    return options[: ends[0]] if ends else options


def _value_of(words: list[str], name: str) -> str | None:
    """The value of a launcher flag, in either spelling."""
    spellings = (f"--{name}", f"--{name.replace('_', '-')}")
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in spellings:
            return following
        if word.startswith(tuple(f"{spelling}=" for spelling in spellings)):
            return word.split("=", 1)[1]
    return None


def _whole(value: object) -> int | None:
    return int(str(value)) if value is not None and str(value).isdigit() else None

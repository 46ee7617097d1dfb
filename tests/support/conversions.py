"""Conversions of configuration text, and the check that every setting is accounted for."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import convert_file, yaml_text
from toolkit.convert.draft import Conversion
from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.presets import load_preset
from toolkit.presets.support import check_arguments

# `check_arguments` also wants the packages of trackers, which a test machine may not have.
MISSING_PACKAGE = "needs a package that is not installed"


def convert_text(folder: Path, text: str, *, name: str = "theirs.yaml", tool: str | None = None) -> Conversion:
    (folder / name).write_text(text)
    return convert_file(folder / name, tool)


def outcome(convert: Callable[[], Conversion]) -> Conversion | ToolkitError:
    try:
        return convert()
    except ToolkitError as error:
        return error


def reasons_of(conversion: Conversion) -> dict[str, str]:
    return {each.key: each.reason for each in conversion.not_converted}


def unaccounted(values: Mapping[str, Any], conversion: Conversion) -> list[str]:
    """Return the settings that are neither converted, nor redundant, nor listed; and those converted to nothing."""
    listed = {each.key for each in conversion.not_converted}
    reported = {*conversion.converted, *conversion.redundant, *listed}
    targets = {*conversion.arguments, "--preset", "--num-processes"}
    lost = [key for key, target in conversion.converted.items() if target not in targets]
    return lost + [key for name, value in values.items() for key in _missing(str(name), value, reported)]


def _missing(key: str, value: Any, reported: Collection[str]) -> list[str]:
    if key in reported:
        return []
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        inner = [(f"{key}.{name}", each) for name, each in value.items()]
    if isinstance(value, list):
        inner = [(f"{key}[{number}]", each) for number, each in enumerate(value)]
    return [lost for name, each in inner for lost in _missing(name, each, reported)] if inner else [key]


def refused_by_our_checks(conversion: Conversion, folder: Path) -> str | None:
    """Return why our own argument checks refuse the converted file, or None; packages need not be installed."""
    file = folder / "ours.yaml"
    file.write_text(yaml_text(conversion, source="theirs.yaml", file=str(file)))
    job = Job.from_argv([str(file)])
    assert job == Job.from_values(conversion.arguments)
    preset = load_preset(conversion.preset)
    processes = conversion.num_processes or max(preset.min_world_size, 1)
    try:
        check_arguments(job, preset, num_processes=processes, on_cpu=False, here=False)
    except ToolkitError as error:
        return None if MISSING_PACKAGE in str(error) else str(error)
    return None

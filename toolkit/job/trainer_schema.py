"""What the installed transformers accepts: the fields of `TrainingArguments`, its schedules, its trackers.

    trainer_schema().fields["eval_strategy"].choices      # ('no', 'steps', 'epoch')

Importing transformers takes seconds, so it is asked once, in a process of its own (`toolkit.job.describe_trainer`), and
the answer is cached by version. The package brings the answer of the version that `constraints.txt` pins.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cache import cache_folder
from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.json_files import parse_json, read_json_object
from toolkit.files.value_limits import CONFIGURATION
from toolkit.versions import installed_version

SHIPPED = Path(__file__).with_name("trainer_schema.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerField:
    """One field of `TrainingArguments`."""

    type: str
    """The annotation, without module names: `int | None`."""
    choices: tuple[str, ...]
    """Words that it accepts; empty where it accepts any."""
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSchema:
    """What one version of transformers accepts."""

    fields: Mapping[str, TrainerField]
    schedules: Mapping[str, Mapping[str, bool] | None]
    """Schedule -> the keys of `lr_scheduler_kwargs`, each True if it must be given; None: any key."""
    trackers: tuple[str, ...]
    """Words of `report_to`."""
    accelerator_config: Mapping[str, str]
    """Key -> annotation."""


@functools.cache
def trainer_schema() -> TrainerSchema:
    """Return what the installed transformers accepts.

    Raises ToolkitError where transformers is not installed, or cannot be imported.
    """
    version = installed_version("transformers")
    if version is None:
        raise ToolkitError("transformers is not installed", hint="`make setup` in the clone installs it")
    shipped = read_json_object(SHIPPED, limits=CONFIGURATION)
    return _schema(shipped if shipped["transformers"] == version else _cached(version))


def trainer_argument_names() -> frozenset[str]:
    """Return the names of `TrainingArguments`' fields; none where transformers is not installed."""
    return frozenset(trainer_schema().fields if installed_version("transformers") else ())


def _schema(described: Mapping[str, Any]) -> TrainerSchema:
    fields = {
        name: TrainerField(type=field["type"], choices=tuple(field.get("choices", ())), help=field.get("help", ""))
        for name, field in described["fields"].items()
    }
    return TrainerSchema(
        fields=fields,
        schedules=described["schedules"],
        trackers=tuple(described["trackers"]),
        accelerator_config=described["accelerator_config"],
    )


def _cached(version: str) -> dict[str, Any]:
    """Read the cache, or describe the installed version and write it; a cache that nobody may write is no error."""
    file = cache_folder() / "trainer_schema" / f"{version}.json"
    try:
        described = read_json_object(file, limits=CONFIGURATION)
        if described.get("transformers") == version:
            return described
    except ToolkitError:
        pass
    text = describe_installed()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except (OSError, ToolkitError):
        pass
    content: dict[str, Any] = parse_json(text, "the description of transformers", limits=CONFIGURATION)
    return content


def describe_installed() -> str:
    """Import the installed transformers in a process of its own, and return its description, JSON."""
    words = [sys.executable, "-m", "toolkit.job.describe_trainer"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolkitError(
            f"transformers {installed_version('transformers')} cannot be imported: {last[:300]}",
            hint="`python -c 'import transformers.training_args'` shows the whole error",
        )
    return ended.stdout

"""What the installed transformers accepts: the fields of `TrainingArguments`, its schedules, its trackers.

    trainer_schema().fields["eval_strategy"].choices      # ('no', 'steps', 'epoch')

Importing transformers takes seconds, so it is asked once, in a process of its own, and the answer is cached by version.
The package brings the answer of the version that `constraints.txt` pins:

    python -m toolkit.job.trainer_schema > toolkit/job/trainer_schema.json
"""

import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import CONFIGURATION, parse_json, read_json_object
from toolkit.files.paths import cache_folder
from toolkit.versions import installed_version

# What the Trainer itself passes to the function of a schedule.
PASSED_BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps")
SHIPPED = Path(__file__).with_name("trainer_schema.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerField:
    """One field of `TrainingArguments`."""

    type: str  # the annotation, without module names: `int | None`
    choices: tuple[str, ...]  # words that it accepts; empty where it accepts any
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSchema:
    """What one version of transformers accepts."""

    fields: Mapping[str, TrainerField]
    schedules: Mapping[str, Mapping[str, bool] | None]
    """Schedule -> the keys of `lr_scheduler_kwargs`, each True if it must be given; None: any key."""
    trackers: tuple[str, ...]  # words of `report_to`
    optim_args: Mapping[str, Sequence[str]]
    """Optimizer -> the keys of `optim_args` that the function that makes it reads; it says nothing of others."""
    accelerator_config: Mapping[str, str]  # key -> annotation


@functools.cache
def trainer_schema() -> TrainerSchema:
    """Return what the installed (or else the shipped) transformers accepts. Raises ToolkitError if it is broken."""
    version = installed_version("transformers")
    shipped = read_json_object(SHIPPED, limits=CONFIGURATION)
    described = shipped if version in (None, shipped["transformers"]) else _cached(str(version))
    fields = {
        name: TrainerField(type=field["type"], choices=tuple(field.get("choices", ())), help=field.get("help", ""))
        for name, field in described["fields"].items()
    }
    return TrainerSchema(
        fields=fields,
        schedules=described["schedules"],
        trackers=tuple(described["trackers"]),
        optim_args=described.get("optim_args", {}),  # a cache of an older toolkit has none
        accelerator_config=described["accelerator_config"],
    )


def trainer_argument_names() -> frozenset[str]:
    """Return the names of `TrainingArguments`' fields."""
    return frozenset(trainer_schema().fields)


def _cached(version: str) -> dict[str, Any]:
    """Read the cache, or describe the installed version and write it; a cache that nobody may write is no error."""
    file = cache_folder() / "trainer_schema" / f"{version}.json"
    with contextlib.suppress(ToolkitError):
        described = read_json_object(file, limits=CONFIGURATION)
        if described.get("transformers") == version:
            return described
    text = describe_installed()
    with contextlib.suppress(OSError):
        write_text(file, text)
    content: dict[str, Any] = parse_json(text, "the description of transformers", limits=CONFIGURATION)
    return content


def describe_installed() -> str:
    """Import the installed transformers in a process of its own, and return its description, JSON."""
    words = [sys.executable, "-m", "toolkit.job.trainer_schema"]
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


# -- in the process that imports transformers


def describe() -> dict[str, Any]:
    """Return the fields of `TrainingArguments`, and what the schedules, trackers and the accelerator accept."""
    import transformers
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
    from transformers.trainer_pt_utils import AcceleratorConfig
    from transformers.training_args import TrainingArguments

    hints = get_type_hints(TrainingArguments)
    return {
        "transformers": transformers.__version__,
        "fields": {
            field.name: _field(field, hints[field.name])
            for field in dataclasses.fields(TrainingArguments)
            if field.init
        },
        "schedules": {schedule.value: _schedule(make) for schedule, make in TYPE_TO_SCHEDULER_FUNCTION.items()},
        "trackers": list(INTEGRATION_TO_CALLBACK),
        "optim_args": {
            str(getattr(optim, "value", optim)): _read_options(inspect.getsource(make))
            for optim, make in _OPTIMIZER_HANDLERS.items()
        },
        "accelerator_config": {
            name: _type_text(hint) for name, hint in get_type_hints(AcceleratorConfig).items() if name != "return"
        },
    }


def _field(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """A field has a choice if its metadata says so, or if its type is an enum, or one inside a union or list."""
    choices = field.metadata.get("choices") or _enum_values(hint)
    described: dict[str, Any] = {"type": _type_text(hint)}
    if choices:
        described["choices"] = list(choices)
    if help_text := field.metadata.get("help"):
        described["help"] = " ".join(help_text.split())
    return described


def _enum_values(hint: Any) -> list[str]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(member.value) for member in hint]
    return next(filter(None, map(_enum_values, get_args(hint))), [])


def _type_text(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+", "", text)


def _read_options(source: str) -> list[str]:
    """The keys of `optim_args` that a function reads, one by one or in a loop over their names."""
    loops = " ".join(re.findall(r"for key in [(\[]([^)\]]*)", source))
    return sorted({*re.findall(r'optim_args(?:\.\w+\(|\[)"(\w+)"', source), *re.findall(r'"(\w+)"', loops)})


def _schedule(make: Any) -> dict[str, bool] | None:
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in parameters.items()
        if name not in PASSED_BY_TRAINER
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # a library that prints must not end up in the JSON
        described = describe()
    print(json.dumps(described, indent=1, ensure_ascii=False))

"""Describe the installed transformers as JSON: run as a program, since it imports transformers.

python -m toolkit.job.describe_trainer > toolkit/job/trainer_schema.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import json
import re
import sys
from typing import Any, get_args, get_type_hints

# What the Trainer itself passes to the function of a schedule.
PASSED_BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps")


def describe() -> dict[str, Any]:
    """Return the fields of `TrainingArguments`, and what the schedules, trackers and the accelerator accept."""
    import transformers
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
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
    """The annotation without module names."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+", "", text)


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

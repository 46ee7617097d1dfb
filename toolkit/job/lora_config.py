"""`--lora_config`: any field of peft's `LoraConfig`, checked against the installed one without importing it.

    >>> lora_fields(["use_dora=true", "layers_to_transform=[0, 1]"])
    {'use_dora': True, 'layers_to_transform': [0, 1]}

In a YAML file it is a mapping.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.value_limits import shown
from toolkit.files.yaml_files import parse_yaml
from toolkit.job.argument_values import fits
from toolkit.versions import lora_config_types

# Fields that are set by arguments of their own.
SET_BY_ARGUMENTS = {
    "r": "--lora_r",
    "lora_alpha": "--lora_alpha",
    "lora_dropout": "--lora_dropout",
    "target_modules": "--lora_target_modules",
}


def lora_fields(value: Any) -> dict[str, Any]:
    """Return the fields and values of `key=value` words, or of a YAML file's mapping.

    Raises ToolkitError for an unknown field (with the nearest one), or one that has an argument of its own.
    """
    fields = value if isinstance(value, dict) else dict(map(_field_of, _words(value)))
    for name, given in fields.items():
        _check(str(name), given)
    return fields


def _words(value: Any) -> list[str]:
    return [] if value is None else [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]


def _field_of(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals:
        raise ToolkitError(f"--lora_config {shown(word)} is not key=value", hint=f"`--lora_config {word[:80]}=true`")
    try:
        return name, parse_yaml(text, f"--lora_config {name}")
    except ToolkitError:
        raise ToolkitError(f"--lora_config {name[:80]} is {shown(text)}, expected a YAML or JSON value") from None


def _check(name: str, value: Any) -> None:
    if name in SET_BY_ARGUMENTS:
        raise ToolkitError(f"--lora_config {name} has an argument of its own", hint=f"`{SET_BY_ARGUMENTS[name]} VALUE`")
    types = lora_config_types()
    if name not in types:
        hint = did_you_mean(name, types, otherwise="the fields of peft's `LoraConfig`, see its documentation")
        raise ToolkitError(f"--lora_config has no field {shown(name)}", hint=hint)
    if not fits(value, types[name]):
        expected = (
            "true or false"
            if types[name] == "bool"
            else types[name].replace("Optional", "").replace("Literal", "one of ")
        )
        raise ToolkitError(f"--lora_config {name} is {shown(value)}, expected {expected}")

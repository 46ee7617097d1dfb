"""YAML files, read with limits on size, depth and expanded aliases; `read_configuration` reads YAML or JSON."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ToolkitError
from toolkit.files.json_files import as_mapping, read_json
from toolkit.files.reading import read_text
from toolkit.files.value_limits import CONFIGURATION, Limits, check_values, shown
from toolkit.units import MIB

MAX_YAML_BYTES = MIB
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YAML_TAG = "tag:yaml.org,2002:"
# PyYAML takes quadratic time for `1:2:3...` (base 60), minutes for a megabyte of it.
MAX_NUMBER_CHARACTERS = 400
_NUMBER = re.compile(r"[-+0-9.][0-9a-fA-Fx_:.+-]*")


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration: JSON if its name ends so, otherwise YAML.

    Raises ToolkitError as `read_text` and `parse_yaml` do, for another type, and for a key that is not text.
    """
    if path.suffix == ".json":
        return as_mapping(read_json(path, limits=CONFIGURATION, max_bytes=MAX_YAML_BYTES), str(path))
    content = as_mapping(parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), str(path)), str(path))
    for key in content:
        if not isinstance(key, str):
            raise ToolkitError(f"{path} has the key {shown(key)}, expected a name", hint="put the key in quotes")
    return content


def parse_yaml(text: str, name: str, *, limits: Limits = CONFIGURATION) -> Any:
    """Return the value in a text that messages call `name`.

    Raises ToolkitError for malformed YAML, with its line; for tags that name objects; and as `check_yaml` and
    `check_values` do.
    """
    check_yaml(text, name, limits)
    try:
        content = yaml.load(text, Loader=LOADER)
    except Exception as error:  # PyYAML raises KeyError, TypeError and more for scalars like `!!int ''`
        raise not_yaml(name, error) from None
    check_values(content, name, limits)
    return content


def not_yaml(name: str, error: Exception) -> ToolkitError:
    """Return the error for a text that PyYAML refuses, in one line."""
    if isinstance(error, yaml.constructor.ConstructorError) and "constructor for the tag" in str(error.problem):
        tag = str(error.problem).split("'")[1][:80]
        return ToolkitError(
            f"{name} has a value with the tag {tag!r}, which names an object; nothing was executed",
            hint="use only plain keys, numbers and strings",
        )
    why = str(error) if isinstance(error, yaml.YAMLError | ValueError | OverflowError) else type(error).__name__
    return ToolkitError(f"{name} is not YAML: {' '.join(why.split())[:400]}")


def check_yaml(text: str, name: str, limits: Limits) -> None:
    """Raise ToolkitError for deeper or more values than the limits, counted before any value exists.

    An alias counts as often as it is used: a few lines of them can stand for billions of values.
    """
    around: list[tuple[str | None, float]] = [(None, 0)]  # anchor and values of each collection that is not closed yet
    anchored: dict[str | None, float] = {}
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, 1))
                anchored[event.anchor] = math.inf
                limits.check(name, values=0, depth=len(around) - 1)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, values = around.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor, values = None, anchored.get(event.anchor, 1)
                if values == math.inf:
                    raise ToolkitError(f"{name} has an alias *{str(event.anchor)[:40]} inside of what it stands for")
            elif isinstance(event, yaml.ScalarEvent):
                anchor, values = event.anchor, 1
                if len(event.value) > MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(event.value):
                    raise ToolkitError(f"{name} has a number of {len(event.value):,} characters")
            else:
                continue
            anchored[anchor] = values
            around[-1] = (around[-1][0], around[-1][1] + values)
            limits.check(name, values=around[-1][1], depth=0)
    except (yaml.YAMLError, ValueError) as error:
        raise not_yaml(name, error) from None

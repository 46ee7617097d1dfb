"""YAML files, read with limits on size, depth and expanded aliases; tags that name objects are refused.

`read_configuration` reads a configuration of either kind, YAML or JSON.
"""

from __future__ import annotations

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
PLAIN_TAGS = {YAML_TAG + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp")}

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

    >>> parse_yaml("a: &a [1, 2]\\nb: *a", "mine.yaml")
    {'a': [1, 2], 'b': [1, 2]}

    Raises ToolkitError for malformed YAML, with its line; for more or deeper values than `limits`, counting an alias as
    often as it is used; for tags that name objects; and for numbers that are not finite or beyond 64 bits.
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
    why = str(error) if isinstance(error, yaml.YAMLError | ValueError | OverflowError) else type(error).__name__
    return ToolkitError(f"{name} is not YAML: {' '.join(why.split())[:400]}")


def check_yaml(text: str, name: str, limits: Limits) -> None:
    """Check size, depth, aliases and tags event by event, before any value exists. Raises ToolkitError.

    An alias counts as often as it is used: a few lines of them can stand for billions of values.
    """
    # Anchor, values and depth of each collection that is not closed yet; the first stands for the whole text.
    around: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    known: dict[str, tuple[int, int]] = {}
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent):
                _check_tag(event.tag, name)
            if isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, 1, 1))
                limits.check(name, values=len(around), depth=len(around) - 1)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, values, depth = around.pop()
            elif isinstance(event, yaml.ScalarEvent):
                anchor, values, depth = event.anchor, 1, 1
                if len(event.value) > MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(event.value):
                    raise ToolkitError(f"{name} has a number of {len(event.value):,} characters")
            elif isinstance(event, yaml.AliasEvent):
                alias = str(event.anchor)
                if alias in [anchor for anchor, _, _ in around]:
                    raise ToolkitError(f"{name} has an alias *{alias[:40]} inside of what it stands for")
                anchor, (values, depth) = None, known.get(alias, (1, 1))
            else:
                continue
            if anchor is not None:
                known[anchor] = (values, depth)
            parent, values_before, deepest = around[-1]
            around[-1] = (parent, values_before + values, max(deepest, depth + 1))
            total = sum(counted for _, counted, _ in around)
            limits.check(name, values=total, depth=len(around) - 1 + depth)
    except (yaml.YAMLError, ValueError) as error:
        raise not_yaml(name, error) from None


def _check_tag(tag: str | None, name: str) -> None:
    if tag is not None and tag not in PLAIN_TAGS and tag != "!":
        raise ToolkitError(
            f"{name} has a value with the tag {tag[:80]!r}, which names an object; nothing was executed",
            hint="use only plain keys, numbers and strings",
        )

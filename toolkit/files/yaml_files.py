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

    Raises ToolkitError as `read_yaml_mapping` does, and for a key that is not text.
    """
    if path.suffix == ".json":
        return as_mapping(read_json(path, limits=CONFIGURATION, max_bytes=MAX_YAML_BYTES), str(path))
    content = read_yaml_mapping(path)
    for key in content:
        if not isinstance(key, str):
            raise ToolkitError(f"{path} has the key {shown(key)}, expected a name", hint="put the key in quotes")
    return content


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file. Raises ToolkitError as `read_text` and `parse_yaml` do."""
    return parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), str(path))


def read_yaml_mapping(path: Path) -> dict[Any, Any]:
    """Return the keys and values in a YAML file. Raises ToolkitError as `read_yaml` does, and for another type."""
    return as_mapping(read_yaml(path), str(path))


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
    """Check size, depth, aliases and tags event by event, before any value exists. Raises ToolkitError."""
    try:
        _Bounds(name, limits).check(text)
    except (yaml.YAMLError, ValueError) as error:
        raise not_yaml(name, error) from None


class _Bounds:
    """Counts the values and the depth of a text as if each alias were written out."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name, self.limits = name, limits
        self.open: list[list[int]] = [[0, 0]]
        """Values and depth of each collection that is not closed yet; the first stands for the whole text."""
        self.anchors: list[str | None] = [None]
        self.known: dict[str, tuple[int, int]] = {}

    def check(self, text: str) -> None:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.AliasEvent):
                self._add(*self._expanded(event.anchor))
            elif isinstance(event, yaml.CollectionStartEvent):
                self._check_tag(event.tag)
                self.open.append([1, 1])
                self.anchors.append(event.anchor)
                self.limits.check(self.name, values=len(self.open), depth=len(self.open) - 1)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close(*self.open.pop(), anchor=self.anchors.pop())
            elif isinstance(event, yaml.ScalarEvent):
                self._check_tag(event.tag)
                if len(event.value) > MAX_NUMBER_CHARACTERS and _NUMBER.fullmatch(event.value):
                    raise ToolkitError(f"{self.name} has a number of {len(event.value):,} characters")
                self._close(1, 1, anchor=event.anchor)

    def _expanded(self, anchor: str | None) -> tuple[int, int]:
        if anchor in self.anchors:
            raise ToolkitError(f"{self.name} has an alias *{str(anchor)[:40]} inside of what it stands for")
        return self.known.get(str(anchor), (1, 1))

    def _close(self, values: int, depth: int, *, anchor: str | None) -> None:
        if anchor is not None:
            self.known[anchor] = (values, depth)
        self._add(values, depth)

    def _add(self, values: int, depth: int) -> None:
        around = self.open[-1]
        around[0] += values
        around[1] = max(around[1], depth + 1)
        total = sum(counted for counted, _ in self.open)
        self.limits.check(self.name, values=total, depth=len(self.open) - 1 + depth)

    def _check_tag(self, tag: Any) -> None:
        if isinstance(tag, str) and tag not in PLAIN_TAGS and tag != "!":
            raise ToolkitError(
                f"{self.name} has a value with the tag {tag[:80]!r}, which names an object; nothing was executed",
                hint="use only plain keys, numbers and strings",
            )

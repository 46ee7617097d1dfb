"""Parse YAML and JSON into plain values and the position of each key, without executing anything.

>>> data, positions, _ = parse_yaml("zero_optimization: {stage: no}", "mine.yaml")
>>> data, positions["zero_optimization.stage"].line
({'zero_optimization': {'stage': False}}, 1)

`toolkit.files` checks size, depth, aliases and tags before anything is built here.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from toolkit.errors import ToolkitError
from toolkit.files import json_files
from toolkit.files.value_limits import CONFIGURATION, check_values
from toolkit.files.yaml_files import LOADER, YAML_TAG, check_yaml, not_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPosition:
    """Where a key and its value are in a text; spans are character offsets, end exclusive."""

    key: str
    """Dotted, as `zero_optimization.stage`; an item of a list has its index as a key."""
    line: int
    """1-based."""
    key_span: tuple[int, int]
    value_span: tuple[int, int]
    in_braces: bool
    """Inside YAML flow braces or JSON, where entries are separated by commas."""
    repeated: bool = False
    """An entry before it in the same block has the same key."""


Parsed: TypeAlias = tuple[Any, dict[str, KeyPosition], tuple[KeyPosition, ...]]
"""The value, the position of each key, and the positions of keys that repeat one in the same block."""


def parse_yaml(text: str, path: str) -> Parsed:
    """Parse YAML; `path` is for error messages. A date stays text, and every key is text.

    Raises ToolkitError as `toolkit.files.yaml_files.parse_yaml` does; an infinity is a value like any other here.
    """
    check_yaml(text, path, CONFIGURATION)
    try:
        root = yaml.compose(text, Loader=LOADER)
        found = [] if root is None else list(_yaml_positions(root, "", path))
        data = None if root is None else yaml.SafeLoader("").construct_document(root)
    except ToolkitError:
        raise
    except Exception as error:  # PyYAML raises KeyError, TypeError and more for scalars like `!!int ''`
        raise not_yaml(path, error) from None
    check_values(data, path, CONFIGURATION, allow_nan=True)
    return _parsed(data, found)


def parse_json(text: str, path: str) -> Parsed:
    """Parse JSON; `path` is for error messages.

    Raises ToolkitError as `toolkit.files.json_files.parse_json` does; an infinity is a value like any other here.
    """
    data = json_files.parse_json(text, path, limits=CONFIGURATION, allow_nan=True)
    try:
        found = list(_json_positions(text))
    except RecursionError:  # in a value that a repeated key replaces, which is not among those that were checked
        CONFIGURATION.check(path, values=0, depth=CONFIGURATION.depth + 1)
        raise
    return _parsed(data, found)


def _parsed(data: Any, found: list[KeyPosition]) -> Parsed:
    return data, {position.key: position for position in found}, tuple(each for each in found if each.repeated)


def _yaml_positions(node: yaml.Node, key: str, path: str) -> Iterator[KeyPosition]:
    """Yield the position of each key below a node, and mark keys and dates as text."""
    prefix = f"{key}." if key else ""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _yaml_positions(item, f"{prefix}{index}", path)
    elif isinstance(node, yaml.ScalarNode) and node.tag == YAML_TAG + "timestamp":
        node.tag = YAML_TAG + "str"
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                raise ToolkitError(f"{path} has a key that is not a string, on line {line}")
            if key_node.tag == YAML_TAG + "merge":  # a block's keys are merged into this one
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    yield from _yaml_positions(source, key, path)
                continue
            key_node.tag = YAML_TAG + "str"
            yield KeyPosition(
                key=prefix + key_node.value,
                line=key_node.start_mark.line + 1,
                key_span=(key_node.start_mark.index, key_node.end_mark.index),
                value_span=(value_node.start_mark.index, _yaml_end(value_node)),
                in_braces=bool(node.flow_style),
                repeated=key_node.value in names,
            )
            names.add(key_node.value)
            yield from _yaml_positions(value_node, prefix + key_node.value, path)


def _yaml_end(node: yaml.Node) -> int:
    """Return where a value's text ends; the end mark of a block is after the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _json_positions(text: str) -> Iterator[KeyPosition]:
    """Yield the position of each key of a text that the decoder has accepted, so that every brace has its partner."""
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    seen: set[str] = set()

    def after_space(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    def value(start: int, key: str) -> Generator[KeyPosition, None, int]:
        """Yield the positions in the value that begins at an offset, and return where it ends."""
        if text[start] not in "{[":
            return _DECODER.raw_decode(text, start)[1]
        prefix, index, at = f"{key}." if key else "", 0, after_space(start + 1)
        while text[at] not in "}]":
            if text[start] == "[":
                end = yield from value(at, f"{prefix}{index}")
            else:
                name, key_end = _DECODER.raw_decode(text, at)
                colon = after_space(key_end)
                value_start = after_space(colon + 1)
                end = yield from value(value_start, prefix + name)
                yield KeyPosition(
                    key=prefix + name,
                    line=bisect_right(line_starts, at),
                    key_span=(at, key_end),
                    value_span=(value_start, end),
                    in_braces=True,
                    repeated=prefix + name in seen,
                )
                seen.add(prefix + name)
            index, at = index + 1, after_space(end)
            at = after_space(at + 1) if text[at] == "," else at
        return at + 1

    yield from value(after_space(0), "")

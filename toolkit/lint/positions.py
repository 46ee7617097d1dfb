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


Parsed: TypeAlias = tuple[Any, dict[str, KeyPosition], list[KeyPosition]]
"""The value, the position of each key, and the positions of keys that repeat one in the same block."""


# -- YAML


def parse_yaml(text: str, path: str) -> Parsed:
    """Parse YAML; `path` is for error messages.

    Raises ToolkitError as `toolkit.files.yaml_files.parse_yaml` does; an infinity is a value like any other here.
    """
    check_yaml(text, path, CONFIGURATION)
    builder = _YamlBuilder(path)
    try:
        root = yaml.compose(text, Loader=LOADER)
        data = None if root is None else builder.value(root, "")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise not_yaml(path, error) from None
    check_values(data, path, CONFIGURATION, allow_nan=True)
    return data, builder.positions, builder.duplicates


class _YamlBuilder:
    """Builds plain values from nodes, and notes where each key is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.positions: dict[str, KeyPosition] = {}
        self.duplicates: list[KeyPosition] = []
        self.scalars = yaml.SafeLoader("")

    def value(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{key}.{n}" if key else str(n)) for n, item in enumerate(node.value)]
        return self.scalar(node)

    def scalar(self, node: yaml.Node) -> Any:
        """Build what `safe_load` would, except that a date stays text."""
        if node.tag == YAML_TAG + "timestamp":
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (KeyError, IndexError, TypeError, AttributeError):  # PyYAML's own bugs, for `!!int ''` and the like
            raise ToolkitError(f"{self.path} has a value that YAML cannot read: {node.value[:80]!r}") from None

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        built: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                raise ToolkitError(f"{self.path} has a key that is not a string, on line {line}")
            if key_node.tag == YAML_TAG + "merge":
                merged = self.merge(value_node, key) | merged
                continue
            name = key_node.value
            full = f"{key}.{name}" if key else name
            position = _yaml_position(full, key_node, value_node, in_braces=bool(node.flow_style))
            if name in built:
                self.duplicates.append(position)
            self.positions[full] = position
            built[name] = self.value(value_node, full)
        return merged | built

    def merge(self, node: yaml.Node, key: str) -> dict[str, Any]:
        """Build what `<<` merges in; keys of the block itself win over it."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise ToolkitError(f"{self.path} merges something that is not a block of keys")
            merged = self.value(source, key) | merged
        return merged


def _yaml_position(key: str, key_node: yaml.Node, value_node: yaml.Node, *, in_braces: bool) -> KeyPosition:
    return KeyPosition(
        key=key,
        line=key_node.start_mark.line + 1,
        key_span=(key_node.start_mark.index, key_node.end_mark.index),
        value_span=(value_node.start_mark.index, _yaml_end(value_node)),
        in_braces=in_braces,
    )


def _yaml_end(node: yaml.Node) -> int:
    """Return where a value's text ends; the end mark of a block is after the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


# -- JSON: Python's own decoder builds the values, a scanner finds the positions

# A string that is not closed ends with its line, so that the scanner never backtracks.
JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|[{}\[\],:]|[^\s{}\[\],:"]+')


def parse_json(text: str, path: str) -> Parsed:
    """Parse JSON; `path` is for error messages.

    Raises ToolkitError as `toolkit.files.json_files.parse_json` does; an infinity is a value like any other here.
    """
    data = json_files.parse_json(text, path, limits=CONFIGURATION, allow_nan=True)
    positions: dict[str, KeyPosition] = {}
    duplicates: list[KeyPosition] = []
    for position in _json_positions(text):
        if position.key in positions:
            duplicates.append(position)
        positions[position.key] = position
    return data, positions, duplicates


@dataclass
class _OpenBlock:
    """A brace or bracket that is not closed yet, and the key or index that is being read in it."""

    prefix: str
    start: int
    is_list: bool
    index: int = 0
    key: str | None = None
    key_span: tuple[int, int] = (0, 0)

    def child(self) -> str:
        name = str(self.index) if self.is_list else (self.key or "")
        return f"{self.prefix}.{name}" if self.prefix else name


def _json_positions(text: str) -> list[KeyPosition]:
    """Return a position per key of a text that the decoder has accepted, so that every brace has its partner."""
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    found: list[KeyPosition] = []
    stack: list[_OpenBlock] = []

    def value_read(start: int, end: int) -> None:
        if stack and not stack[-1].is_list and stack[-1].key is not None:
            block = stack[-1]
            line = bisect_right(line_starts, block.key_span[0])
            spans = {"key_span": block.key_span, "value_span": (start, end)}
            found.append(KeyPosition(key=block.child(), line=line, in_braces=True, **spans))

    for match in JSON_TOKEN.finditer(text):
        token, (start, end) = match[0], match.span()
        if token in "{[":
            prefix = stack[-1].child() if stack else ""
            stack.append(_OpenBlock(prefix=prefix, start=start, is_list=token == "["))
        elif token in "}]":
            value_read(stack.pop().start, end)
        elif token == ",":
            stack[-1].index += 1
            stack[-1].key = None
        elif token == ":":
            continue
        elif stack and not stack[-1].is_list and stack[-1].key is None:
            stack[-1].key, stack[-1].key_span = json.loads(token), (start, end)
        else:
            value_read(start, end)
    return found

"""YAML with the place of each key; tags that name anything but plain data are refused, never executed.

>>> read("a: [1, no]", "mine.yaml")[0]
{'a': [1, False]}
"""

from __future__ import annotations

from typing import Any

import yaml

from toolkit.errors import ToolkitError
from toolkit.lint.places import Entry, check_bounds

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PLAIN = "tag:yaml.org,2002:"
PLAIN_TAGS = {PLAIN + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp")}
MERGE = PLAIN + "merge"


def read(text: str, path: str) -> tuple[Any, dict[str, Entry], list[Entry]]:
    """Value, places, and the places of keys that stand twice.

    Raises ToolkitError for what is no YAML, too large, or names objects.
    """
    try:
        _check_events(text, path)
        root = yaml.compose(text, Loader=LOADER)
        reader = _Reader(path)
        data = None if root is None else reader.value(root, "", 0)
    except yaml.YAMLError as error:
        raise ToolkitError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ToolkitError(f"{path} cannot be read: {error}") from None
    return data, reader.entries if root is not None else {}, reader.twice if root is not None else []


def _check_events(text: str, path: str) -> None:
    """Bounds and tags, event by event, before any node exists."""
    depth = values = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            continue
        values += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        check_bounds(path, values=values, depth=depth)
        tag = getattr(event, "tag", None)
        if isinstance(tag, str) and tag not in PLAIN_TAGS and tag != "!":
            raise ToolkitError(
                f"{path} has a value with the tag {tag[:80]!r}, which names an object; refused, nothing was executed",
                hint="write plain keys, numbers and words",
            )


class _Reader:
    """Builds plain values from nodes; what aliases expand to counts every time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.twice: list[Entry] = []
        self.built = 0
        self.scalars = yaml.SafeLoader("")

    def value(self, node: yaml.Node, key: str, depth: int) -> Any:
        self.built += 1
        check_bounds(self.path, values=self.built, depth=depth)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{key}.{n}" if key else str(n), depth + 1) for n, item in enumerate(node.value)]
        return self.scalar(node)

    def scalar(self, node: yaml.Node) -> Any:
        """As `safe_load` gives it, but a date stays text."""
        if node.tag == PLAIN + "timestamp":
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (KeyError, IndexError, TypeError, AttributeError):  # PyYAML's own, for `!!int ''` and the like
            raise ToolkitError(f"{self.path} has a value that YAML cannot read: {node.value[:80]!r}") from None

    def mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Any]:
        built: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ToolkitError(f"{self.path} has a key that is no word, on line {key_node.start_mark.line + 1}")
            if key_node.tag == MERGE:
                merged = self.merge(value_node, key, depth) | merged
                continue
            name = key_node.value
            full = f"{key}.{name}" if key else name
            entry = _entry(full, key_node, value_node, flow=bool(node.flow_style))
            if name in built:
                self.twice.append(entry)
            self.entries[full] = entry
            built[name] = self.value(value_node, full, depth + 1)
        return merged | built

    def merge(self, node: yaml.Node, key: str, depth: int) -> dict[str, Any]:
        """What `<<` brings in; keys that are written out win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise ToolkitError(f"{self.path} merges something that is no block of keys")
            found = self.value(source, key, depth + 1)
            merged = found | merged
        return merged


def _entry(key: str, key_node: yaml.Node, value_node: yaml.Node, *, flow: bool) -> Entry:
    return Entry(
        key=key,
        line=key_node.start_mark.line + 1,
        key_span=(key_node.start_mark.index, key_node.end_mark.index),
        value_span=(value_node.start_mark.index, _end(value_node)),
        flow=flow,
    )


def _end(node: yaml.Node) -> int:
    """Where the text of a value ends: a block's own end mark lies behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)

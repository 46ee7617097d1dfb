"""A configuration file as keys, values and the place of each, whatever it holds.

    >>> read_text("zero_optimization:\\n  stage: 2\\n", "mine.yaml").line("zero_optimization.stage")
    2

Nothing in a file is executed, and its size, depth and expanded aliases are bounded before anything is built.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.lint import json_places, yaml_places
from toolkit.lint.places import Entry, NotAConfiguration

ACCELERATE, DEEPSPEED, TRAINER = "accelerate", "deepspeed", "trainer"
SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file. Keys are dotted; an item of a list has its index as a key."""

    path: str
    text: str
    entries: dict[str, Entry]
    duplicates: tuple[Entry, ...]
    data: dict[str, Any]
    is_json: bool
    kind: str | None = None
    """`accelerate`, `deepspeed`, `trainer`, or None for something else."""
    named: dict[str, Document] = field(default_factory=dict)
    """Key to the DeepSpeed JSON that it names, where that file was found."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default where there is none, or no mapping on the way."""
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def block(self, key: str) -> dict[str, Any]:
        """A nested mapping, empty where it is absent or something else."""
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    def line(self, key: str) -> int | None:
        """Where a key stands, 1-based; a key that is absent has no line."""
        entry = self.entries.get(key)
        return entry.line if entry else None


_ABSENT = object()


def read_document(path: Path) -> Document:
    """Read a file that may hold anything; its kind is not decided here.

    Raises ToolkitError for a file that is missing, too large, not text, not YAML or JSON, or no mapping.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ToolkitError(
                f"{path} has {path.stat().st_size:,} bytes, more than the 1 MiB of any configuration",
                hint="name the configuration, not the data",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ToolkitError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise ToolkitError(f"{path} cannot be read: {error}") from None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ToolkitError(f"{path} is not UTF-8 text: byte {error.start}") from None
    return read_text(text, str(path))


def read_text(text: str, path: str) -> Document:
    """Text as a document; the suffix of `path` says whether it is JSON."""
    is_json = path.endswith(".json")
    reader = json_places if is_json else yaml_places
    data, entries, duplicates = reader.read(text, path)
    if not isinstance(data, dict):
        raise NotAConfiguration(f"{path} holds {type(data).__name__}, expected keys and values")
    return Document(path=path, text=text, entries=entries, duplicates=tuple(duplicates), data=data, is_json=is_json)


def with_kind(document: Document, kind: str | None) -> Document:
    """The same document, recognised."""
    return dataclasses.replace(document, kind=kind)

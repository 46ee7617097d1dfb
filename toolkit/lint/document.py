"""A configuration file as a document: its keys, values and their lines, and the library that reads it.

>>> document = read_text("zero_optimization:\\n  stage: 2\\n", "mine.yaml")
>>> document.kind, document.get("zero_optimization.stage"), document.line("zero_optimization.stage")
('deepspeed', 2, 2)
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Generator, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.convert.programs import program_of
from toolkit.errors import ToolkitError, nearest
from toolkit.files import documents
from toolkit.files.documents import (
    CONFIGURATION,
    LOADER,
    MAX_YAML_BYTES,
    YAML_TAG,
    check_values,
    check_yaml,
    not_yaml,
    parse_json,
)
from toolkit.files.paths import is_file
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.job_script import EMPTY_SCRIPT, SCRIPT_SUFFIXES, JobScript, read_script
from toolkit.lint.removed_keys import DEEPSPEED_REMOVED, TRAINING_ARGUMENTS_REMOVED
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS

ACCELERATE, DEEPSPEED, TRAINER, AXOLOTL = "accelerate", "deepspeed", "trainer", "axolotl"
SCRIPTS = SBATCH, SHELL, SKYPILOT = "sbatch", "shell", "skypilot"
SUFFIXES = (".yaml", ".yml", ".json")
LINTED_SUFFIXES = (*SUFFIXES, *SCRIPT_SUFFIXES)  # of the files that are read in a folder
MAX_PATH_LENGTH = 1024

_ABSENT = object()


class NotAConfiguration(ToolkitError):
    """A file that no library would read as a configuration: a list, a single value, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPosition:
    """Where a key and its value are in a text; spans are character offsets, end exclusive."""

    key: str  # dotted, as `zero_optimization.stage`; an item of a list has its index as a key
    line: int  # 1-based
    key_span: tuple[int, int]
    value_span: tuple[int, int]
    in_braces: bool  # inside YAML flow braces or JSON, where entries are separated by commas
    repeated: bool = False  # an entry before it in the same block has the same key
    dotted: bool = False  # a key at the top level whose own name has a dot


@dataclass(frozen=True, kw_only=True)
class Document:
    """One configuration file. Keys are dotted; an item of a list has its index as a key."""

    path: str
    text: str
    kind: str | None  # `accelerate`, `deepspeed`, `trainer`, `sbatch`, `shell`, `skypilot`, `axolotl`, or None
    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, KeyPosition] = field(default_factory=dict)
    repeated: tuple[KeyPosition, ...] = ()  # keys that repeat one in the same block
    dotted_lines: dict[str, int] = field(default_factory=dict)  # of keys at the top level with a dot in their names
    is_json: bool = False
    deepspeed_json: Document | None = None  # the DeepSpeed JSON that this file names, where it was found, or has itself
    script: JobScript = EMPTY_SCRIPT  # the shell script that this file is or has

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or the default where the key is absent."""
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Return True where a dotted key is present, whatever its value."""
        return self.get(key, _ABSENT) is not _ABSENT

    def block(self, key: str) -> dict[str, Any]:
        """Return a nested mapping; empty where it is absent or something else."""
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    def line(self, key: str) -> int | None:
        """Return the 1-based line of a key, or None where it is absent."""
        position = self.positions.get(key)
        return position.line if position else None


# -- reading


def load_document(path: Path) -> Document:
    """Read a file, recognise its kind, and read the DeepSpeed JSON that it names.

    Raises ToolkitError for a file that is missing, too large, not text, not YAML or JSON, or not a mapping.
    """
    return with_deepspeed_json(_read_file(path))


def with_deepspeed_json(document: Document) -> Document:
    """Return the document with the DeepSpeed JSON that it names, where that file exists, or that it has itself."""
    value, position = document.get(key := deepspeed_files(document)[0]), document.positions.get(key)
    if position is not None and isinstance(value, str) and value.startswith("{"):  # as a block on the lines below
        lines = document.text.count("\n", 0, position.value_span[0]) + (document.text[position.value_span[0]] in "|>")
        inner = read_text("\n" * lines + value, document.path, is_json=True)
        return replace(document, deepspeed_json=replace(inner, kind=DEEPSPEED, is_json=False))
    named = next((path for path in deepspeed_files(document)[1] if is_file(path)), None)
    if document.kind in (None, DEEPSPEED) or named is None or named.suffix != ".json":
        return document
    return replace(document, deepspeed_json=replace(_read_file(named), kind=DEEPSPEED))


def _read_file(path: Path) -> Document:
    return read_text(documents.read_text(path, max_bytes=MAX_YAML_BYTES), str(path))


def read_text(text: str, path: str, *, is_json: bool = False) -> Document:
    """Parse a text; the suffix of `path` decides between a script, JSON and YAML, the keys decide its kind."""
    if path.endswith(SCRIPT_SUFFIXES) or (text.startswith("#!") and not path.endswith(SUFFIXES)):
        script = read_script(text)
        # Without sbatch's directives it is a script of training only if it starts a launcher.
        kind = SBATCH if script.directives else SHELL if script.launches else None
        return Document(path=path, text=text, kind=kind, script=script)
    is_json = is_json or path.endswith(".json")
    data, found = (_parse_json if is_json else _parse_yaml)(text, path)
    if not isinstance(data, dict):
        raise NotAConfiguration(f"{path} contains {type(data).__name__}, expected keys and values")
    kind, positions = detect_kind(data), {position.key: position for position in found if not position.dotted}
    return Document(
        path=path,
        text=text,
        data=data,
        positions=positions,
        repeated=tuple(position for position in found if position.repeated),
        dotted_lines={position.key: position.line for position in found if position.dotted},
        is_json=is_json,
        kind=kind,
        script=_task_script(text, data, positions) if kind == SKYPILOT else EMPTY_SCRIPT,
    )


def _task_script(text: str, data: dict[str, Any], positions: dict[str, KeyPosition]) -> JobScript:
    """The commands of a SkyPilot task; those of a block begin on the line after its mark."""
    start = positions["run"].value_span[0]
    line = text.count("\n", 0, start) + (2 if text[start] in "|>" else 1)
    nodes = data.get("num_nodes")
    return read_script(data["run"], first_line=line, nodes=nodes if isinstance(nodes, int) else 1)


# -- the position of each key


def _parse_yaml(text: str, path: str) -> tuple[Any, list[KeyPosition]]:
    """Parse YAML without executing anything. A date stays text, every key is text, and an infinity is a value."""
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
    return data, found


def _parse_json(text: str, path: str) -> tuple[Any, list[KeyPosition]]:
    data = parse_json(text, path, limits=CONFIGURATION, allow_nan=True)
    try:
        return data, list(_json_positions(text))
    except RecursionError:  # in a value that a repeated key replaces, which is not among those that were checked
        CONFIGURATION.check(path, values=0, depth=CONFIGURATION.depth + 1)
        raise


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
                dotted=not key and "." in key_node.value,
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

    def after_space(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    def value(start: int, key: str) -> Generator[KeyPosition, None, int]:
        """Yield the positions in the value that begins at an offset, and return where it ends."""
        if text[start] not in "{[":
            return _DECODER.raw_decode(text, start)[1]
        prefix, index, at = f"{key}." if key else "", 0, after_space(start + 1)
        names: set[str] = set()
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
                    repeated=name in names,
                    dotted=not key and "." in name,
                )
                names.add(name)
            index, at = index + 1, after_space(end)
            at = after_space(at + 1) if text[at] == "," else at
        return at + 1

    yield from value(after_space(0), "")


# -- the DeepSpeed JSON that a YAML names


def deepspeed_files(document: Document) -> tuple[str, list[Path]]:
    """Return the key that names the DeepSpeed JSON, and where that file may be; no path where none is named.

    The first is relative to the working directory, as the libraries resolve it. The others are relative to the YAML's
    folder and its parent, where its author may have meant it.
    """
    key = "deepspeed_config.deepspeed_config_file" if document.has("deepspeed_config") else "deepspeed"
    named = document.get(key)
    if not isinstance(named, str) or named in ("", "none") or named.startswith("{"):
        return key, []
    if len(named) > MAX_PATH_LENGTH or "\0" in named or documents.settings_for_path(named, document.path):
        return key, []
    folder = Path(document.path).absolute().parent
    return key, [Path(named), folder / named, folder.parent / named, folder / Path(named).name]


# -- the kind of a file

# Keys of other programs' formats that share key names with `TrainingArguments`.
FOREIGN_KEYS = {"base_model", "snr_results"}
PROGRAM_KINDS = {"axolotl": AXOLOTL, **dict.fromkeys(("trl", "llama-factory", "ms-swift"), TRAINER)}
# Keys that several libraries have, which decide nothing unless their value has the shape of one library's.
SHARED_KEYS = {
    *("debug", "use_cpu", "fsdp_config", "parallelism_config", "bf16", "fp16", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "compile", "checkpoint", "pipeline", "commands"),
}
# Keys that a SkyPilot task has beside `run`.
SKYPILOT_KEYS = {"num_nodes", "resources", "file_mounts"}
# Keys that only one library has, each enough to decide.
DECISIVE_KEYS = {
    ACCELERATE: {"distributed_type", "compute_environment", "deepspeed_config", "main_training_function"},
    DEEPSPEED: {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
}


def detect_kind(data: dict[str, Any]) -> str | None:
    """Return the program that reads these keys: `accelerate`, `deepspeed`, `trainer`, `skypilot`, or None for another.

    >>> detect_kind({"zero_optimization": {"stage": 2}})
    'deepspeed'
    """
    keys = set(data)
    if isinstance(data.get("run"), str) and keys & SKYPILOT_KEYS:
        return SKYPILOT
    for kind, decisive in DECISIVE_KEYS.items():
        if keys & decisive:
            return kind
    program = program_of(data)
    if program is not None or keys & FOREIGN_KEYS:
        return PROGRAM_KINDS.get(str(program))
    known_keys: dict[str, Set[str]] = {
        ACCELERATE: ACCELERATE_BLOCKS[""].keys(),
        DEEPSPEED: DEEPSPEED_BLOCKS[""].keys() | set(DEEPSPEED_REMOVED),
        TRAINER: trainer_argument_names() | set(TRAINING_ARGUMENTS_REMOVED),
    }
    counts = {kind: len((keys & known) - SHARED_KEYS) for kind, known in known_keys.items()}
    best = max(counts, key=lambda kind: counts[kind])
    if counts[best]:
        return best
    for kind, decisive in () if (by_value := _kind_by_value(data)) else DECISIVE_KEYS.items():
        if any(nearest(key, decisive, cutoff=0.85) for key in sorted(keys)[:50]):
            return kind
    return by_value


def _kind_by_value(data: dict[str, Any]) -> str | None:
    """Decide by the shape of a value whose key several libraries have."""
    if any(isinstance(data.get(key), dict) for key in ("bf16", "fp16", "optimizer", "scheduler")):
        return DEEPSPEED
    blocks = [data[key] for key in ("fsdp_config", "parallelism_config") if isinstance(data.get(key), dict)]
    if any(key.startswith(("fsdp_", "parallelism_config_")) for block in blocks for key in block):
        return ACCELERATE
    return TRAINER if set(data) & trainer_argument_names() else None

"""The keys of a preset's files and the type of each value, checked once when a preset is loaded.

>>> ACCELERATE_BLOCKS["fsdp_config"]["fsdp_offload_params"].expected
'true or false'

accelerate 1.15 rejects an unknown top-level key but silently accepts an unknown nested one; DeepSpeed 0.19 silently
accepts an unknown top-level key (its blocks are strict). What passes here can be read without a guard: by the planner,
the launcher, accelerate and DeepSpeed. `tests/presets/test_known_keys.py` compares keys and types with those of the
installed libraries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean, shown
from toolkit.files.documents import read_table, unexpected
from toolkit.parallel.layout import DIMENSIONS

AUTO = "auto"
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu", "nvme")
MAX_TEXT = 4096
FP8_HINT = "presets have no `fp8`: `toolkit plan --fp8` plans torchao's beside a bf16 preset"


@dataclass(frozen=True, slots=True)
class ValueType:
    """A kind of value: how a message calls the values that it accepts, and which they are."""

    expected: str
    accepts: Callable[[Any], bool]
    hint: str | None = None


def _is_whole(value: Any) -> bool:
    """Return True for 5 and for 5e8, which JSON and YAML read as a float."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def one_of(*choices: object) -> ValueType:
    """Return the type of a value that is one of a few, of the same type as that one."""
    words = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
    return ValueType(words, lambda value: any(type(value) is type(each) and value == each for each in choices))


KINDS = {
    "switch": ValueType("true or false", lambda value: type(value) is bool, "without quotes"),
    "text": ValueType("text in one line", _is_text, "put a number or a word like `no` in quotes"),
    "settings": ValueType(
        "text: a path, or JSON", lambda each: isinstance(each, str) and _is_text(each.replace("\n", ""))
    ),
    "count": ValueType("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0),
    "degree": ValueType("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1),
    "whole": ValueType("a whole number", _is_whole),
    "list": ValueType("a list", lambda value: isinstance(value, list)),
    "string": ValueType("text", lambda value: isinstance(value, str)),
    "number": ValueType("a number of 0 or more", lambda each: type(each) in (int, float) and float(each) >= 0),
    "block": ValueType("keys and values", lambda value: isinstance(value, dict)),
    "nothing": ValueType("nothing: no preset uses it", lambda value: not value, "remove the key"),
    "anything": ValueType("a value that DeepSpeed checks", lambda _: True),
    "stage": ValueType("0, 1, 2 or 3", lambda value: type(value) in (int, float) and value in STAGES),
    "reshard": ValueType(
        "true or false under FSDP2", lambda value: type(value) is bool, "true is full_shard, false is shard_grad_op"
    ),
    "parallel": ValueType(
        f"a list of {', '.join(DIMENSIONS)}",
        lambda value: isinstance(value, list) and all(each in DIMENSIONS for each in value),
    ),
    "device": one_of(*OFFLOAD_DEVICES),
    "stage number": one_of(*STAGES),
    "precision": ValueType("no, fp16 or bf16", ("no", "fp16", "bf16").__contains__, FP8_HINT),
    "null": ValueType("null", lambda value: value is None),  # the library's default
    "auto": ValueType('"auto"', lambda value: value == AUTO),  # the Trainer fills it in, or DeepSpeed has a default
    "machine": one_of("LOCAL_MACHINE"),
    "wrap policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "state dict": one_of("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
    "fsdp version": one_of(2, 1, "2", "1"),
}
"""Types by their names in `known_keys.yaml`, which joins some with `or`."""
BLOCK, NOTHING, RESHARD, STAGE = (KINDS[name] for name in ("block", "nothing", "reshard", "stage"))
Types = Mapping[str, ValueType]


def _kind(words: str) -> ValueType:
    name, *others = words.split(" or ")
    kind = KINDS[name]
    for other in others:  # each after the first adds the values that it accepts
        kind = _either(kind, KINDS[other], is_null=other == "null")
    return kind


def _either(first: ValueType, second: ValueType, *, is_null: bool) -> ValueType:
    expected, hint = (first.expected, first.hint) if is_null else (f"{first.expected}, or {second.expected}", None)
    return ValueType(expected, lambda value: first.accepts(value) or second.accepts(value), hint)


def _read_blocks() -> dict[str, dict[str, Types]]:
    return {
        program: {
            block: {key: kind for words, keys in table.items() for kind in [_kind(words)] for key in keys.split()}
            for block, table in blocks.items()
        }
        for program, blocks in read_table(__file__).items()
    }


ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS = _read_blocks().values()  # dotted name of a block -> key -> type


def check_keys_and_values(config: Mapping[str, Any], blocks: Mapping[str, Types], path: Path) -> None:
    """Raise ToolkitError for an unknown key, and for a value of another type than its key has."""
    found = {block: _block(config, block, path) for block in blocks}
    for block, values in found.items():
        known, where = blocks[block], block or "the top level"
        for key in map(str, values):
            if key not in known:
                examples = f"remove it; {where} has keys like {', '.join(sorted(known)[:8])}"
                what = f"{path}: unknown key {shown(key)} in {where}; engines silently ignore such a key"
                raise ToolkitError(what, hint=did_you_mean(key[:200], known, otherwise=examples))
    for block, values in found.items():
        for key, kind in blocks[block].items():
            if key in values and not kind.accepts(values[key]):
                name = f"{block}.{key}" if block else key
                raise unexpected(path, name, values[key], kind.expected, hint=kind.hint)


def _block(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    """Return a block by its dotted name; empty where it, or a block around it, is absent or null."""
    for part in name.split(".") if name else ():
        value = config.get(part)
        if value is not None and not isinstance(value, Mapping):
            raise unexpected(path, name, value, "keys and values")
        config = value or {}
    return config

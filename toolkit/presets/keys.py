"""Refuse a preset with a key that nothing reads: it would silently do something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.keys import (
    ACCELERATE_KEYS,
    DEEPSPEED_BLOCK_KEYS,
    DEEPSPEED_KEYS,
    FSDP_KEYS,
    OFFLOAD_KEYS,
    PARALLELISM_KEYS,
    ZERO_KEYS,
)


def refuse_unknown(found: object, known: frozenset[str], *, block: str, path: Path) -> None:
    """Raise for the first key that is in no list, with the nearest known one; a block that is absent has none."""
    if found is not None and not isinstance(found, Mapping):
        raise ToolkitError(f"{path}: {block} is {found!r}, expected keys and values")
    for key in map(str, found or ()):
        if key not in known:
            raise ToolkitError(
                f"{path}: unknown key {key!r} in {block}; engines ignore such a key without a word",
                hint=did_you_mean(key, known, otherwise=f"known keys: {', '.join(sorted(known))}"),
            )


def check_accelerate_keys(config: Mapping[str, Any], path: Path) -> None:
    """Every key of an accelerate YAML, nested blocks included."""
    refuse_unknown(config, ACCELERATE_KEYS, block="the top level", path=path)
    blocks = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": DEEPSPEED_BLOCK_KEYS,
        "parallelism_config": PARALLELISM_KEYS,
    }
    for block, known in blocks.items():
        refuse_unknown(config.get(block), known, block=block, path=path)


def check_deepspeed_keys(config: Mapping[str, Any], path: Path) -> None:
    """Every key of a DeepSpeed JSON that decides what is sharded, offloaded or computed."""
    refuse_unknown(config, DEEPSPEED_KEYS, block="the top level", path=path)
    refuse_unknown(config.get("zero_optimization"), ZERO_KEYS, block="zero_optimization", path=path)
    zero = config.get("zero_optimization") or {}
    for block, known in OFFLOAD_KEYS.items():
        refuse_unknown(zero.get(block), known, block=f"zero_optimization.{block}", path=path)

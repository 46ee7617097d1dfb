"""The keys that accelerate 1.15 and DeepSpeed 0.19 understand, and the check of a preset's files against them.

>>> "fsdp_version" in FSDP_KEYS
True

accelerate rejects an unknown top-level key but silently accepts an unknown nested one; DeepSpeed silently accepts an
unknown top-level key (its `zero_optimization` block is strict). Keys that have a type are listed in
`toolkit.presets.value_types`; `tests/presets/test_known_keys.py` checks all against the installed libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.value_limits import shown, unexpected
from toolkit.presets.value_types import (
    ACCELERATE_TYPES,
    DEEPSPEED_BLOCK_TYPES,
    DEEPSPEED_TYPES,
    FSDP_TYPES,
    OFFLOAD_OPTIMIZER_TYPES,
    OFFLOAD_PARAM_TYPES,
    PARALLELISM_TYPES,
    ZERO_TYPES,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCELERATE_KEYS = frozenset(ACCELERATE_TYPES)
FSDP_KEYS = frozenset(FSDP_TYPES)
DEEPSPEED_BLOCK_KEYS = frozenset(DEEPSPEED_BLOCK_TYPES)
PARALLELISM_KEYS = frozenset(PARALLELISM_TYPES)
# Deprecated spellings (`cpu_offload`, ...) are left out: the toolkit reads only the current ones.
ZERO_KEYS = frozenset(ZERO_TYPES)
OFFLOAD_KEYS = {
    "offload_optimizer": frozenset(OFFLOAD_OPTIMIZER_TYPES),
    "offload_param": frozenset(OFFLOAD_PARAM_TYPES),
}
# Strict blocks too: `auto_cast` and the loss scale exist for fp16 only.
PRECISION_KEYS = {
    "bf16": _words(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update"
    ),
    "fp16": _words(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power"
        " loss_scale loss_scale_window min_loss_scale"
    ),
}
# Without the keys that DeepSpeed 0.19.8 removed and rejects (`elasticity`, `amp`, ...).
DEEPSPEED_KEYS = frozenset(DEEPSPEED_TYPES) | _words("""
    datastates_ckpt disable_python_gc expert_parallel gradient_allreduce_op log_level
    managed_gradient_accumulation vocabulary_size weight_quantization
""")


def check_accelerate_keys(config: Mapping[str, Any], path: Path) -> None:
    """Raise ToolkitError for an unknown key of an accelerate YAML, nested blocks included."""
    _check_keys(config, ACCELERATE_KEYS, block="the top level", path=path)
    blocks = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": DEEPSPEED_BLOCK_KEYS,
        "parallelism_config": PARALLELISM_KEYS,
    }
    for block, known in blocks.items():
        _check_keys(config.get(block), known, block=block, path=path)


def check_deepspeed_keys(config: Mapping[str, Any], path: Path) -> None:
    """Raise ToolkitError for an unknown key of a DeepSpeed JSON, at the top level or in `zero_optimization`."""
    _check_keys(config, DEEPSPEED_KEYS, block="the top level", path=path)
    _check_keys(config.get("zero_optimization"), ZERO_KEYS, block="zero_optimization", path=path)
    zero = config.get("zero_optimization") or {}
    for block, known in OFFLOAD_KEYS.items():
        _check_keys(zero.get(block), known, block=f"zero_optimization.{block}", path=path)


def _examples(known: frozenset[str]) -> str:
    return ", ".join(sorted(known)[:8])


def _check_keys(found: object, known: frozenset[str], *, block: str, path: Path) -> None:
    if found is not None and not isinstance(found, Mapping):
        raise unexpected(path, block, found, "keys and values")
    for key in map(str, found or ()):
        if key not in known:
            raise ToolkitError(
                f"{path}: unknown key {shown(key)} in {block}; engines silently ignore such a key",
                hint=did_you_mean(key[:200], known, otherwise=f"remove it; {block} has keys like {_examples(known)}"),
            )

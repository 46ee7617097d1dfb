"""Checks of a foreign `config.json` before a library builds a model from it: sizes, types, and code that it names.

transformers builds one module per layer, checks few values, and fetches an attention kernel that the file names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.value_limits import CONFIGURATION

# Key -> largest value, about ten times that of the largest published models; they are built before they are compared.
_LAYERS, _HEADS, _SIZE = 2_000, 100_000, 2**27
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), _HEADS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), _HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size", "head_dim", "max_position_embeddings"), _SIZE),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "n_positions", "moe_intermediate_size"), _SIZE),
}
# May be 0: a model without experts, or without a table of positions.
_MAY_BE_ZERO = {"n_shared_experts", "num_experts", "num_local_experts", "n_routed_experts", "max_position_embeddings"}
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration.

    Raises ToolkitError for a file that is not one, for a size that no model has, and for a kernel from the hub.
    """
    config = read_json_object(path, limits=CONFIGURATION, allow_nan=True)
    if not isinstance(config.get("model_type", ""), str):
        raise ToolkitError(f"{path}: model_type is {str(config['model_type'])[:80]!r}, expected a name such as `llama`")
    for key, value in _fields(config):
        if key in _LARGEST:
            for size in value if isinstance(value, list) else [value]:
                _check_size(path, key, size)
        elif key in _ATTENTION and "/" in str(value):
            raise ToolkitError(
                f"{path}: {key} is {str(value)[:80]!r}, which names code on the hub; nothing was loaded",
                hint="remove it, or name one of transformers' own: sdpa, eager, flash_attention_2",
            )
    return config


def _check_size(path: Path, key: str, size: Any) -> None:
    if size is None:
        return
    smallest = 0 if key in _MAY_BE_ZERO else 1
    if type(size) is not int or not smallest <= size <= _LARGEST[key]:
        raise ToolkitError(
            f"{path}: {key} is {repr(size)[:80]}, expected an integer from {smallest} to {_LARGEST[key]:,}",
            hint="use the config.json that is stored with the weights",
        )


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value, those of nested configurations too."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict) and key.endswith("config"):
            yield from _fields(value)

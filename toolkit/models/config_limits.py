"""Checks of a foreign `config.json` before a library builds a model from it: sizes, types, and code that it names.

transformers builds one module per layer, checks few values, and fetches an attention kernel that the file names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.value_limits import unexpected
from toolkit.units import MIB

# Word in a field's name -> largest value, about ten times that of the largest published models: anything above is a
# typing error, or an attempt to exhaust the memory of whoever builds the model.
_LARGEST = {"layer": 2_000, "head": 100_000, "expert": 100_000, "": 2**27}
_SIZES = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_attention_heads", "n_head"),
    *("n_heads", "num_heads", "num_key_value_heads", "num_local_experts", "num_experts", "n_routed_experts"),
    *("n_shared_experts", "hidden_size", "n_embd", "d_model", "vocab_size", "head_dim", "max_position_embeddings"),
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "n_positions", "moe_intermediate_size"),
)
# A quantized mixture of experts lists each of its layers, in a few MiB.
MAX_CONFIG_BYTES = 16 * MIB
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration.

    Raises ToolkitError for a file that is not one, for a size that no model has, and for a kernel from the hub.
    """
    # A field of a few architectures is infinite (Mamba's `time_step_limit`).
    config = read_json_object(path, max_bytes=MAX_CONFIG_BYTES, allow_nan=True)
    if not isinstance(config.get("model_type"), str | None):
        raise unexpected(path, "model_type", config["model_type"], "a name such as `llama`")
    for key, value in _fields(config):
        if key.endswith("_config") and not isinstance(value, dict | str | None):
            raise unexpected(path, key, value, "keys and values")
        if key in _SIZES:
            for size in value if isinstance(value, list) else [value]:  # a list has one for each layer
                if size is not None:
                    check_size(str(path), key, size)
        elif key in _ATTENTION and "/" in str(value):
            raise ToolkitError(
                f"{path}: {key} is {str(value)[:80]!r}, which names code on the hub; nothing was loaded",
                hint="remove it, or name one of transformers' own: sdpa, eager, flash_attention_2",
            )
    return config


def check_size(source: str, key: str, size: Any) -> None:
    """Raise ToolkitError for a size of a model that no model has; 0 is a part that the model is without."""
    largest = next(limit for word, limit in _LARGEST.items() if word in key)
    if type(size) is not int or not 0 <= size <= largest:
        hint = "use the config.json that is stored with the weights"
        raise unexpected(source, key, size, f"an integer from 0 to {largest:,}", hint=hint)


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value, those of nested configurations too."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict) and key.endswith("config"):
            yield from _fields(value)

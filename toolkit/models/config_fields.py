"""A model's `config.json`: checks before a library builds a model from it, and its fields, validated by name.

transformers builds one module per layer, checks few values, and fetches an attention kernel that the file names.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.documents import read_json_object, read_table, unexpected
from toolkit.units import MIB

CONFIG = "config.json"
MODEL_TYPES: dict[str, dict[str, str]] = read_table(__file__, "model_types")
MISSING = object()
# Word in a field's name -> largest value, about ten times that of the largest published models: anything above is a
# typing error, or an attempt to exhaust the memory of whoever builds the model.
_LARGEST = {"layer": 2_000, "head": 100_000, "expert": 100_000, "": 2**27}
_SIZES = {*MODEL_TYPES["sizes"]["fields"].split()}
# A quantized mixture of experts lists each of its layers, in a few MiB.
MAX_CONFIG_BYTES = 16 * MIB
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")


class ConfigFields:
    """The fields of one configuration; error messages name the file they came from."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def size(self, *names: str, default: Any = MISSING) -> int:
        """Return a positive integer under the first of the names that is present; null counts as missing.

        Raises ToolkitError for a missing field without a default, and for a value that cannot be a size.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is not None:
            value = self._checked(name, lambda value: type(value) is int and value >= 1, "an integer of 1 or more")
            check_size(self.source, name, value)
            return int(value)
        if default is not MISSING:
            return int(default)
        hint = did_you_mean(names[0], self.values, otherwise="use the config.json that is stored with the weights")
        raise ToolkitError(f"{self.source} has no {' or '.join(f'`{name}`' for name in names)}", hint=hint)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean field. Raises ToolkitError for any other type, as the methods below do."""
        return bool(self._checked(name, lambda value: isinstance(value, bool), "true or false", default))

    def fraction(self, name: str, *, default: float) -> float:
        """Return a number from 0 to 1."""
        expected = "a number from 0 to 1"
        return float(self._checked(name, lambda x: type(x) in (int, float) and 0 <= x <= 1, expected, default))

    def text(self, *names: str, default: str) -> str:
        """Return the text under the first of the names that is present."""
        name = next((name for name in names if self.values.get(name)), names[0])
        return str(self._checked(name, lambda value: isinstance(value, str), "text") or default)

    def items(self, name: str, kind: type[int] | type[str]) -> list[Any] | None:
        """Return a list of integers or of texts, or None where it is missing."""

        def is_list(value: Any) -> bool:
            return isinstance(value, list) and all(type(each) is kind for each in value)

        expected = f"a list of {'whole numbers' if kind is int else 'names'}"
        items: list[Any] | None = self._checked(name, is_list, expected)
        return items

    def _checked(self, name: str, is_valid: Callable[[Any], bool], expected: str, default: Any = None) -> Any:
        value = self.values.get(name)
        if value is not None and not is_valid(value):
            raise unexpected(self.source, name, value, expected)
        return default if value is None else value

    def kv_heads(self, heads: int, *, default: int | None = None) -> int:
        """Return the number of key and value heads: as many as attention heads where nothing says otherwise."""
        kv_heads = self.size("num_key_value_heads", default=default or heads)
        if heads % kv_heads:
            raise ToolkitError(f"{self.source}: num_key_value_heads is {kv_heads}, expected a divisor of {heads} heads")
        return kv_heads

    def head_dim(self, hidden: int, heads: int, *, default: int | None = None) -> int:
        """Return the width of one attention head: the hidden size over the heads where nothing says otherwise."""
        if self.values.get("head_dim") is None and default is None and hidden % heads:
            raise ToolkitError(f"{self.source}: hidden_size {hidden} is not a multiple of {heads} num_attention_heads")
        return self.size("head_dim", default=default or hidden // heads)


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's configuration.

    Raises ToolkitError for a file that is not one, for a size that no model has, and for a kernel from the hub.
    """
    if path.suffix in (".yaml", ".yml"):
        hint = f"`toolkit plan --config {path}` plans the run of a configuration"
        raise ToolkitError(f"{path} is no model: a model is a config.json, a folder or a hub id", hint=hint)
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
            what = f"{path}: {key} is {str(value)[:80]!r}, which names code on the hub; nothing was loaded"
            raise ToolkitError(what, hint="remove it, or name one of transformers' own: sdpa, eager, flash_attention_2")
    return config


def check_size(source: str, key: str, size: Any) -> None:
    """Raise ToolkitError for a size of a model that no model has; 0 is a part that the model is without."""
    largest = next(limit for word, limit in _LARGEST.items() if word in key)
    if type(size) is not int or not 0 <= size <= largest:
        hint = "use the config.json that is stored with the weights"
        raise unexpected(source, key, size, f"an integer from 0 to {largest:,}", hint=hint)


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict) and key.endswith("config"):
            yield from _fields(value)

"""Fields of a model's `config.json`, validated by name.

>>> ConfigFields({"hidden_size": 64}, "config.json").size("hidden_size")
64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.files.value_limits import unexpected
from toolkit.models.config_limits import check_size

MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes that every decoder has."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


class ConfigFields:
    """The fields of one configuration; error messages name the file they came from."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def size(self, *names: str, default: Any = MISSING) -> int:
        """Return a positive integer under the first of the names that is present; null counts as missing.

        Raises ToolkitError for a missing field without a default, and for a value that cannot be a size.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is MISSING:
                raise self._missing(names)
            return int(default)
        value = self.values[name]
        if type(value) is not int or value < 1:
            raise unexpected(self.source, name, value, "an integer of 1 or more")
        check_size(self.source, name, value)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean field. Raises ToolkitError for any other type."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise unexpected(self.source, name, value, "true or false")
        return value

    def fraction(self, name: str, *, default: float) -> float:
        """Return a number from 0 to 1. Raises ToolkitError for anything else."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise unexpected(self.source, name, value, "a number from 0 to 1")
        return float(value)

    def text(self, *names: str, default: str) -> str:
        """Return the text under the first of the names that is present. Raises ToolkitError for any other type."""
        name = next((name for name in names if self.values.get(name)), None)
        if name is None:
            return default
        value = self.values[name]
        if not isinstance(value, str):
            raise unexpected(self.source, name, value, "text")
        return value

    def items(self, name: str, kind: type[int] | type[str]) -> list[Any] | None:
        """Return a list of integers or of texts, or None where it is missing. Raises ToolkitError for anything else."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise unexpected(self.source, name, value, f"a list of {'whole numbers' if kind is int else 'names'}")
        return value

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

    def _missing(self, names: tuple[str, ...]) -> ToolkitError:
        expected = " or ".join(f"`{name}`" for name in names)
        hint = did_you_mean(names[0], self.values, otherwise="use the config.json that is stored with the weights")
        return ToolkitError(f"{self.source} has no {expected}", hint=hint)

"""Fields of a `config.json`, each refused by name where it is missing or makes no sense.

>>> Fields({"hidden_size": 64}, "config.json").size("hidden_size")
64
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError, did_you_mean

# A thousand times what the largest published models have: more is a slip of the keyboard, not a model.
LARGEST = {"layers": 10_000, "heads": 100_000, "experts": 100_000, "": 2**30}
MISSING = object()


class Fields:
    """One configuration and where it came from."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def size(self, *names: str, default: Any = MISSING) -> int:
        """A positive integer under the first of the names that is there; a null counts as missing.

        Raises ToolkitError for a missing field without a default, and for what cannot be a size.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is MISSING:
                raise self._missing(names)
            return int(default)
        return self._sound(name, self.values[name])

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ToolkitError(f"{self.where}: {name} is {value!r}, expected true or false")
        return value

    def share(self, name: str, *, default: float) -> float:
        """A number from 0 to 1."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ToolkitError(f"{self.where}: {name} is {value!r}, expected a number from 0 to 1")
        return float(value)

    def word(self, *names: str, default: str) -> str:
        """A word under the first of the names that is there."""
        return next((str(self.values[name]) for name in names if self.values.get(name)), default)

    def _sound(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ToolkitError(f"{self.where}: {name} is {value!r}, expected an integer of 1 or more")
        largest = next(size for word, size in LARGEST.items() if word in name)
        if value > largest:
            raise ToolkitError(f"{self.where}: {name} is {value:,}, expected {largest:,} or less")
        return value

    def _missing(self, names: tuple[str, ...]) -> ToolkitError:
        asked = " or ".join(f"`{name}`" for name in names)
        hint = did_you_mean(names[0], self.values, otherwise="take the config.json that lies beside the weights")
        return ToolkitError(f"{self.where} has no {asked}", hint=hint)

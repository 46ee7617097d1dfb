"""Arguments of TRL, axolotl and LLaMA-Factory, in our words.

    >>> canonical_values({"base_model": "Qwen/Qwen3-8B", "train_on_inputs": "false"})
    {'model_name_or_path': 'Qwen/Qwen3-8B', 'loss_on': 'assistant'}

An argument is renamed only if it means exactly the same; for the others, `HINTS` says what to type instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Our name for an argument of another tool."""

    name: str
    values: Mapping[str, str] | None = None
    """Value of theirs, in lower case, to ours, where the argument takes only these; None: the value is the same."""
    is_list: bool = False
    """True if the value may be several names with commas between them, which are words of their own here."""


_TABLES: dict[str, Any] = read_table(__file__)
ALIASES = {word: Alias(**fields) for word, fields in _TABLES["aliases"].items()}
HINTS: dict[str, str] = _TABLES["hints"]  # what to type for an argument that means something else here, or nothing


def canonical_values(values: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Return a file's keys and values in our words. Raises ToolkitError for no counterpart, or for two names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        alias = ALIASES.get(name)
        ours = name if alias is None else alias.name
        if ours in found or (alias is not None and ours in values):
            raise ToolkitError(f"{where}{name} and {ours} are the same argument", hint=f"keep `{ours}`")
        found[ours] = value if alias is None or value is None else alias_value(name, alias, value)
    return found


def alias_value(name: str, alias: Alias, value: Any) -> Any:
    """Return the value of another tool's argument in our words. Raises ToolkitError for one without a counterpart."""
    if alias.is_list:
        names = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
        return ["all-linear" if part == "all" else part for part in names]
    ours = value if alias.values is None else alias.values.get(str(value).lower())
    if ours is None:
        hint = f"leave it out, or see `--{alias.name}` in `toolkit train -- --help`"
        raise ToolkitError(f"{name} {shown(value)} has no counterpart", hint=hint)
    return ours

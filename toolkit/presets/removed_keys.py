"""Keys that libraries have removed or renamed, and what to write instead: `removed_keys.yaml`.

`tests/lint/test_library_behaviour.py` checks that the installed libraries refuse them.
"""

from typing import Any

from toolkit.files.documents import read_table

_TABLES: dict[str, Any] = read_table(__file__)
DEEPSPEED_REMOVED: dict[str, str | None] = _TABLES["deepspeed_removed"]
ZERO_REMOVED: list[str] = _TABLES["zero_removed"]
ZERO_DEPRECATED: dict[str, str] = _TABLES["zero_deprecated"]
TRAINING_ARGUMENTS_RENAMED: dict[str, str] = _TABLES["training_arguments_renamed"]
TRAINING_ARGUMENTS_REMOVED: dict[str, str | None] = TRAINING_ARGUMENTS_RENAMED | _TABLES["training_arguments_removed"]
TRAINING_ARGUMENTS_REMOVED_IN: dict[str, str] = _TABLES["training_arguments_removed_in"]
IMPORTS_REMOVED: dict[str, dict[str, list[str]]] = _TABLES["imports_removed"]
TRAINING_ARGUMENTS_DEPRECATED: dict[str, str] = _TABLES["training_arguments_deprecated"]
TRAINER_FSDP_KEYS = set(_TABLES["trainer_fsdp_keys"].split())


def _by_name(table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return what each name of a place stands for; the table has the names by what they stand for."""
    return {place: {name: new for new, names in row.items() for name in names.split()} for place, row in table.items()}


RENAMED_KEYS, MEANT_KEYS = _by_name(_TABLES["renamed_keys"]), _by_name(_TABLES["meant_keys"])

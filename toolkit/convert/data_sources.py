"""Data sets that a configuration names, as `--dataset` and the arguments next to it.

set_datasets(draft, [NamedData(path="rows.jsonl", keys=("datasets[0].path",))])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.convert.conversion import Draft
from toolkit.data.data_files import DATASET_CARD, SUFFIXES, is_hub_id
from toolkit.data.formats import SHAREGPT_ROLES
from toolkit.files.reading import is_file

OTHER_SUFFIXES = (".arrow", ".gz", ".txt", ".zip", ".zst")  # `data/pages.txt` would read as a hub id


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedData:
    """One data set: a file or a hub id, and the settings that named it."""

    path: str
    keys: tuple[str, ...]
    split: tuple[Any, str] = (None, "")
    """The split, where one is named, and the key that names it."""
    config: tuple[Any, str] = (None, "")
    """The configuration's name on the hub, where one is named, and the key that names it."""
    weight: float | None = None
    weight_keys: tuple[str, ...] = field(default=())


def named_data(settings: Mapping[str, Any], prefix: str) -> NamedData:
    """Return the data set of an entry with the arguments of `datasets.load_dataset`, as TRL and axolotl have them."""
    path, files = str(settings.get("path", "")), settings.get("data_files")
    keys: tuple[str, ...] = (f"{prefix}path",)
    if path in ("json", "csv", "parquet") and isinstance(files, (str, list)) and files:
        path, keys = str(files[0] if isinstance(files, list) else files), (f"{prefix}path", f"{prefix}data_files")
    split, config = (settings.get("split"), f"{prefix}split"), (settings.get("name"), f"{prefix}name")
    return NamedData(path=path, keys=keys, split=split, config=config)


def set_datasets(
    draft: Draft, named: Sequence[NamedData], argument: str = "dataset", *, weights_note: str | None = None
) -> None:
    """Set `dataset` or `eval_dataset`, its split, and for several the weights, which mean different things."""
    usable = [data for data in named if _is_usable(draft, data)]
    if not usable:
        return
    paths = list(dict.fromkeys(data.path for data in usable))
    keys = tuple(key for data in usable for key in data.keys)
    if len(paths) > 1 and argument != "dataset":
        for data in usable[1:]:
            for key in data.keys:
                draft.leave_out(key, f"one {argument} is read")
        paths, keys = paths[:1], usable[0].keys
    draft.assign(argument, paths if len(paths) > 1 else paths[0], keys=keys)
    on_hub = all(is_hub_id(data.path) for data in usable)
    _set_same(draft, f"{argument}_split", [data.split for data in usable], on_hub=on_hub)
    _set_same(draft, f"{argument}_config", [data.config for data in usable], on_hub=True)
    weights = [data.weight for data in usable if data.weight is not None]
    if len(weights) == len(paths) > 1:
        keys = tuple(key for data in usable for key in data.weight_keys)
        draft.assign("dataset_weights", weights, keys=keys, note=weights_note)


def _is_usable(draft: Draft, data: NamedData) -> bool:
    suffix = Path(data.path).suffix.lower()
    is_copy = is_file(Path(data.path) / DATASET_CARD)
    if suffix in SUFFIXES or is_copy or (is_hub_id(data.path) and suffix not in OTHER_SUFFIXES):
        return True
    for key in data.keys:
        draft.report(key, data.path, f"not a data file ({', '.join(SUFFIXES)}), hub id or copy of a hub data set")
        draft.left.pop(key, None)
    return False


def _set_same(draft: Draft, argument: str, found: Sequence[tuple[Any, str]], *, on_hub: bool) -> None:
    """Set an argument that all data sets share, from values that are all the same."""
    given = [(str(value), key) for value, key in found if value is not None]
    values = {value for value, _ in given}
    keys = [key for _, key in given]
    if not given:
        return
    if argument == "dataset_split" and values == {"train"}:
        for key in keys:
            draft.drop(key)
    elif len(values) == 1 and len(given) == len(found) and on_hub:
        draft.assign(argument, values.pop(), keys=keys)
    else:
        for value, key in given:
            draft.left.pop(key, None)
            draft.report(key, value, f"`{argument}` is one name, for data of the hub")


def row_fields_reason(messages: str, role: str, content: str) -> str | None:
    """Return why conversations with these field names are not recognised, or None if they are."""
    if (messages, role, content) in (("messages", "role", "content"), ("conversations", "from", "value")):
        return None
    return (
        f"rows of `{messages}` with {role} and {content}: rename them to `messages` with role and content, or to"
        " `conversations` with from and value"
    )


def roles_are_known(roles: Any) -> bool:
    """Return True if a mapping of roles to their names in the data says what the formats say anyway."""
    if not isinstance(roles, dict):
        return False
    named = [(name, role) for role, names in roles.items() for name in (names if isinstance(names, list) else [names])]
    return all(SHAREGPT_ROLES.get(str(name)) == str(role) for name, role in named)

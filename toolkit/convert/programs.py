"""Programs whose files people have: which one a file is for, and the settings that it reads.

>>> program_of({"base_model": "a/b", "micro_batch_size": 1}), program_of({"output_dir": "out"})
('axolotl', None)
>>> program_schema("trl").replacement("max_seq_length"), program_schema("trl").replacement("num_train_epoch")
('max_length', 'num_train_epochs')

What each program reads was taken from its source once (`tests/scripts/write_program_schemas.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import nearest
from toolkit.files.documents import RECORDS, read_configuration, read_json_object
from toolkit.presets.known_keys import ACCELERATE_BLOCKS

TORCHTUNE, OPEN_INSTRUCT = "torchtune", "open-instruct"
# Settings of open-instruct alone; its scripts have dataclasses of their own, with many names of TRL's.
OPEN_INSTRUCT_KEYS = (
    *("cache_dataset_only", "checkpointing_steps", "dataset_mixer_list", "dataset_mixer_list_splits", "reduce_loss"),
    *("use_slow_tokenizer", "with_tracking"),
)
# Settings of a file that its program may not have, and their part: a script's own file has names of TRL's too.
MAX_UNKNOWN, UNKNOWN_PART = 3, 0.3
SIMILARITY = 0.85  # above which a setting is a misspelling: `num_train_epoch`


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSchema:
    """The settings of one version of a program; tables/programs.yaml says what each field is."""

    tool: str
    distribution: str
    version: str
    refusal: str
    markers: Collection[str]
    model: str | None = None  # the setting that names the model, without which a file is another script's
    fields: frozenset[str]
    commands: Mapping[str, Collection[str]] = field(default_factory=dict)  # to settings that only some of them have
    blocks: Mapping[str, Collection[str]] = field(default_factory=dict)
    renamed: Mapping[str, str | None] = field(default_factory=dict)
    former: Collection[str] = ()  # settings of older versions
    launcher: Collection[str] = ()
    scripts: Collection[str] = ()
    others: Collection[str] = ()
    transformers: Collection[str] = ()  # versions whose training arguments it has: the oldest and the newest

    @property
    def known(self) -> frozenset[str]:
        """Settings of this version and of others, of scripts that use it, and of its other formats."""
        return self.fields.union(self.renamed, self.former, self.scripts, self.others, self.markers)

    @property
    def named(self) -> str:
        """Name and version, for people."""
        return f"{self.tool} {self.version}"

    def unknown(self, values: Mapping[str, Any]) -> list[str]:
        """Return the settings that the program does not have; none where a file is in another format of it."""
        if not values.keys().isdisjoint(self.others):
            return []
        unknown = [key for key in values if key not in self.fields and not key.startswith(("_", "."))]
        for block, known in self.blocks.items():
            keys = values[block] if isinstance(values.get(block), dict) else {}
            # Settings of FSDP1, which have no effect, are in many files; a prefix is stripped.
            unknown += [
                f"{block}.{key}"
                for key in map(str, keys)
                if key.removeprefix("fsdp_") not in known and self.replacement(f"{block}.{key}")
            ]
        return unknown

    def replacement(self, key: str) -> str | None:
        """Return the present name of a setting that the program does not have, or what to write instead."""
        block, _, name = key.rpartition(".")
        if key in self.renamed or len(name) > 100:
            return self.renamed.get(key)
        return nearest(name, self.blocks.get(block, self.fields), cutoff=SIMILARITY)

    def commands_of(self, values: Mapping[str, Any]) -> list[str]:
        """Return the commands that have the most of a file's settings."""
        counts = {command: len(set(values).intersection(names)) for command, names in self.commands.items()}
        return [command for command, count in counts.items() if count == max(counts.values())]

    def may_read(self, keys: frozenset[str]) -> bool:
        """Return True for a file with a marker of the program and most of its settings, or in another format of it."""
        if self.model not in (None, *keys) or keys.isdisjoint(self.markers):
            return False
        unknown = len(keys - self.known)
        return unknown <= max(MAX_UNKNOWN, UNKNOWN_PART * len(keys)) or not keys.isdisjoint(self.others)


@functools.cache
def program_schemas() -> Mapping[str, ProgramSchema]:
    """Return the schemas of all programs, by the word of `--from`."""
    folder = Path(__file__).parent
    tables = read_configuration(folder / "tables" / "programs.yaml")
    found = read_json_object(folder / "program_schemas.json", limits=RECORDS)
    schemas = {}
    for name, table in tables.items():
        schema = found[name]
        passed_on = (*table["launcher"], *ACCELERATE_BLOCKS[""]) if "launcher" in table else ()
        fields = frozenset(schema.pop("fields")).union(passed_on, *schema.get("commands", {}).values())
        schemas[name] = ProgramSchema(**table, **schema, fields=fields)
    return schemas


def program_schema(program: str) -> ProgramSchema:
    """Return the settings that a program reads."""
    return program_schemas()[program]


def program_of(values: Mapping[str, Any]) -> str | None:
    """Return the program that a file is for, by the word of `--from`, torchtune or open-instruct; None for another.

    Of those that may read it, the one that has the most of its settings.
    """
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        return TORCHTUNE
    keys = frozenset(values)
    if not keys.isdisjoint(OPEN_INSTRUCT_KEYS):
        return OPEN_INSTRUCT
    counts = {
        name: (len(keys & schema.known), len(keys.intersection(schema.markers)))
        for name, schema in program_schemas().items()
        if schema.may_read(keys)
    }
    best = [name for name, count in counts.items() if count == max(counts.values())]
    return best[0] if len(best) == 1 else None

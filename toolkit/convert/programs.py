"""Programs whose files people have: which one reads a file or a command line, and the settings that it has.

>>> program_of({"base_model": "a/b", "micro_batch_size": 1}), program_of({"output_dir": "out"})
('axolotl', None)
>>> reader_of({"output_dir": "out"}), reader_of({"output_dir": "out"}, script="llamafactory-cli train")
('transformers', 'llama-factory')
>>> program_schema("trl").replacement("max_seq_length"), program_schema("trl").replacement("num_train_epoch")
('max_length', 'num_train_epochs')

What each program reads was taken from its source once (`tests/scripts/write_program_schemas.py`).
"""

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import nearest
from toolkit.files.documents import RECORDS, read_configuration, read_json_object
from toolkit.job.argument_fields import ARGUMENTS
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets.known_keys import ACCELERATE_BLOCKS
from toolkit.presets.removed_keys import TRAINING_ARGUMENTS_REMOVED

TORCHTUNE, OPEN_INSTRUCT = "torchtune", "open-instruct"
# Settings of open-instruct alone; its scripts have dataclasses of their own, with many names of TRL's.
OPEN_INSTRUCT_KEYS = {
    *("cache_dataset_only", "dataset_mixer_list", "dataset_mixer_list_splits", "dataset_mix_dir", "reduce_loss"),
}
# Arguments of scripts without TrainingArguments. Of those that read a file, open-instruct's have the first three.
PARSER_KEYS = ("checkpointing_steps", "use_slow_tokenizer", "with_tracking")
OTHER_PARSER_KEYS = ("num_warmup_steps", "max_train_steps", "train_batch_size")
TOOLKIT = "toolkit"  # this one's own job files
A_SCRIPT = "a script with a parser of its own"
# Programs that bring fields of their own, or pin another version of transformers.
FOREIGN = ("llama-factory", "ms-swift", OPEN_INSTRUCT)
# Settings that TRL's files have, and few others: enough to say who reads Trainer arguments, not whose file it is.
TRL_KEYS = {
    *("dataset_name", "use_peft", "max_completion_length", "num_generations", "max_length", "load_in_4bit"),
    *("padding_free", "packing", "beta", "precompute_ref_log_probs", "assistant_only_loss"),
}
_EXAMPLE = re.compile(r"(?:^|/)run_(?:clm|mlm|glue|squad|qa|ner|summarization|translation|speech\w*|seq2seq\w*)\.py$")
# Settings of a file that its program may not have, and their part: a script's own file has names of TRL's too.
MAX_UNKNOWN, UNKNOWN_PART = 3, 0.3
SIMILARITY = 0.85  # above which a setting is a misspelling: `num_train_epoch`


def is_alike(name: str, other: str) -> bool:
    """Return True where each word of the shorter name is one of the other.

    >>> is_alike("micro_batch_sizes", "train_micro_batch_size"), is_alike("offload_pin_memory", "offload_nvme_path")
    (True, False)
    """
    words, others = sorted((name.split("_"), other.split("_")), key=len)
    return all(nearest(word, others, cutoff=0.7) for word in words) and (
        len(words) > 1 or nearest(name, [other], cutoff=0.8) is not None
    )


# Of a LoraConfig, in a file of its own.
PEFT_KEYS = {"r", "lora_r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type", "init_lora_weights"}
# Of LLaMA-Factory's format with `model`; beside `model_name_or_path` it is a script's own.
NEXT_TO_MODEL = frozenset(["train_dataset"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSchema:
    """The settings of one version of a program; tables/programs.yaml says what each field is."""

    tool: str
    distribution: str
    version: str
    refusal: str
    markers: Collection[str]
    decisive: Collection[str] = ()  # settings that no other program has, each enough to say who reads arguments
    model: str | None = None  # the setting that names the model, without which a file is another script's
    fields: frozenset[str]
    commands: Mapping[str, Collection[str]] = field(default_factory=dict)  # to settings that only some of them have
    blocks: Mapping[str, Collection[str]] = field(default_factory=dict)
    renamed: Mapping[str, str | None] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)  # settings of older versions, to the first without them
    lost: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # the same by command, where they differ
    words: Mapping[str, Collection[str]] = field(default_factory=dict)  # of settings that take no other text; `a_*`
    types: Mapping[str, str] = field(default_factory=dict)  # of settings that take nothing else: `float | int`
    numbers: Mapping[str, str] = field(default_factory=dict)  # `int` or `float`, of settings that take nothing else
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

    def strange(self, values: Mapping[str, Any]) -> list[str]:
        """Return the settings that no version read has, nor one with such a name: of a fork, or a script."""
        named = self.renamed.keys() | self.former.keys()
        return [key for key in self.unknown(values) if self.replacement(key) is None and key not in named]

    def replacement(self, key: str) -> str | None:
        """Return the present name of a setting that the program does not have, or what to write instead."""
        block, _, name = key.rpartition(".")
        if key in self.renamed or len(name) > 100:
            return self.renamed.get(key)
        known = frozenset(self.blocks.get(block, self.fields))
        if turned := _turned(known).get(frozenset(name.split("_"))) if "_" in name else None:
            return turned
        close = _nearest(name, known)
        return close if close and is_alike(name, close) else None

    def similar(self, key: str) -> str | None:
        """Return the setting whose name is that of an unknown one and more words; None where there are several."""
        longer = f"{key}_" if "_" in key else None  # `data` begins many
        found = [each for each in self.fields if each.endswith(f"_{key}") or (longer and each.startswith(longer))]
        return found[0] if len(found) == 1 else None

    def commands_of(self, values: Mapping[str, Any]) -> list[str]:
        """Return the commands that have the most of a file's settings."""
        counts = {command: len(set(values).intersection(names)) for command, names in self.commands.items()}
        return [command for command, count in counts.items() if count == max(counts.values())]

    def may_read(self, keys: frozenset[str]) -> bool:
        """Return True for a file with a marker of the program and most of its settings, or in another format of it."""
        if "model_name_or_path" in keys:
            keys -= NEXT_TO_MODEL
        if self.model not in (None, *keys) or keys.isdisjoint(self.markers):
            return False
        if self.tool == "axolotl" and "model_name_or_path" in keys and "base_model" not in keys:
            return False
        # A script's own file has one of them by chance: `base_model`, `stage`.
        is_sure = self.model or len(keys.intersection(self.markers)) > 1 or not keys.isdisjoint(self.decisive)
        most = max(MAX_UNKNOWN, UNKNOWN_PART * len(keys)) if is_sure else 0
        return len(keys - self.known) <= most or not keys.isdisjoint(self.others)


@functools.lru_cache(maxsize=32)
def _turned(known: frozenset[str]) -> dict[frozenset[str], str]:
    """Return each name by its words, which may stand in another order: `datasets_test`."""
    return {frozenset(name.split("_")): name for name in known if "_" in name}


@functools.lru_cache(maxsize=4096)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    return nearest(name, known, cutoff=SIMILARITY)


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
    if keys <= PEFT_KEYS or _is_hydras(values):
        return None
    if not keys.isdisjoint((*OPEN_INSTRUCT_KEYS, *PARSER_KEYS)):
        return OPEN_INSTRUCT
    counts = {
        name: (len(keys & schema.known), len(keys.intersection(schema.markers)))
        for name, schema in program_schemas().items()
        if schema.may_read(keys)
    }
    best = [name for name, count in counts.items() if count == max(counts.values())]
    return best[0] if len(best) == 1 else None


def _is_hydras(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("defaults"), list)  # of other files, which the script's own parser adds


def reader_of(values: Mapping[str, Any], *, script: str = "") -> str | None:
    """Return the program that reads Trainer arguments, in a file or behind a script's name; None where nothing says it.

    Where `program_of` knows none, the script's name, or a few settings, decide.

    >>> reader_of({"finetuning_type": "lora", "warmup_ratio": 0.1}), reader_of({"learning_rate": 1e-5})
    ('llama-factory', 'transformers')
    """
    if _is_hydras(values):
        return A_SCRIPT
    keys, name = frozenset(values), re.sub("[-_]", "", script.lower())
    if not script and {"model_name_or_path", "dataset"} <= keys <= ARGUMENTS.keys():
        return TOOLKIT
    for each in FOREIGN:
        decisive = OPEN_INSTRUCT_KEYS if each == OPEN_INSTRUCT else program_schema(each).decisive
        least = 2 if script and each == "ms-swift" and "swift" not in name else 1  # any script has a `train_type`
        if len(keys & {*decisive}) >= least or each.replace("-", "") in name:
            return each
    if script.startswith("swift "):
        return "ms-swift"
    if not script and (program := program_of(values)) in FOREIGN:
        return program
    if not keys.isdisjoint((*PARSER_KEYS, *OTHER_PARSER_KEYS)):
        return A_SCRIPT
    if script.startswith("trl ") or "trl/scripts/" in script or (not script and not keys.isdisjoint(TRL_KEYS)):
        return "trl"
    known = trainer_argument_names() | TRAINING_ARGUMENTS_REMOVED.keys()
    unknown = [key for key in keys if key not in known and not script]
    misspelt = len(unknown) < 4 and all(nearest(key[:100], known, cutoff=0.88) for key in unknown)
    return "transformers" if _EXAMPLE.search(script) or (not script and misspelt) else None

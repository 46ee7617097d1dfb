"""Rules that are conditions over a file's keys, as `conditions.yaml` lists them."""

import fnmatch
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.files.documents import read_table
from toolkit.lint.document import AXOLOTL, DEEPSPEED, TRAINER_EVIDENCE, Document
from toolkit.lint.findings import NOTE, LintRule, Match, rule
from toolkit.lint.rules import programs, settings
from toolkit.lint.rules.settings import as_bool, as_enum, as_float, as_int, shorten
from toolkit.lint.rules.trainer import processes_of
from toolkit.presets.method_rules import rejects_save_only_model, survives_offload

# Values that no key of the file has by itself.
DPO_KEYS = ("beta", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model", "f_divergence_type")
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# A comment of the author.
WINS = re.compile(r"max_steps\b[^\n]*\n?[^\n]*#[^\n]*(?:overrid|epochs?\b|-1\b)", re.IGNORECASE)
DEGREES = ("tp", "cp", "sp", "dp_shard", "dp_replicate")
OF_SETTINGS = (
    *("is_without_rank", "is_ranked", "undefined_dataset", "uses_fsdp", "is_run_by_fsdp", "is_deepspeed", "is_preset"),
    *("saves", "trains_adapters", "changes_to_full", "is_alone", "is_trl", "is_grpo", "has_sharegpt"),
)
DERIVED: Mapping[str, Callable[[Document], Any]] = {
    **{name: getattr(settings, name) for name in OF_SETTINGS},
    **{f"{name}_size": functools.partial(settings.parallel_degree, name=name) for name in DEGREES},
    **{f"offload_{part}": functools.partial(settings.offload_device, part=part) for part in ("optimizer", "param")},
    **{f"{part}_path": functools.partial(settings.nvme_path, part=part) for part in ("optimizer", "param")},
    "last_machine": lambda doc: (as_int(doc.get("num_machines")) or 1) - 1,
    "fsdp_version": lambda doc: (
        doc.get("fsdp_version", settings.fsdp_setting(doc, "version", 1))
        if doc.kind == AXOLOTL
        else settings.fsdp_version(doc)
    ),
    "says_engine": lambda doc: doc.has("distributed_type"),
    "says_shards": lambda doc: doc.has("num_processes") or doc.has(settings.parallel_size_key("dp_shard")),
    "is_dpo": lambda doc: any(map(doc.has, DPO_KEYS)),
    "accelerator_file": lambda doc: isinstance(doc.get("accelerator_config"), str) or None,
    "survives_offload": lambda doc: survives_offload(str(doc.get("optim"))),
    "is_fsdp1": lambda doc: (
        (settings.uses_fsdp(doc) and as_int(settings.fsdp_setting(doc, "version", 2)) == 1)
        or (doc.launch_config is not None and settings.fsdp_version(doc.launch_config) == 1)
    ),
    "processes": processes_of,
    "command": lambda doc: doc.start.script if doc.start else None,
    "is_for_training": lambda doc: bool(doc.data.keys() & TRAINER_EVIDENCE),
    "may_skip_training": lambda doc: (
        doc.program == "llama-factory" or "do_train" in doc.source or doc.has("do_predict")
    ),
    "stores_floats": lambda doc: "FLOAT" in as_enum(doc.get("bnb_4bit_quant_storage")),
    "is_state_dict_refused": lambda doc: any(map(rejects_save_only_model, _settings_of_fsdp(doc, "state_dict_type"))),
    "is_recomputed_by_fsdp": lambda doc: any(map(as_bool, _settings_of_fsdp(doc, "activation_checkpointing"))),
    "is_sharded": lambda doc: (
        settings.uses_fsdp(doc)
        or bool(doc.get("deepspeed"))
        or (doc.launch_config is not None and settings.engine_of(doc.launch_config) in ("DEEPSPEED", "FSDP"))
    ),
    "is_json": lambda doc: doc.kind == DEEPSPEED,
    "recomputes": lambda doc: any(
        as_bool(value) or (as_int(value) or 0) > 0 for value in doc.block("activation_checkpointing").values()
    ),
    "recomputes_itself": lambda doc: (
        "gradient_checkpointing" in doc.reader_source
        or (doc.named_by is not None and bool(as_bool(doc.named_by.get("gradient_checkpointing"))))
    ),
    "has_json": lambda doc: doc.deepspeed_json is not None,
    "gets_batch_size": lambda doc: (
        any(settings.names_word(doc, word) for word in BATCH_SIZES) or "lightning" in doc.reader_source
    ),
    "has_trainer": lambda doc: settings.trainer_of(doc) is not None,
    "is_named": lambda doc: doc.named_by is not None,
    "is_command": lambda doc: doc.call is not None,
    "is_complete": lambda doc: doc.is_complete,
    "program": lambda doc: doc.program,
    "says_what_wins": lambda doc: bool(WINS.search((doc.command or doc).text)),
    "has_cpu_adam": lambda doc: "DeepSpeedCPUAdam" in doc.reader_source,
    "is_factory": lambda doc: doc.program == "llama-factory",
    "gpus": lambda doc: len(str(doc.get("gpu_ids")).split(",")) if doc.get("gpu_ids") not in (None, "all") else None,
    "zero_stage": settings.stage_of,
}


def _settings_of_fsdp(doc: Document, name: str) -> list[str]:
    """Return a setting of the arguments and of the launcher's configuration, of those that run FSDP, in capitals."""
    both = [each for each in (doc, doc.launch_config) if each is not None]
    runs = [each for each in both if settings.uses_fsdp(each) or settings.fsdp_version(each)]
    return [as_enum(settings.fsdp_setting(each, name)) for each in runs]


def _product(doc: Document, *names: str) -> int | None:
    """Return the product of the values of some keys; None where one of them is not a whole number."""
    values = [as_int(_value(doc, name)) for name in names]
    return None if None in values else math.prod(value for value in values if value is not None)


def _value(doc: Document, name: str) -> Any:
    """Return a value of the table by its name: `NAME|WORD` has a default, `A x B` is a product."""
    if " x " in name:
        return _product(doc, *name.split(" x "))
    key, _, default = name.partition("|")
    if key.startswith("json.") and doc.deepspeed_json is not None:  # a key of the DeepSpeed JSON that the file names
        return doc.deepspeed_json.get(key.removeprefix("json."), default or None)
    return DERIVED[key](doc) if key in DERIVED else doc.get(_key(doc, key), default or None)


def _key(doc: Document, name: str) -> str:
    """Return the dotted key that a name of the table stands for in a document."""
    block, _, rest = name.partition(".")
    known = {"fsdp": settings.fsdp_key, "stage3": settings.stage3_key}.get(block)
    return known(doc, rest) if known and rest else name


def _holds(doc: Document, name: str, wanted: Any) -> bool:
    value = _value(doc, name)
    if isinstance(wanted, bool):
        return as_bool(value) is wanted
    if isinstance(wanted, list):
        whole = as_int(value)
        return as_enum(value if whole is None else whole) in map(str, wanted)
    word, _, other = str(wanted).partition(" ")
    if word == "not":
        is_word = isinstance(value, str) and value not in ("", "None") and not settings.is_template(value)
        return is_word and not any(fnmatch.fnmatchcase(value, each) for each in other.split())
    if word == "rest":
        whole, divisor = as_int(value), _product(doc, *other.split())
        return bool(whole and divisor and whole % divisor)
    if word == "one_name":  # where only LLaMA-Factory splits at commas; an expression has other letters
        between = r"\w+(?:[ ]+\w+)+" if name == "lora_target" else r"\w+(?:[ ]*,[ ]*\w+)+"
        listed = value[0] if isinstance(value, list) and len(value) == 1 else value
        return re.fullmatch(between, str(listed)) is not None
    if word == "exponent":
        return isinstance(value, float) or re.fullmatch(r"[\d.]+[eE]\+?\d+", str(value)) is not None
    if other:
        actual, limit = as_float(value), as_float(other)
        if limit is None:  # the name of another value
            limit = as_float(_value(doc, other))
        return actual is not None and limit is not None and (actual > limit if word == "above" else actual < limit)
    is_empty = not value or value == "none"
    is_filled = not is_empty and not settings.is_template(value)
    said = {"off": not as_bool(value), "set": value is not None, "unset": value is None, "filled": is_filled}
    return said.get(word, is_empty)


def _check_of(table: Mapping[str, Any]) -> Callable[[Document], Iterator[Match]]:
    def check(doc: Document) -> Iterator[Match]:
        for case in table["cases"]:
            if all(_holds(doc, name, wanted) for name, wanted in case["if"].items()):
                key = _key(doc, case["at"])
                message = case["message"].replace("{value}", shorten(doc.get(key)))
                level = settings.level_for_trainer(doc) if table.get("only_of_trainer") else None
                level = NOTE if case.get("with_trainer") and settings.trainer_of(doc) is None else level
                is_part = doc.kind == AXOLOTL and not doc.has("base_model")  # to which others are added
                is_part |= doc.kind == AXOLOTL and programs.is_read_by_project(doc, "axolotl")
                level = NOTE if is_part else level
                level = level or case.get("level")
                remove, value = case.get("remove", False), None if level else case.get("value")
                since = case.get("since")
                yield Match(key, message, case["fix"], remove=remove, value=value, level=level, since=since)

    check.__doc__ = table["says"]
    return check


def _rules() -> Iterator[LintRule]:
    for name, table in read_table(__file__).items():
        yield rule(
            table["level"],
            *table["kinds"].split(),
            library=table["library"],
            fix=str(table["write"]),
            name=name,
            removed_in=table.get("since"),
            for_every_program=table.get("for_every_program", False),
        )(_check_of(table))


CONDITIONS = tuple(_rules())

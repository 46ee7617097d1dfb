"""Rules that are conditions over a file's keys, as `conditions.yaml` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.lint.document import DEEPSPEED, Document
from toolkit.lint.findings import NOTE, LintRule, Match, rule
from toolkit.lint.rules import settings
from toolkit.lint.rules.settings import as_bool, as_enum, as_float, as_int, shorten
from toolkit.presets.method_rules import rejects_save_only_model

# Values that no key of the file has by itself.
DERIVED: Mapping[str, Callable[[Document], Any]] = {
    "cp_size": lambda doc: settings.parallel_degree(doc, "cp"),
    "sp_size": lambda doc: settings.parallel_degree(doc, "sp"),
    "fsdp_version": settings.fsdp_version,
    "uses_fsdp": settings.uses_fsdp,
    "is_state_dict_refused": lambda doc: any(
        each
        and (settings.uses_fsdp(each) or settings.fsdp_version(each))
        and rejects_save_only_model(as_enum(settings.fsdp_setting(each, "state_dict_type")))
        for each in (doc, doc.launch_config)
    ),
    "is_sharded": lambda doc: (
        settings.uses_fsdp(doc) or bool(doc.get("deepspeed")) or settings.is_launched_sharded(doc)
    ),
    "is_deepspeed": settings.is_deepspeed,
    "is_preset": settings.is_preset,
    "is_json": lambda doc: doc.kind == DEEPSPEED,
    "recomputes": lambda doc: any(
        as_bool(value) or (as_int(value) or 0) > 0 for value in doc.block("activation_checkpointing").values()
    ),
    "has_json": lambda doc: doc.deepspeed_json is not None,
    "is_command": lambda doc: doc.call is not None,
    "is_complete": lambda doc: doc.is_complete,
    "program": lambda doc: doc.program,
    "is_trl": settings.is_trl,
    "is_grpo": settings.is_grpo,
    "gpus": lambda doc: len(str(doc.get("gpu_ids")).split(",")) if doc.get("gpu_ids") not in (None, "all") else None,
    "zero_stage": settings.stage_of,
    "offload_optimizer": lambda doc: settings.offload_device(doc, "optimizer"),
    "offload_param": lambda doc: settings.offload_device(doc, "param"),
    "optimizer_path": lambda doc: settings.nvme_path(doc, "optimizer"),
    "param_path": lambda doc: settings.nvme_path(doc, "param"),
}


def _key(doc: Document, name: str) -> str:
    """Return the dotted key that a name of the table stands for in a document."""
    block, _, rest = name.partition(".")
    known = {"fsdp": settings.fsdp_key, "stage3": settings.stage3_key}.get(block)
    return known(doc, rest) if known else name


def _holds(doc: Document, name: str, wanted: Any) -> bool:
    key, _, default = name.partition("|")
    value = DERIVED[key](doc) if key in DERIVED else doc.get(_key(doc, key), default or None)
    if isinstance(wanted, bool):
        return as_bool(value) is wanted
    if isinstance(wanted, list):
        whole = as_int(value)
        return as_enum(value if whole is None else whole) in map(str, wanted)
    word, _, number = str(wanted).partition(" ")
    if number:
        actual = as_float(value)
        return actual is not None and (actual > float(number) if word == "above" else actual < float(number))
    is_filled = bool(value) and value != "none"
    return {"off": not as_bool(value), "set": value is not None, "unset": value is None, "filled": is_filled}.get(
        word, not is_filled
    )


def _check_of(table: Mapping[str, Any]) -> Callable[[Document], Iterator[Match]]:
    def check(doc: Document) -> Iterator[Match]:
        for case in table["cases"]:
            if all(_holds(doc, name, wanted) for name, wanted in case["if"].items()):
                key = _key(doc, case["at"])
                message = case["message"].replace("{value}", shorten(doc.get(key)))
                level = settings.level_for_trainer(doc) if table.get("only_of_trainer") else None
                level = NOTE if case.get("with_trainer") and settings.trainer_of(doc) is None else level
                remove, value = case.get("remove", False), None if level else case.get("value")
                yield Match(key, message, case["fix"], remove=remove, value=value, level=level)

    check.__doc__ = table["says"]
    return check


def _rules() -> Iterator[LintRule]:
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        yield rule(
            table["level"],
            *table["kinds"].split(),
            library=table["library"],
            fix=str(table["write"]),
            name=name,
            for_every_program=table.get("for_every_program", False),
        )(_check_of(table))


CONDITIONS = tuple(_rules())

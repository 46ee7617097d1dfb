"""A dialect: what becomes of each setting of another tool, as a table (tables/*.yaml).

>>> trl = load_dialect("trl")
>>> trl.moved["gradient_checkpointing"], trl.reason("gpu_ids")
('activation_checkpointing', 'set CUDA_VISIBLE_DEVICES')
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.files.yaml_files import read_configuration
from toolkit.job.argument_aliases import HINTS
from toolkit.job.trainer_schema import trainer_argument_names

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The settings of one tool. A setting in a block or a list is named as `fsdp_config.offload_params`."""

    tool: str
    markers: tuple[str, ...] = ()
    """Settings that only this tool has, by which its files are recognised."""
    blocks: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    """Settings that mean the same under their own name here, or under the name in `toolkit.job.argument_aliases`."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Setting to the argument that takes its value."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Setting that is moved to what is different in meaning."""
    assigned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Switch to the argument and value that it sets; or setting to argument, and value of theirs to ours."""
    redundant: Mapping[str, Any] = field(default_factory=dict)
    """Setting to the values that say what happens here anyway, or `any`."""
    on_by_default: frozenset[str] = frozenset()
    """Switches that are on unless they are set."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Argument to what the tool does when its setting is absent, where that differs from ours."""
    default_notes: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Setting, its part after the last dot, or the start of names (`wandb_*`) to why it has no counterpart."""
    lora_config: Mapping[str, str] = field(default_factory=dict)
    """Setting to the field of peft's LoraConfig."""
    liger: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)

    def reason(self, key: str) -> str:
        """Return why a setting has no counterpart."""
        family = next(
            (why for name, why in self.reasons.items() if name[-1] == "*" and key.startswith(name[:-1])), None
        )
        last = key.rpartition(".")[2]
        return self.reasons.get(key) or self.reasons.get(last) or family or HINTS.get(key) or "no counterpart"


@functools.cache
def load_dialect(name: str) -> Dialect:
    """Return the table of a tool, with the reasons that all tools share."""
    table, common = _read(name), _read("common")
    known = set(table.pop("known"))
    if table.pop("has_training_arguments", False):
        known |= trainer_argument_names() - set(common["other_meaning"])
    reasons = fsdp_reasons() | _by_key(common["reasons"]) | _by_key(table.pop("reasons"))
    reasons |= {key: HINTS[hint] for key, hint in table.pop("hints", {}).items()}
    on_by_default = frozenset(table.pop("on_by_default"))
    return Dialect(**table, known=frozenset(known), on_by_default=on_by_default, reasons=reasons)


def fsdp_reasons() -> dict[str, str]:
    """Return settings of FSDP that no preset takes, by their names without `fsdp_`, and why."""
    return _by_key(_read("common")["fsdp_reasons"])


def fsdp_redundant() -> dict[str, Any]:
    """Return settings of FSDP to the value that says what the presets do anyway."""
    return dict(_read("common")["fsdp_redundant"])


def _read(name: str) -> dict[str, Any]:
    return read_configuration(TABLES / f"{name}.yaml")


def _by_key(reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys}

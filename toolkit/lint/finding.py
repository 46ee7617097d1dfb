"""What a rule finds, and the registry of rules.

>>> rule_names()[:1]
['unknown-key']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from toolkit.lint.document import Document

ERROR, WARNING, NOTE = "error", "warning", "note"

# The versions that the rules were checked with; a finding names its library's.
CHECKED = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
    "pyyaml": "6.0.3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A mechanical change of one entry; `rename` and `value` both None drop the entry."""

    key: str
    rename: str | None = None
    value: str | bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One place where a rule applies."""

    key: str
    """Dotted, as `zero_optimization.stage`; empty where a key is missing."""
    message: str
    """What happens in fact, with the values of this file."""
    fix: str
    """What to write instead."""
    edit: Edit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of `toolkit lint --json`."""

    file: str
    key: str
    line: int | None
    """1-based; None where the key is missing."""
    level: str
    rule: str
    message: str
    fix: str
    checked_against: str


Check = Callable[[Document], Iterable[Hit]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A named check; its docstring says what the library does."""

    name: str
    level: str
    kinds: tuple[str, ...]
    library: str
    fix: str
    check: Check
    removed_in: str | None = None
    """The library version that the rule begins with, for what was removed or changed in it."""

    @property
    def happens(self) -> str:
        return " ".join((inspect.getdoc(self.check) or "").split())

    @property
    def checked_against(self) -> str:
        return f"{self.library} {CHECKED[self.library]}"


RULES: list[Rule] = []


def rule(name: str, level: str, *kinds: str, library: str, fix: str, **more: Any) -> Callable[[Check], Check]:
    """Register a check; rules run in the order in which they are written."""

    def register(check: Check) -> Check:
        RULES.append(Rule(name=name, level=level, kinds=kinds, library=library, fix=fix, check=check, **more))
        return check

    return register


def rule_names() -> list[str]:
    """All rules, in order."""
    import toolkit.lint.rules  # noqa: F401  (registers them)

    return [each.name for each in RULES]

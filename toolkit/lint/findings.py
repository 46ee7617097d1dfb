"""Findings, and the rules that report them."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from toolkit.convert.programs import program_schemas
from toolkit.lint.document import Document
from toolkit.lint.named_files import LINT_TABLES

LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"

# The versions that the rules were checked with; a finding names its library's.
CHECKED_VERSIONS = {
    **LINT_TABLES["checked_versions"],
    **{schema.distribution: schema.version for schema in program_schemas().values()},
}
OLDEST_VERSIONS, RECENT_VERSIONS = LINT_TABLES["oldest_versions"], LINT_TABLES["recent_versions"]


@dataclass(frozen=True, slots=True)
class Match:
    """One place in a document where a rule applies; `rename`, `value` and `remove` are a fix without a decision."""

    key: str  # dotted, as `zero_optimization.stage`; empty where a top-level key is missing
    message: str  # what really happens, with the values of this file
    fix: str  # what to write instead
    _: KW_ONLY
    rename: str | None = None  # the key's new name
    value: str | bool | None = None  # the key's new value
    remove: bool = False
    line: int | None = None  # where the place is no key of the document: its line
    level: str | None = None  # where it is not the rule's
    since: str | None = None  # the version of the library in which it began, where that is not the rule's
    library: str | None = None  # which says so, where that is not the rule's

    @property
    def is_mechanical(self) -> bool:
        """True where the fix needs no decision."""
        return self.remove or self.rename is not None or self.value is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of `toolkit lint --json`."""

    file: str
    key: str
    line: int | None  # 1-based; None where the key is missing
    level: str
    rule: str
    message: str
    fix: str
    checked_against: str
    documentation: str  # address of the rule's description


Check = Callable[[Document], Iterable[Match]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LintRule:
    """A named check of one or more kinds of files; the docstring of `check` says what the library does."""

    name: str
    level: str
    kinds: tuple[str, ...]
    library: str
    fix: str
    check: Check
    removed_in: str | None = None  # for something that a library removed or changed: the version in which it did
    for_every_program: bool = False  # a rule of Trainer arguments that holds in every version and program

    @property
    def description(self) -> str:
        """What the library really does, in one or two sentences."""
        return " ".join((inspect.getdoc(self.check) or "").split())

    @property
    def checked_against(self) -> str:
        """The library and version that the rule was checked with, for example `accelerate 1.15.0`."""
        return f"{self.library} {CHECKED_VERSIONS[self.library]}"


def rule(level: str, *kinds: str, name: str | None = None, **more: Any) -> Callable[[Check], LintRule]:
    """Turn a check function into a LintRule of its name, with more of its fields; every rule that a module of `rules`
    defines is run."""

    def make(check: Check) -> LintRule:
        rule_name = name or check.__name__.replace("_", "-")
        return LintRule(name=rule_name, level=level, kinds=kinds, check=check, **more)

    return make

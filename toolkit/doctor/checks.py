"""A check of a node: what it looks at, its threshold with its source, what it measured, and what is wrong.

A check is a function named like the check; its docstring says what it looks at:

    @node_check(threshold="below 1 GiB (a container has 64 MiB by default)", source="https://...")
    def shared_memory(node: NodeReadings) -> Outcome: ...

The table in docs/how-to/doctor.md is generated from the registered checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.doctor.node_readings import NodeReadings, NotMeasured
from toolkit.errors import ToolkitError

ERROR, WARNING, NOTE = "error", "warning", "note"
LEVELS = (ERROR, WARNING, NOTE)
OK, SKIPPED = "ok", "skipped"
OWN_CHOICE = "our choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFinding:
    """One thing that is wrong with a node."""

    level: str
    """`error`: jobs fail or a part must be replaced; `warning`: slower, or fails in some jobs; `note`: good to know."""
    what: str
    value: str
    expected: str
    fix: str
    """The line to type, or what to ask for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check measured, and what is wrong with it."""

    measured: dict[str, Any]
    findings: list[NodeFinding] = field(default_factory=list)

    def add(self, level: str, what: str, *, value: object, expected: object, fix: str) -> None:
        """Add a finding."""
        self.findings.append(NodeFinding(level=level, what=what, value=str(value), expected=str(expected), fix=fix))

    def add_refusal(self, error: ToolkitError, *, level: str, value: object, expected: str) -> None:
        """Add the refusal of another part of the toolkit, with its hint as the fix."""
        self.add(level, error.message, value=value, expected=expected, fix=error.hint or "see above")


Examine = Callable[[NodeReadings], Outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """A registered check."""

    name: str
    looks_at: str
    threshold: str
    """When it is a finding."""
    source: str
    """Where the threshold comes from: an address, or `our choice` with the reason."""
    long: bool
    """Runs with `--long` only."""
    examine: Examine


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One row under `checks` in the JSON."""

    check: str
    status: str
    """The worst level of its findings, `ok`, or `skipped`."""
    seconds: float
    measured: dict[str, Any] = field(default_factory=dict)
    findings: tuple[NodeFinding, ...] = ()
    skipped: str | None = None
    """Why nothing was measured."""


CHECKS: dict[str, NodeCheck] = {}


def node_check(*, threshold: str, source: str, long: bool = False) -> Callable[[Examine], Examine]:
    """Register a function as the check of its name, with its docstring as what it looks at."""

    def register(examine: Examine) -> Examine:
        name = examine.__name__.replace("_", "-")
        assert name not in CHECKS, name
        looks_at = " ".join((examine.__doc__ or "").split()).removesuffix(".")
        CHECKS[name] = NodeCheck(
            name=name, looks_at=looks_at, threshold=threshold, source=source, long=long, examine=examine
        )
        return examine

    return register


def run_check(check: NodeCheck, node: NodeReadings) -> CheckResult:
    """Run one check. Whatever a broken node answers becomes a skipped check with the reason, never a traceback."""
    started = time.monotonic()
    outcome, skipped = Outcome({}), None
    try:
        outcome = check.examine(node)
    except NotMeasured as reason:
        skipped = str(reason)
    except (OSError, ToolkitError) as error:
        skipped = f"cannot be read: {error}"
    findings = sorted(outcome.findings, key=lambda finding: LEVELS.index(finding.level))
    return CheckResult(
        check=check.name,
        status=SKIPPED if skipped else findings[0].level if findings else OK,
        seconds=round(time.monotonic() - started, 3),
        measured=outcome.measured,
        findings=tuple(findings),
        skipped=skipped,
    )

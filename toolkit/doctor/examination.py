"""Run the checks of a node, in their order, and show what was found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.doctor import gpu_checks, host_checks, network_checks, software_checks, speed_checks, storage_checks
from toolkit.doctor.checks import CHECKS, ERROR, LEVELS, SKIPPED, CheckResult, NodeCheck, run_check
from toolkit.doctor.collectors import without_secrets
from toolkit.doctor.node_comparison import NodeFacts, node_facts
from toolkit.doctor.node_readings import NodeReadings
from toolkit.doctor.options import DoctorOptions
from toolkit.errors import ToolkitError
from toolkit.units import gib

LARGEST_PORT = 65_535
# Modules of checks, in the order in which they are shown.
MODULES = (gpu_checks, host_checks, network_checks, software_checks, speed_checks, storage_checks)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The result of `toolkit doctor`."""

    node_facts: NodeFacts
    checks: tuple[CheckResult, ...]

    @property
    def failed(self) -> bool:
        """True if a finding is an error."""
        return any(check.status == ERROR for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints: `findings`, `checks` and `node_facts`, without secrets."""
        findings = [
            {"check": check.check} | dataclasses.asdict(found) for check in self.checks for found in check.findings
        ]
        rows = [
            {name: value for name, value in dataclasses.asdict(check).items() if name != "findings"}
            for check in self.checks
        ]
        ordered = sorted(findings, key=lambda found: LEVELS.index(found["level"]))
        report = {"findings": ordered, "checks": rows, "node_facts": self.node_facts}
        hidden: dict[str, Any] = without_secrets(report)
        return hidden


def all_checks() -> list[NodeCheck]:
    """Return every registered check, in one order whatever was imported first."""
    order = {module.__name__: place for place, module in enumerate(MODULES)}
    return sorted(CHECKS.values(), key=lambda check: order.get(check.examine.__module__, len(order)))


def examine_node(options: DoctorOptions, model: str | None, say: Callable[[str], None]) -> Examination:
    """Run every check; the long ones with `--long` only. Raises ToolkitError for invalid options, before."""
    node = NodeReadings(options, model)
    check_options(node)
    facts = node_facts(node)
    results = []
    for check in all_checks():
        if check.long and not options.long:
            results.append(CheckResult(check=check.name, status=SKIPPED, seconds=0.0, skipped="only with --long"))
            continue
        if check.long:
            say(f"measuring: {check.name}")
        results.append(run_check(check, node))
    return Examination(node_facts=facts, checks=tuple(results))


def check_options(node: NodeReadings) -> None:
    """Raise ToolkitError for options that cannot be checked: an unknown preset, a model without one, a bad number."""
    options = node.options
    for name, value in (("--gpus-per-node", options.gpus_per_node), ("--num-processes", options.num_processes)):
        if value is not None and value < 1:
            raise ToolkitError(f"{name} is {value}, expected 1 or more")
    for port in options.port:
        if not 1 <= port <= LARGEST_PORT:
            raise ToolkitError(f"--port is {port}, expected 1 to {LARGEST_PORT}")
    if node.model is not None and node.preset is None:
        raise ToolkitError("a MODEL has no effect without --preset", hint="toolkit doctor --preset NAME MODEL")
    _ = node.planned_host_bytes


def shown_lines(examination: Examination) -> list[str]:
    """Return the result as text, without secrets."""
    lines: list[str] = without_secrets(list(_lines(examination)))
    return lines


def _lines(examination: Examination) -> Iterator[str]:
    """A line for each check with its findings, those that were skipped, and a summary."""
    skipped: dict[str, list[str]] = {}
    for check in examination.checks:
        if check.skipped:
            skipped.setdefault(check.skipped, []).append(check.check)
            continue
        yield f"{check.status:8} {check.check:16} {summary(check.measured)}".rstrip()
        for finding in check.findings:
            yield f"  {finding.level}: {finding.what}: {finding.value}; expected: {finding.expected}"
            yield f"    fix: {finding.fix}"
    for reason, names in skipped.items():
        yield f"skipped  ({reason}) {', '.join(names)}"
    counts = Counter(finding.level for check in examination.checks for finding in check.findings)
    found = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS if counts[level]]
    measured = sum(check.status != SKIPPED for check in examination.checks)
    yield f"{measured} of {len(examination.checks)} checks: {', '.join(found) or 'nothing is wrong'}"


def summary(measured: dict[str, Any], *, limit: int = 90) -> str:
    """Return what was measured in one short line; `--json` has all of it.

    >>> summary({"bytes": 2**30, "cards": {"a": 1}, "limit": None})
    '1.00 GiB, cards: a=1'
    """
    parts = []
    for name, value in measured.items():
        if isinstance(value, dict):
            value = " ".join(_value(key, item) for key, item in value.items() if not isinstance(item, dict | list))
            name = f"{name}:"
        if value not in (None, "", [], ()):
            parts.append(_value(name, value).replace("=", " ", 0 if ":" in name else 1).replace(":=", ": "))
    text = ", ".join(parts)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _value(name: str, value: Any) -> str:
    words = name.removesuffix("_per_second").removesuffix("bytes").rstrip("_").replace("_", " ")
    if "bytes" in name and isinstance(value, int):
        return f"{words}={gib(value)}{'/s' if name.endswith('_per_second') else ''}".lstrip("=")
    return f"{name.replace('_', ' ')}={value}"

"""Findings as SARIF 2.1.0, which code hosts show beside the changed lines.

Levels have the same three words there. Paths are relative to the working directory, which has to be the repository.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toolkit._version import __version__
from toolkit.lint.check import LintResult
from toolkit.lint.findings import Finding
from toolkit.lint.rules import RULES

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(result: LintResult) -> dict[str, Any]:
    """Return the log of one run of the linter: each finding, and each file that could not be read."""
    names = sorted({finding.rule for finding in result.findings})
    unreadable = [{"level": "error", "message": {"text": str(error)}} for error in result.unreadable]
    driver = {"name": "toolkit lint", "version": __version__, "rules": [_rule(name, result) for name in names]}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {"executionSuccessful": not unreadable, "toolExecutionNotifications": unreadable},
                ],
                "results": [_result(finding, names.index(finding.rule)) for finding in result.findings],
            }
        ],
    }


def _rule(name: str, result: LintResult) -> dict[str, Any]:
    rule = next((rule for rule in RULES if rule.name == name), None)
    found = next(finding for finding in result.findings if finding.rule == name)
    text = found.message if rule is None else rule.description
    level = found.level if rule is None else rule.level
    entry = {"id": name, "shortDescription": {"text": text or found.message}, "defaultConfiguration": {"level": level}}
    # An address is written for people where the documentation is in the wheel: SARIF takes URIs only.
    is_address = found.documentation.startswith("https://")
    return entry | ({"helpUri": found.documentation} if is_address else {})


def _result(finding: Finding, rule_index: int) -> dict[str, Any]:
    subject = f"{finding.key}: " if finding.key else ""
    # A code host shows only results that have a line: sarif-sdk's rule GH1003. A key that is missing has none.
    place = {"artifactLocation": {"uri": _uri(finding.file)}, "region": {"startLine": finding.line or 1}}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": finding.level,
        "message": {"text": f"{subject}{finding.message}. Fix: {finding.fix} (checked with {finding.checked_against})"},
        "locations": [{"physicalLocation": place}],
    }


def _uri(file: str) -> str:
    """Return a path below the working directory as a relative URI, any other as an absolute one.

    >>> _uri("configs/my file.yaml")
    'configs/my%20file.yaml'
    """
    absolute = Path(os.path.abspath(file))  # noqa: PTH100  (links stay as they are named)
    here = Path.cwd()
    return quote(absolute.relative_to(here).as_posix()) if absolute.is_relative_to(here) else absolute.as_uri()

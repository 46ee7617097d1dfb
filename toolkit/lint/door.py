"""What `toolkit lint` prints and writes.

findings to stdout, as sentences or JSON; what was read to stderr; exit 0 clean, 1 findings, 2 unreadable
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_RUN_FAILED, EXIT_WRONG_INPUT, ToolkitError
from toolkit.installed import installed_version, version_numbers
from toolkit.lint.check import Linted, fixed_text, lint_paths
from toolkit.lint.finding import Finding


def run_lint(paths: Sequence[Path], *, as_json: bool, fix: bool, in_place: bool, say: Callable[[str], None]) -> int:
    """Lint, and fix where asked; the exit code."""
    if in_place and not fix:
        raise ToolkitError("--in-place has no effect without --fix", hint="add `--fix`")
    if fix:
        _fix(paths, in_place=in_place, as_json=as_json, say=say)
        if not in_place:
            return EXIT_DONE
    linted = lint_paths(paths)
    for error in linted.unreadable:
        say(f"error: {error}")
    if as_json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in linted.findings]}, indent=2))
    else:
        for finding in linted.findings:
            print(sentence(finding))
    say(summary(linted))
    for line in other_versions(linted.findings):
        say(line)
    if linted.unreadable:
        return EXIT_WRONG_INPUT
    return EXIT_RUN_FAILED if linted.findings else EXIT_DONE


def sentence(finding: Finding) -> str:
    """A finding in two lines, the first as compilers write it."""
    place = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
    key = f" {finding.key}:" if finding.key else ""
    return (
        f"{place}: {finding.level}[{finding.rule}]{key} {finding.message}\n"
        f"  write {finding.fix}  (checked with {finding.checked_against})"
    )


def summary(linted: Linted) -> str:
    """One line: files and findings by level."""
    files = f"{len(linted.files)} file{'' if len(linted.files) == 1 else 's'}"
    levels = Counter(finding.level for finding in linted.findings)
    counts = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in levels.items())
    return f"{files}: {counts or 'clean'}"


def other_versions(findings: Sequence[Finding]) -> list[str]:
    """A line for each library that is installed in another version than the findings were checked with."""
    lines = []
    for library, checked in sorted({(name, version) for name, version in map(_library, findings)}):
        installed = installed_version(library)
        if installed is not None and version_numbers(installed)[:2] != version_numbers(checked)[:2]:
            lines.append(f"note: {library} {installed} is installed; its rules were checked with {checked}")
    return lines


def _library(finding: Finding) -> tuple[str, str]:
    name, _, version = finding.checked_against.partition(" ")
    return name, version


def _fix(paths: Sequence[Path], *, in_place: bool, as_json: bool, say: Callable[[str], None]) -> None:
    files = [Path(name) for name in lint_paths(paths).files] if any(path.is_dir() for path in paths) else list(paths)
    if not in_place:
        if len(files) != 1 or as_json:
            raise ToolkitError("--fix writes one file to stdout", hint="add `--in-place`; a `.bak` is kept of each")
        print(fixed_text(files[0]), end="")
        return
    for file in files:
        fixed = fixed_text(file)
        if fixed != file.read_bytes().decode():
            shutil.copy2(file, file.with_name(f"{file.name}.bak"))
            file.write_bytes(fixed.encode())
            say(f"fixed {file}; the old text is in {file.name}.bak")

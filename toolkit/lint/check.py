"""Run the rules over files and folders.

>>> from pathlib import Path
>>> lint_paths([Path("accelerate_configs")]).findings
[]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.reading import OverLimit, is_file
from toolkit.lint.document import Document, NotAConfiguration, load_document, may_be_linted
from toolkit.lint.findings import Edit, Finding, LintRule
from toolkit.lint.rules import RULES
from toolkit.versions import installed_version, version_numbers

MAX_FILES = 10_000  # in a folder: data sets and caches have more, and take minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class LintResult:
    """The findings of several files, and which files were read."""

    findings: list[Finding]
    files: list[str]
    unreadable: list[ToolkitError]
    """One error for each file of a folder that looks like a configuration and cannot be read."""


def lint_paths(paths: Sequence[Path]) -> LintResult:
    """Lint each file, each configuration in a folder, and each DeepSpeed JSON that one of them names.

    Raises ToolkitError for a file that is named in `paths` and cannot be read or is not a configuration.
    """
    documents: dict[Path, Document] = {}
    unreadable: list[ToolkitError] = []
    for path in paths:
        is_folder = os.path.isdir(path)  # noqa: PTH112  (`Path.is_dir` raises for a name that is too long)
        for document in _load_folder(path, unreadable) if is_folder else [_load_configuration(path)]:
            for each in (document, document.deepspeed_json):
                if each is not None:
                    documents.setdefault(Path(each.path).resolve(), each)
    if not documents and not unreadable:
        raise ToolkitError(f"no configuration in {', '.join(map(str, paths))}", hint="name a file")
    findings = [finding for document in documents.values() for finding in lint_document(document)]
    return LintResult(findings=findings, files=[each.path for each in documents.values()], unreadable=unreadable)


def _load_configuration(file: Path) -> Document:
    document = load_document(file)
    if document.kind is None:
        raise ToolkitError(
            f"{file} is neither an accelerate configuration nor a DeepSpeed one, Trainer arguments or a job script",
            hint="name a file that contains `distributed_type`, `zero_optimization`, training arguments or `torchrun`",
        )
    return document


def _load_folder(folder: Path, unreadable: list[ToolkitError]) -> list[Document]:
    """Load the configurations in a folder, skip data and other programs' files, and note broken ones."""
    documents = []
    for path in _candidates(folder):
        try:
            documents.append(load_document(path))
        except (NotAConfiguration, OverLimit):
            continue
        except ToolkitError as error:
            unreadable.append(error)
    return [document for document in documents if document.kind is not None]


def _candidates(folder: Path) -> list[Path]:
    """Return a folder's YAML and JSON files and shell scripts, without hidden ones; links to folders are not followed.

    Raises ToolkitError for more files than a repository of configurations has.
    """
    found, pending = [], [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError:  # it may not be read, or is gone: nothing in it is a configuration of this user's
            continue
        pending += [Path(entry.path) for entry in visible if entry.is_dir(follow_symlinks=False)]
        found += [Path(entry.path) for entry in visible if may_be_linted(entry.name) and is_file(Path(entry.path))]
        if len(found) > MAX_FILES:
            raise ToolkitError(
                f"{folder} has more than {MAX_FILES:,} YAML, JSON and shell files",
                hint="name a folder inside it, or files",
            )
    return sorted(found)


def lint_document(document: Document) -> list[Finding]:
    """Return the findings of one document, in the order of its lines."""
    found = [finding for finding, _ in findings_with_edits(document)]
    return sorted(found, key=lambda finding: (finding.line or 0, finding.rule))


def findings_with_edits(document: Document) -> Iterator[tuple[Finding, Edit | None]]:
    """Run every rule for the document's kind, and yield its findings, each with its mechanical fix if it has one."""
    for rule in RULES:
        if document.kind in rule.kinds and _concerns_installed_version(rule):
            for match in rule.check(document):
                finding = Finding(
                    file=document.path,
                    key=match.key,
                    line=match.line if match.line is not None else document.line(match.key),
                    level=rule.level,
                    rule=rule.name,
                    message=match.message,
                    fix=match.fix,
                    checked_against=rule.checked_against,
                )
                yield finding, match.edit


def _concerns_installed_version(rule: LintRule) -> bool:
    """Return False for a removal that the installed, older version of the library does not have yet."""
    if rule.removed_in is None:
        return True
    installed = installed_version(rule.library)
    return installed is None or version_numbers(installed) >= version_numbers(rule.removed_in)

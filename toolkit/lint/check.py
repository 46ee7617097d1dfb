"""Lint files and folders: read, recognise, run the rules, and say where.

>>> from pathlib import Path
>>> lint_paths([Path("accelerate_configs")]).findings
[]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import toolkit.lint.rules  # noqa: F401  (registers them)
from toolkit.errors import ToolkitError
from toolkit.installed import installed_version, version_numbers
from toolkit.lint.document import DEEPSPEED, MAX_BYTES, SUFFIXES, Document, read_document, read_text, with_kind
from toolkit.lint.finding import RULES, Edit, Finding, Rule
from toolkit.lint.fix import apply_edits
from toolkit.lint.kinds import kind_of
from toolkit.lint.naming import candidates, naming_key
from toolkit.lint.places import NotAConfiguration

# A fix may uncover another: a renamed key has a value that was never looked at.
MAX_ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Linted:
    """What was found, and what was read."""

    findings: list[Finding]
    files: list[str]
    unreadable: list[ToolkitError]
    """Files of a folder that look like configurations and cannot be read."""


def lint_paths(paths: Sequence[Path]) -> Linted:
    """Lint each file, each configuration in a folder, and each JSON that one of them names.

    Raises ToolkitError for a named file that cannot be read or is no configuration.
    """
    documents: dict[Path, Document] = {}
    unreadable: list[ToolkitError] = []
    for path in paths:
        for document in _of_folder(path, unreadable) if path.is_dir() else [_of_file(path)]:
            for each in (document, *document.named.values()):
                documents.setdefault(Path(each.path).resolve(), each)
    if not documents and not unreadable:
        raise ToolkitError(f"no configuration in {', '.join(map(str, paths))}", hint="name a file")
    findings = [finding for document in documents.values() for finding in lint_document(document)]
    return Linted(findings=findings, files=[each.path for each in documents.values()], unreadable=unreadable)


def _of_file(file: Path) -> Document:
    document = load(file)
    if document.kind is None:
        raise ToolkitError(
            f"{file} is neither an accelerate configuration nor a DeepSpeed one nor Trainer arguments",
            hint="name a file with `distributed_type`, `zero_optimization` or training arguments in it",
        )
    return document


def _of_folder(folder: Path, unreadable: list[ToolkitError]) -> list[Document]:
    """The configurations in a folder; data and other programs' files are none, broken ones are noted."""
    documents = []
    for file in _files(folder):
        try:
            documents.append(load(file))
        except NotAConfiguration:
            continue
        except ToolkitError as error:
            unreadable.append(error)
    return [document for document in documents if document.kind is not None]


def _files(folder: Path) -> list[Path]:
    """Files that may be configurations; hidden folders and larger files are none."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()]
    hidden = [any(part.startswith(".") for part in path.relative_to(folder).parts) for path in files]
    return [file for file, skip in zip(files, hidden, strict=True) if not skip and file.stat().st_size <= MAX_BYTES]


def load(path: Path) -> Document:
    """A document with its kind, and the JSON that it names."""
    return recognise(read_document(path))


def recognise(document: Document) -> Document:
    """The same document with its kind, and with the JSON that it names where that can be read."""
    document = with_kind(document, kind_of(document.data))
    named = next((path for path in candidates(document) if path.is_file()), None)
    if document.kind in (None, DEEPSPEED) or named is None or named.suffix != ".json":
        return document
    json = with_kind(read_document(named), DEEPSPEED)
    return dataclasses.replace(document, named={naming_key(document): json})


def lint_document(document: Document) -> list[Finding]:
    """Findings of one document, in the order of its lines."""
    found = [finding for finding, _ in _hits(document)]
    return sorted(found, key=lambda finding: (finding.line or 0, finding.rule))


def _hits(document: Document) -> list[tuple[Finding, Edit | None]]:
    hits = []
    for rule in RULES:
        if document.kind in rule.kinds and _applies(rule):
            for hit in rule.check(document):
                finding = Finding(
                    file=document.path,
                    key=hit.key,
                    line=document.line(hit.key),
                    level=rule.level,
                    rule=rule.name,
                    message=hit.message,
                    fix=hit.fix,
                    checked_against=rule.checked_against,
                )
                hits.append((finding, hit.edit))
    return hits


def _applies(rule: Rule) -> bool:
    """What a version removed is no finding where an older one is installed."""
    installed = installed_version(rule.library) if rule.removed_in else None
    return (
        rule.removed_in is None or installed is None or (version_numbers(installed) >= version_numbers(rule.removed_in))
    )


def fixed_text(path: Path) -> str:
    """The text of a file after every mechanical fix; what needs a decision stays as it is."""
    document = load(path)
    for _ in range(MAX_ROUNDS):
        edits = [edit for _, edit in _hits(document) if edit is not None]
        changed = apply_edits(document, edits)
        if changed == document.text:
            break
        try:
            document = recognise(read_text(changed, str(path)))
        except ToolkitError:  # a layout that edits by line do not suit: the text before stays
            break
    return document.text

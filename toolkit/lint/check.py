"""Run the rules over files and folders, and apply their mechanical fixes.

>>> from pathlib import Path
>>> lint_paths([Path("accelerate_configs")]).findings
[]
"""

import json
import math
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.convert.job_script import PYTHON, read_calls
from toolkit.convert.programs import A_SCRIPT, OPEN_INSTRUCT
from toolkit.errors import OverLimit, ToolkitError
from toolkit.files.paths import is_file
from toolkit.installation import documentation_address
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint import document as reading
from toolkit.lint.document import ENGINE_FILES, LINTED_SUFFIXES, TRAINER, Document, MergeConflict, load_document
from toolkit.lint.findings import LEVELS, NOTE, OLDEST_VERSIONS, RECENT_VERSIONS, WARNING, Finding, LintRule, Match
from toolkit.lint.named_files import forget_projects, has_own_loop, installs, project_root, scripts_named
from toolkit.lint.rules import RULES
from toolkit.units import counted
from toolkit.versions import installed_version, version_numbers

# A key by which people know a file of these libraries, also where it cannot be read.
OURS = re.compile(
    r"^[\s{]*[\"']?(?:zero_optimization|distributed_type|compute_environment|per_device_train_batch_size"
    r"|fsdp_config|deepspeed_config|base_model|finetuning_type|train_micro_batch_size_per_gpu)[\"']?\s*:",
    re.MULTILINE,
)
_PLACE = operator.attrgetter("file", "line", "rule", "key")
MAX_FILES = 10_000  # in a folder: data sets and caches have more, and take minutes
MAX_OF_FOLDER = 1000  # above which they are the rows of a dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class LintResult:
    """The findings of several files, and which files were read."""

    findings: list[Finding]
    files: list[str]
    unreadable: list[ToolkitError]
    """One error for each file that is named, or looks like a configuration in a folder, and cannot be read."""
    not_checked: list[str]  # one line for each script whose arguments no rule knows


def lint_paths(paths: Sequence[Path], *, skips_others: bool = False, forgets: bool = True) -> LintResult:
    """Lint each file, each configuration in a folder, and each DeepSpeed JSON that one of them names.

    Other files of their projects are read again, unless `forgets` is False: since the last call they may have changed.

    A file that is named in `paths` and cannot be read or is not a configuration is `unreadable`, and a ToolkitError
    where it is the only path; with `skips_others` named files are looked at like those of a folder, where other
    programs' files lie too.
    """
    if forgets:
        forget_projects()
    documents: dict[tuple[Path, str | None, str, int, str], Document] = {}
    unreadable: list[ToolkitError] = []
    skipped: list[str] = []
    for path in paths:
        is_folder = os.path.isdir(path)  # noqa: PTH112  (`Path.is_dir` raises for a name that is too long)
        for file in _candidates(path) if is_folder else [path]:
            must_be_one = not (is_folder or skips_others)
            try:
                document = load_document(file)
                if document.kind is None and must_be_one:
                    raise ToolkitError(
                        f"{file} is neither an accelerate configuration nor a DeepSpeed one, Trainer arguments or a job"
                        " script",
                        hint="name a file that contains `distributed_type`, `zero_optimization`, training arguments or"
                        " `torchrun`",
                    )
            except ToolkitError as error:
                if must_be_one and len(paths) == 1:
                    raise
                is_another = isinstance(error, reading.NotAConfiguration | OverLimit)  # data, or another program's file
                if is_another and not must_be_one:
                    continue
                text = file.read_bytes().decode(errors="replace") if is_file(file) else ""
                launches = isinstance(error, MergeConflict) and any(each.tool != PYTHON for each in read_calls(text))
                if must_be_one or not text or launches or OURS.search(text):
                    unreadable.append(error)
                else:
                    whose = ", as another program's" if file.suffix in (".yaml", ".yml") else ""
                    skipped.append(f"skipped{whose}: {error.message}")
                continue
            for each in document.linted if document.kind is not None else ():
                starts = each.command.path if each.command else ""
                reader = each.named_by  # of several, each has words of its own
                at = f"{reader.path}:{reader.start.line if reader.start else ''}" if reader else ""
                key = Path(each.path).resolve(), each.kind, starts, each.start.line if each.start else 0, at
                documents[key] = each
    started = {key[:2] for key, each in documents.items() if each.command is not None}
    named = {key[:2] for key, each in documents.items() if each.named_by is not None}
    documents = {  # what a command or a file reads it with says more
        key: each
        for key, each in documents.items()
        if not (key[:2] in started and each.start is None) and not (key[:2] in named and each.named_by is None)
    }
    if not documents and not unreadable and not skips_others:
        raise ToolkitError(f"no configuration in {', '.join(map(str, paths))}", hint="name a file")
    found = [finding for document in documents.values() for finding in lint_document(document)]
    highest: dict[Any, str] = {}  # level of each place, which several commands may read
    for finding in found:
        highest[_PLACE(finding)] = min(finding.level, highest.get(_PLACE(finding), NOTE), key=LEVELS.index)
    found = [finding for finding in found if finding.level == highest[_PLACE(finding)]]
    files = list(dict.fromkeys([*(each.path for each in documents.values()), *(each.file for each in found)]))
    unique = {(*_PLACE(each), each.message): each for each in found}
    findings = sorted(unique.values(), key=lambda each: (files.index(each.file), each.line or 0, each.rule))
    not_checked = [*skipped, *(line for document in documents.values() for line in _not_checked(document))]
    return LintResult(findings=findings, files=files, unreadable=unreadable, not_checked=not_checked)


def _not_checked(document: Document) -> Iterator[str]:
    """Say which words behind a script's name no rule has looked at."""
    if document.call is None and document.program == OPEN_INSTRUCT:
        others = counted(len(document.data.keys() - trainer_argument_names()), "argument")
        yield f"{document.path}: {others} of a script with dataclasses of its own not checked"
    checked = {part.start.line for part in document.parts if part.start and part.kind}
    for call in document.script.calls:
        if call.arguments and call.line not in checked:
            count = counted(len(call.arguments), "argument")
            script = call.script or ""
            is_lost = script.endswith(".py") and "$" not in script and project_root(document.folder) is not None
            is_lost = is_lost and not scripts_named(script, document.path)
            why = ", and the project has no such file" if is_lost else ""
            yield f"{document.path}:{call.line}: {count} of {call.script} not checked{why}"
        elif not call.is_complete:
            yield f"{document.path}:{call.line}: variables stand for arguments that were not checked"


def _candidates(folder: Path) -> list[Path]:
    """Return a folder's YAML and JSON files and shell scripts, without hidden ones; links to folders are not followed.

    Raises ToolkitError for more files than a repository of configurations has.
    """
    found: list[Path] = []
    for root, folders, names in os.walk(folder):  # which passes over what may not be read
        folders[:] = [name for name in folders if not re.match(r"\.|(?:offline-)?run-\d{8}_", name)]  # wandb's records
        paths = [Path(root, name) for name in names if not name.startswith(".") and name.endswith(LINTED_SUFFIXES)]
        found += filter(is_file, paths if len(paths) <= MAX_OF_FOLDER else ())
        if len(found) > MAX_FILES:
            hint = "name a folder inside it, or files"
            raise ToolkitError(f"{folder} has more than {MAX_FILES:,} YAML, JSON and shell files", hint=hint)
    return sorted(found)


def lint_document(document: Document) -> list[Finding]:
    """Return the findings of one document, in the order of its lines."""
    found = [_finding(document, rule, match) for rule, match in _matches(document)]
    end = min((each.line or 0 for each in found if each.key == "bash -n"), default=math.inf)  # where bash stops
    found = [each for each in found if (each.line or 0) <= end]
    return sorted(found, key=lambda finding: (finding.line or 0, finding.rule))


def _finding(document: Document, rule: LintRule, match: Match) -> Finding:
    """Return a match with its place and its level, and with what the versions of the project say about it."""
    place, message, fix = _place(document, match.key), match.message, match.fix
    since, pin = _since(rule, match), _pin(document, rule, match)
    if pin:
        message += f"; the project asks for {pin}"
    elif document.has_own_copy(rule.library):
        message += f"; the project's own {rule.library} decides"
    if _since_unknown(document, rule, match):
        fix = f"if you run {rule.library} {since} or newer: {fix}"
    elif since and pin:
        fix = f"from {rule.library} {since} on: {fix}"
    return Finding(
        file=place.path,
        key=match.key,
        line=match.line or place.line(match.key) or (document.call.line if document.call else None),
        level=_level(document, rule, match),
        rule=rule.name,
        message=message,
        fix=fix,
        checked_against=rule.checked_against,
        documentation=documentation_address("reference/lint.md", rule.name),
    )


def _place(document: Document, key: str) -> Document:
    """Return the document that a key stands in: `fsdp_config` may be a file of its own, a command may have words."""
    command = document.command
    if command is not None and command.positions.keys() & {key, key.partition(".")[0]}:
        return command
    section = document.fsdp_json
    return section if section is not None and key.startswith("fsdp_config.") and key in section.positions else document


def _is_known(document: Document, rule: LintRule) -> bool:
    """Return True where the program that reads a file is the one that the rule was checked with."""
    is_of_program = rule.library not in ("transformers", "trl", "accelerate", "pyyaml")  # by its own schema
    return document.kind != TRAINER or document.program in reading.OUR_PROGRAMS or is_of_program


def _since_unknown(document: Document, rule: LintRule, match: Match) -> bool:
    """Return True for what began in a recent version, where no file of a project says which version it runs."""
    since, recent = _since(rule, match), RECENT_VERSIONS.get(rule.library)
    if since is None or recent is None or version_numbers(since) < version_numbers(recent):
        return False
    return _is_certain(document, rule, match) and document.may_be_older(rule.library, since)


def _is_certain(document: Document, rule: LintRule, match: Match) -> bool:
    """Return False where the file may be another program's, or the project uses another version of the library."""
    return not (document.is_guessed or _pin(document, rule, match) or document.has_own_copy(rule.library))


def _pin(document: Document, rule: LintRule, match: Match) -> str | None:
    """Return what the project asks for where that is a version from before what the rule says."""
    return document.pinned_below(rule.library, _since(rule, match) or OLDEST_VERSIONS.get(rule.library))


def _since(rule: LintRule, match: Match) -> str | None:
    """Return the version of the library from which on what a finding says holds, where one is known."""
    return match.since or rule.removed_in


def _level(document: Document, rule: LintRule, match: Match) -> str:
    """Return a finding's level: who reads a file, and at which version, decides whether an error is one."""
    level = match.level or rule.level
    if not _is_certain(document, rule, match):
        return NOTE
    if document.kind == TRAINER and document.call is None and rule.library != "torch" and has_own_loop(document.folder):
        return NOTE  # its settings are those of the loop
    if _since_unknown(document, rule, match):
        level = WARNING if level != NOTE and installs(document.folder, rule.library) else NOTE
    if level == NOTE or _is_known(document, rule):
        return level
    if document.program is not None:
        return level if rule.for_every_program and document.program != A_SCRIPT else NOTE
    has_evidence = len(document.data.keys() & reading.TRAINER_EVIDENCE) > 1
    return (level if rule.for_every_program else WARNING) if has_evidence else NOTE


def _matches(document: Document) -> Iterator[tuple[LintRule, Match]]:
    """Run every rule for the document's kind, except removals that an installed, older library does not have yet."""
    for rule in RULES:
        installed = installed_version(rule.library) if rule.removed_in else None
        is_older = installed is not None and version_numbers(installed) < version_numbers(rule.removed_in or "")
        if document.kind in rule.kinds and not is_older:
            if rule.library == "transformers" and TRAINER in rule.kinds and document.kind in ENGINE_FILES:
                rule = replace(rule, library=document.kind)  # which reads this file
            for match in rule.check(document):
                yield replace(rule, library=match.library or rule.library), match


# -- mechanical fixes, as edits of the text, so that comments and the order of keys stay

# A fix may uncover another: the value of a misspelt key is checked only once the key is renamed.
MAX_ROUNDS = 5


def fixed_text(path: Path) -> str:
    """Return the text of a file after every mechanical fix; what needs a decision stays as it is."""
    document = load_document(path)
    for _ in range(MAX_ROUNDS):
        certain = [each for each in _matches(document) if _is_known(document, each[0]) and _is_certain(document, *each)]
        changed = apply_fixes(document, [each[1] for each in certain if not _since_unknown(document, *each)])
        if changed == document.text:
            break
        try:
            document = reading.with_named_files(reading.read_text(changed, str(path)))
        except ToolkitError:  # the file's layout does not allow an edit line by line: keep the text from before it
            break
    return document.text


def apply_fixes(document: Document, matches: Sequence[Match]) -> str:
    """Return the text with every mechanical fix that overlaps no other; the rest waits for the next round.

    >>> document = reading.read_text("a: 1  # why\\nb: 2\\n", "mine.yaml")
    >>> apply_fixes(document, [Match("a", "is old", "`c`", rename="c"), Match("b", "has no effect", "", remove=True)])
    'c: 1  # why\\n'
    """
    text, end = document.text, len(document.text) + 1
    fixes = [match for match in matches if match.is_mechanical and match.key in document.positions]
    for start, stop, new in sorted({_replacement(document, match) for match in fixes}, reverse=True):
        if stop <= end:
            text, end = text[:start] + new + text[stop:], start
    return text


def _replacement(document: Document, match: Match) -> tuple[int, int, str]:
    """Start and end offset of the text to replace, and the new text."""
    text, position = document.text, document.positions[match.key]
    (start, key_end), (value_start, value_end) = position.key_span, position.value_span
    if match.rename is not None:
        return start, key_end, json.dumps(match.rename) if text[start] == '"' else match.rename
    if match.value is not None:
        value = str(match.value)
        if isinstance(match.value, bool) or value.isdigit():
            return value_start, value_end, value.lower()
        is_plain = re.fullmatch(r"[\w./-]+", value) and value != "no"
        quoted = document.is_json or position.in_braces or not is_plain
        return value_start, value_end, json.dumps(value) if quoted else value
    if not position.in_braces:  # complete lines, including the comment after the value
        stop = text.find("\n", max(value_end, key_end))
        return text.rfind("\n", 0, start) + 1, len(text) if stop < 0 else stop + 1, ""
    comma_after = re.compile(r"\s*,\s*").match(text, value_end)
    if comma_after:
        return start, comma_after.end(), ""
    comma_before = re.compile(r",?\s*$").search(text, 0, start)  # of the last key
    return comma_before.start() if comma_before else start, value_end, ""

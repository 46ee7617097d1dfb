"""Slips that bash takes for something else: patterns of a table, quotes, names of variables, and its grammar."""

import contextlib
import itertools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.convert.job_script import JobScript, in_comment, launcher_tables
from toolkit.errors import nearest
from toolkit.lint.document import SBATCH, SCRIPTS, SKYPILOT, SUFFIXES, Document
from toolkit.lint.findings import ERROR, NOTE, Match, rule
from toolkit.lint.rules.shell import in_spans

QUOTED = re.compile(r"(?<=[ \t=])(?:\"\$\{?(\w+)\}?\"|'\$\{?(\w+)\}?')(?=\s|$)")  # and nothing else in the quotes
ASSIGNED = re.compile(r"(?m)^[ \t]*(?:export +)?([A-Za-z_]\w*)\+?=(\"(?:\\.|[^\"\\])*\"|'[^']*'|\S*)")
OPTIONS = re.compile(r"[\"'][\s\\]*--?[a-zA-Z][^\"']*\s--?[a-zA-Z]")
BEHIND_OPTION = re.compile(r"(?:^|\s)--?[\w-]+(?:[ \t]|\\\n)+$|=$")
MAX_NAMES = 300  # of one script: each is looked for in all of its text
USED = r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))"
# What may set variables that the file does not show.
SETS_OTHERS = (
    r"(?:^|[;&|]|\bthen\b|\bdo\b)[ \t]*(?:set[ \t]+(?:-a|-o[ \t]+allexport)\b|(?:source|\.|eval)[ \t]"
    r"(?!.*(?:activate|conda|mamba|bashrc|profile|modules?/|pyenv)))"  # which set their own
)
# Without `$`, with a default or a test, or asked for by `-n` or `-z`: the author knows that it may be unset.
MENTIONED = r"(?<![\w$])NAME\b(?<!\$\{NAME)|\$\{[#!]?NAME[^\w}]|-[nzv] +\"?\$\{?NAME\b"
HEAD_OF_JOB = re.compile(r"(?!#!)(?:[ \t]*(?:#[^\n]*)?\n)*?#SBATCH")  # without a line that names a shell
OF_SHELL = re.compile(r"#!.*\b(?:ba|da)?sh\b|(?!#!)")
PARSED = re.compile(r"line (\d+): (syntax error near.*|syntax error: unexpected end.*|unexpected EOF.*)")
CLOSES = re.compile(r"token `(?:fi|done|esac|else|elif|then|do|\}|\)|;;)'|unexpected [eE]")
PLACEHOLDER = re.compile(r"<[\w ./-]+>|\{\{|\{%")


@rule(ERROR, *SCRIPTS, library="bash", fix="what the message names")
def shell_slip(doc: Document) -> Iterator[Match]:
    """bash reads it otherwise."""
    script = doc.script
    spans = (*script.strings, *script.protected)
    # Of this job, and not of one that a here-document writes.
    comments = [(start, end) for start, end in script.commands if script.text[start : start + 1] == "#"]
    for each in launcher_tables()["slips"] if script.calls else ():
        for found in _matches(script, each):
            at = found.start(last := found.lastindex or 0)
            if re.match(r"#[ \t]*SBATCH", found[0]):
                is_read = doc.kind == SBATCH and in_spans(found.start(), (*comments,))
            else:
                is_read = not (in_comment(script.text, at) or in_spans(at, spans))
            if is_read:
                more = {"level": each.get("level"), "library": each.get("library")}
                yield Match(found[last], each["message"], each["fix"], line=script.line_at(at), **more)
    if script.calls:
        yield from (*_unparsed(doc), *_quoted_variables(script), *_unset_variables(doc))


def _matches(script: JobScript, slip: Mapping[str, Any]) -> Iterator[re.Match[str]]:
    """Yield each match of a slip's pattern: in the text, or at the start of each command."""
    pattern = re.compile(slip["pattern"])
    if slip.get("command"):
        yield from filter(None, (pattern.match(script.text, *span) for span in script.commands))
    else:
        yield from pattern.finditer(script.text)


def _unparsed(doc: Document) -> Iterator[Match]:
    """Yield where sbatch or bash stops reading a file: `bash -n` parses it, and executes nothing."""
    text, lines = doc.script.text, doc.script.text.split("\n")
    if doc.kind == SBATCH and HEAD_OF_JOB.match(text):
        yield Match("#!", "the first line names no shell: sbatch refuses the file", "`#!/bin/bash`", line=1)
    bash = shutil.which("bash") if sys.platform == "linux" else None  # macOS has one of 2007
    is_file = doc.kind == SKYPILOT or not doc.path.endswith(SUFFIXES)
    if bash is None or not is_file or "\r\n" in text or not OF_SHELL.match(text):
        return
    command = [bash, "--norc", "--noprofile", "-O", "extglob", "-n"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        code, plain = text.encode(errors="replace"), {"LC_ALL": "C"}
        done = subprocess.run(command, input=code, capture_output=True, env=plain, timeout=5, check=False)
        found = PARSED.search(done.stderr.decode(errors="replace")) if done.returncode == 2 else None
        line = min(int(found[1]), len(lines)) if found else 0
        if found and line and not PLACEHOLDER.search(lines[line - 1]):
            message = f"{found[2].strip()}: bash runs nothing behind it"
            fix = "close what is open above it" if CLOSES.search(message) else "quotes around it, or `#` before prose"
            yield Match("bash -n", message, fix, line=line + doc.script.first_line - 1)


def _quoted_variables(script: JobScript) -> Iterator[Match]:
    """Yield variables of a launcher's command in quotes that make one word of several options, or none of a name."""
    starts, assigned = [call.line for call in script.calls], defaultdict(list)
    for found in ASSIGNED.finditer(script.text):
        assigned[found[1]].append(found[2])
    for start, end in script.commands:
        first, last = script.line_at(start), script.line_at(max(start, end - 1))
        command = script.text[start:end]
        if not any(first <= line <= last for line in starts) or re.search(r"\beval\b|<<", command):
            continue
        for found in QUOTED.finditer(command):
            name, span = found[1] or found[2], (start + found.start(), start + found.end())
            values, line = assigned[name], script.line_at(span[0])
            is_value = BEHIND_OPTION.search(command[max(0, found.start() - 200) : found.start()])
            if span in script.strings and len(values) == 1 and OPTIONS.match(values[0]) and not is_value:
                message = f"{found[0]} is one word: the program takes all of its options for one argument"
                yield Match(name, message, f"`${name}`, or an array", line=line)
            elif span in script.protected and values:
                message = f"{found[0]} stays as it is: bash expands nothing in single quotes"
                yield Match(name, message, f'`"${name}"`', line=line)


def _unset_variables(doc: Document) -> Iterator[Match]:
    """Yield variables that nothing sets, where the file itself shows which name was meant."""
    script, known, of_slurm = doc.script, launcher_tables()["environment"], launcher_tables()["slurm"]
    if script.mentions(SETS_OTHERS):
        return
    places = [found for found, _ in script.find(USED) if script.expands_at(found.start())]
    uses = {found[1] or found[2]: found for found in reversed(places)}  # the first of each
    envs = {*doc.block("envs"), *doc.block("secrets")} if doc.kind == SKYPILOT else set()
    assigned = envs | {found[1] for found, _ in script.find(r"(?<![\w$./{-])([A-Za-z_]\w*)=")}
    exported = {found[1] for found, _ in script.find(r"\bexport[ \t]+(?:\w+=\S+[ \t]+)*([A-Za-z_]\w*)")}
    idle = assigned - exported - {*known, *re.findall(r"\$\{?[#!]?(\w+)", doc.text)}
    for name, found in itertools.islice(uses.items(), MAX_NAMES):
        if name in {*known, *of_slurm, *envs} or re.search(MENTIONED.replace("NAME", name), script.text):
            continue
        meant, message = name.rstrip("_"), "bash takes the `_` for a part of the name: it is empty"
        if meant == name or meant not in assigned:
            meant, message = nearest(name, idle, cutoff=0.6 if envs else 0.8), "nothing sets it: it is empty"
        if not meant and name.startswith("SLURM_") and doc.kind == SBATCH:
            meant, message = nearest(name, of_slurm, cutoff=0.85), "SLURM sets no such variable: it is empty"
        if meant:
            fix = f"`${{{meant}}}_`" if name == f"{meant}_" else f"`${meant}`"
            is_said = not script.mentions(rf"^(?![ \t]*(?:echo|printf)\b).*\$\{{?{name}\b")  # in the log alone
            line = script.line_at(found.start())
            yield Match(f"${name}", message, fix, line=line, level=NOTE if is_said else None)

"""A shell script that starts training, as far as the rules look at it: sbatch directives, launchers, quoting.

>>> script = read_script("#SBATCH --nodes=2\\nsrun torchrun --nnodes=2 \\\\\\n  train.py\\n")
>>> script.nodes, script.launches[0].tool, script.launches[0].options["nnodes"], script.launches[0].line
(2, 'torchrun', '2', 2)

Nothing is executed, and no more of the shell's grammar is read than quotes, comments, continued lines and
here-documents.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

SCRIPT_SUFFIXES = (".sbatch", ".slurm", ".sh", ".bash")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--[\w-]+|-[A-Za-z])(?:[=\s]\s*|(?<=-[A-Za-z]))([^\s#]*)", re.MULTILINE)
_SHORT_DIRECTIVES = {"-N": "nodes", "-n": "ntasks", "-t": "time", "-o": "output"}
_LAUNCHERS = {
    "torchrun": re.compile(r"\btorchrun\b|-m[ \t]+torch\.distributed\.(?:run|launch)\b"),
    "accelerate": re.compile(r"\baccelerate[ \t]+launch\b|-m[ \t]+accelerate\.commands\.launch\b"),
    "deepspeed": re.compile(r"(?<![\w./-])deepspeed(?=[ \t]+(?:-|\\|\S+\.py))"),
}
_VALUE = r"\"[^\"]*\"|'[^']*'|[^\s\\'\";&|]+"
_OPTION = re.compile(rf"(?<![\w-])--([A-Za-z][\w-]*)(?:(?:=|[ \t]+(?!-))({_VALUE}))?")
# An escaped character, a string in single or double quotes, a comment, the start of a here-document, the end of a line.
_TOKEN = re.compile(
    r"""\\.|'[^']*+'?|"(?:\\.|[^"\\])*+"?|(?<![^ \t\n;])\#[^\n]*|(?<!<)<<(-?)[ \t]*(['"]?)([A-Za-z_]\w*)\2|\n""",
    re.DOTALL,
)
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+)?[\w-]+[ \t]*\(\)[ \t]*\{.*?^[ \t]*\}", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherCall:
    """One call of a launcher."""

    tool: str  # `torchrun`, `accelerate` or `deepspeed`
    line: int
    options: dict[str, str | None]  # names with dashes, without the two in front; None for a flag without a value


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """What the rules ask of a script."""

    text: str
    first_line: int  # the line of the file in which the text begins
    directives: dict[str, tuple[str, int]]  # sbatch's directives: value and line
    launches: tuple[LauncherCall, ...]
    nodes: int | None = None  # nodes of the job, the most of them where it is a range; None where the file does not say
    protected: tuple[tuple[int, int], ...] = ()  # spans of the text in which this shell expands nothing

    def expands_at(self, offset: int) -> bool:
        """Return True if the shell that runs the script itself expands a variable at an offset of the text."""
        inside = any(start <= offset < end for start, end in self.protected)
        return not inside and self.text[offset - 1 : offset] != "\\"

    def line_at(self, offset: int) -> int:
        """Return the line of the file at an offset of the text."""
        return self.first_line + self.text.count("\n", 0, offset)

    def find(self, pattern: str) -> Iterator[tuple[re.Match[str], int]]:
        """Yield each match of a pattern outside of comments, and its line."""
        for found in re.finditer(pattern, self.text, re.MULTILINE):
            if not _in_comment(self.text, found.start()):
                yield found, self.line_at(found.start())

    def mentions(self, pattern: str) -> bool:
        """Return True if a pattern occurs outside of comments."""
        return next(self.find(pattern), None) is not None


EMPTY_SCRIPT = JobScript(text="", first_line=1, directives={}, launches=())


def read_script(text: str, *, first_line: int = 1, nodes: int | None = None) -> JobScript:
    """Read a script; `nodes` is the number of nodes where another part of the file says it."""
    directives = {
        _SHORT_DIRECTIVES.get(found[1], found[1].lstrip("-")): (
            found[2],
            text.count("\n", 0, found.start()) + first_line,
        )
        for found in _DIRECTIVE.finditer(text)
    }
    breaks, protected = _scan(text)
    if "export -f" in text:  # run by another shell, on the node
        protected += [found.span() for found in _FUNCTION.finditer(text)]
    if nodes is None and "nodes" in directives:
        counts = re.findall("[0-9]+", directives["nodes"][0])
        nodes = max((int(count[:9]) for count in counts), default=None)
    return JobScript(
        text=text,
        first_line=first_line,
        directives=directives,
        launches=tuple(_launches(text, breaks, first_line)),
        nodes=nodes,
        protected=tuple(protected),
    )


def _launches(text: str, breaks: list[int], first_line: int) -> Iterator[LauncherCall]:
    """Yield the calls in each command, with its continued lines, its quoted lines and its here-documents."""
    for start, end in itertools.pairwise([0, *breaks, len(text)]):
        command = text[start:end]
        calls = [(found, tool) for tool, pattern in _LAUNCHERS.items() for found in pattern.finditer(command)]
        for found, tool in sorted(calls, key=lambda call: call[0].start()):
            if command.lstrip().startswith("#") or _in_comment(command, found.start()):
                continue
            options = {
                option[1].replace("_", "-"): None if option[2] is None else option[2].strip("\"'")
                for option in _OPTION.finditer(command, found.end())
            }
            line = first_line + text.count("\n", 0, start + found.start())
            yield LauncherCall(tool=tool, line=line, options=options)


def _in_comment(text: str, offset: int) -> bool:
    """Return True in a line that is a comment."""
    return text[text.rfind("\n", 0, offset) + 1 : offset + 1].lstrip().startswith("#")


def _scan(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the offsets after each complete command, and the spans in which nothing is expanded."""
    breaks: list[int] = []
    protected: list[tuple[int, int]] = []
    waiting: list[re.Match[str]] = []
    at = 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found[0][0] in "'#":
            protected.append(found.span())
        elif found[0][0] == "<":
            waiting.append(found)
        elif found[0] == "\n":
            for start in waiting:  # the bodies of here-documents; one with a quoted end is protected
                indent = "[ \t]*" if start[1] else ""
                end = re.compile(rf"^{indent}{re.escape(start[3])}[ \t]*$\n?", re.MULTILINE).search(text, at)
                stop = len(text) if end is None else end.end()
                protected += [(at, stop)] if start[2] else []
                at = stop
            waiting = []
            breaks.append(at)
    return breaks, protected

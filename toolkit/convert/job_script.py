"""A shell script that starts training, as far as we look at it: sbatch directives, launchers, quoting.

>>> script = read_script("#SBATCH --nodes=2\\nsrun torchrun --nnodes=2 \\\\\\n  train.py --bf16\\n")
>>> call = script.launches[0]
>>> script.nodes, call.tool, call.options["nnodes"], call.script, call.arguments
(2, 'torchrun', '2', 'train.py', {'bf16': (None, 3)})

Nothing is executed, and no more of the shell's grammar is read than quotes, comments, continued lines, here-documents
and variables that one line sets to plain text.
"""

import ast
import contextlib
import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.files.documents import read_table
from toolkit.presets.known_keys import ACCELERATE_BLOCKS

MAX_LAUNCHES, MAX_WORDS = 200, 2000  # of one script, and of one launch: each rule looks at each
SCRIPT_SUFFIXES = (".sbatch", ".slurm", ".sh", ".bash")
_DIRECTIVES = re.compile(r"^#SBATCH(?=[ \t])[^\n]*?(?=[ \t]#|$)", re.MULTILINE)
_DIRECTIVE = re.compile(r"(?<=[ \t])(--[\w-]+|-[A-Za-z])(?:=[ \t]*|[ \t]+(?!-)|(?<=[ \t]-[A-Za-z])|(?=\s|$))([^\s#]*)")
DIRECTIVE_NAMES = {"N": "nodes", "n": "ntasks", "t": "time", "o": "output", "tasks-per-node": "ntasks-per-node"}
PYTHON = "python"
ENGINE_FLAGS = {"use-deepspeed": "DEEPSPEED", "use-fsdp": "FSDP", "multi-gpu": "MULTI_GPU"}  # of accelerate launch
PROGRAMS = ("trl", "axolotl", "llamafactory-cli", "swift", "verl", "openrlhf")  # launchers that train themselves
_NOT_STARTED = re.compile(
    r"^\s*(?:echo|printf|pip3?|conda|which|type|pkill|pgrep|killall|grep|sed|awk|\$\{?SED)\b|\bcommand\s+-v\s+\S*$"
    r"|[\"'][ \t]*--?\w[^\"']*$|^[ \t]*cat[ \t]*<<[^>|\n]*\n"  # a string of options, and a text for people
)
# A string inside of a string. As an empty one and a string it has the same length and stays a part of its word.
_ESCAPED_STRING = re.compile(r'\\"((?:[^"\\]|\\[^"])*)\\"')
# An escaped character, a string in single or double quotes, a comment, the start of a here-document, the end of a line.
_TOKEN = re.compile(
    r"""\\.|'[^']*+'?|"(?:\\.|[^"\\])*+"?|(?<![^ \t\n;])\#[^\n]*|(?<!<)<<(-?)[ \t]*(['"]?)([A-Za-z_]\w*)\2|\n""",
    re.DOTALL,
)
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+)?[\w-]+[ \t]*\(\)[ \t]*\{.*?^[ \t]*\}", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]{0,999}+\)){0,999}+\)){0,999}+\)"
_PIECE = re.compile(
    r"""(?P<space>(?:[ \t]|\\\r?\n)+)|(?P<end>[\n;|)&>`]|<(?![A-Za-z_]\w*>)|[0-9]>|(?<![^\s])\#)"""
    rf"""|<\w+>|\\.|'[^']*'|"(?:\\.|[^"\\])*"|{_SUBSTITUTION}|\$\{{[^}}]*\}}|[^\s\\'";|)&<>`$]+|\$""",
    re.DOTALL,
)
# Behind the bracket that begins an array, to the one that ends it: `$(( ))` and comments have brackets too.
_STRINGS = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
ARRAY_WORDS = rf"""(?:(?<![^\s(])\#[^\n]*+|{_SUBSTITUTION}|\\.|{_STRINGS}|[^()'"\#\\]|(?<=[^\s(])\#)*+"""
_ASSIGNMENT = re.compile(
    r"""^[ \t]*(?:(export|local|readonly|declare(?:[ \t]+-\w+)*)[ \t]+)?([A-Za-z_]\w*)(\+?)="""
    rf"""(\({ARRAY_WORDS}\)|(?:\\"(?:[^"\\]|\\[^"])*\\"|'[^']*'|"(?:\\.|[^"\\])*"|{_SUBSTITUTION}|[^\s;'"])*)""",
    re.MULTILINE | re.DOTALL,
)
_SET_ANYWHERE = re.compile(r"(?<![\w$./{-])([A-Za-z_]\w*)\+?=(?!=)")
_SET_TO_OPTION = re.compile(r"(?<![\w$./{-])([A-Za-z_]\w*)\+?=[\"']?[ \t]*--\w")
# A block's first word, its last, and, without a group, where another of its branches begins.
_BLOCK = re.compile(r"^[ \t]*(?:(if|for|while|until|case)|(fi|done|esac)|else|elif)\b|;;", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\]|:?[-=][^{}]*)?\}|(\w+))")
_SEPARATOR, _STRING = re.compile(r"&&|\|\||;"), re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_MANY_WORDS = re.compile(r"\$\{?(?:\w*(?:ARG|OPT|FLAG|EXTRA|PARAM)\w*(?:\[[@*]\])?|[@*]|\w+\[[@*]\])\}?$", re.I)
# A variable with a default, which is taken where the script does not assign it, and what bash computes.
DEFAULT = re.compile(r"\"?\$\{\w+:?[-=][\"']?([^{}$\"']*)[\"']?\}\"?")
_ARITHMETIC = re.compile(r"\$\((?:\(|expr\s)([\w\s${}()*/%+\\:\"'-]*?)\)\)?(?!\))")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
PROCESSES_AND_NODES = {"torchrun": ("nproc-per-node", "nnodes"), "deepspeed": ("num-gpus", "num-nodes")}
COUNT_VARIABLES = ("NPROC_PER_NODE", "NNODES")  # of LLaMA-Factory and ms-swift
PREFIXED = ("dynamo_", "fp8_")  # how options begin that the YAML has in blocks of other keys
PAIR = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")  # of OmegaConf and Hydra
# A variable that holds a program alone, or has it for a default, and the use of one.
_PROGRAM = re.compile(r"(?m)^[ \t]*(\w+)=\W{0,4}(?:\w+:-)?(?:[\w./-]*/)?(swift|deepspeed|trl|axolotl)\W{0,3}$")
_USED = re.compile(r"(\"?)\$\{?(\w+)(?:\[[@*]\])?\}?\1(?=[ \t])")
MAX_LINES = 200  # of a command
MAX_ARITHMETIC, MAX_DEPTH = 100, 3  # characters, and variables in a variable's
# A command's lines, and those that a comment, or a backslash that is missing, has cut off.
_AND_LOST = re.compile(r"[^\n]*(?:(?<=\\)\n[^\n]*|\n[ \t]*(?:\#|--\w)[^\n]*)*")
_WRITTEN = re.compile(r">\s*[\"']?([^\s\"'<>]+\.(?:json|ya?ml))\b")


@functools.cache
def launcher_tables() -> Mapping[str, Any]:
    """Return the options of launchers and the variables that libraries read, as `tables/launchers.yaml` lists them."""
    return dict(read_table(f"{Path(__file__).parent}/tables/launchers"))


_LAUNCHERS = {tool: re.compile(pattern) for tool, pattern in launcher_tables()["launchers"].items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherCall:
    """One call of a launcher."""

    tool: str  # a key of _LAUNCHERS
    line: int
    options: dict[str, str | None]  # names with dashes, without the two in front; None for a flag without a value
    script: str | None = None  # the file or module that it starts, or the command of a program that trains itself
    arguments: dict[str, tuple[Any, int]] = field(default_factory=dict)  # name -> value (None: a flag) and line
    words: tuple[str, ...] = ()  # of the arguments
    is_complete: bool = True  # False where a variable may stand for more words
    before: str = ""  # the words of its command in front of it, srun's options, for one, and what its line exports

    @property
    def as_yaml(self) -> dict[str, Any]:
        """The flags of `accelerate launch` under the dotted keys of its YAML; of some, rules about scripts speak."""
        options = self.options if self.tool == "accelerate" else {}
        engines = [kind for flag, kind in ENGINE_FLAGS.items() if flag in options]
        found: dict[str, Any] = {"distributed_type": engines[0]} if engines else {}
        for name, value in ((option.replace("-", "_"), value) for option, value in options.items()):
            block = next((block for block, keys in reversed(ACCELERATE_BLOCKS.items()) if name in keys), None)
            if block is None and name.startswith(PREFIXED):
                block = f"{name.partition('_')[0]}_config"
            if block is not None and name not in launcher_tables()["told_by_flags"]:
                found[f"{block}.{name}".lstrip(".")] = True if value is None else value
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """What the rules ask of a script."""

    text: str
    first_line: int  # the line of the file in which the text begins
    directives: dict[str, tuple[str, int]]  # sbatch's directives: value and line
    launches: tuple[LauncherCall, ...]
    alone: tuple[LauncherCall, ...] = ()  # scripts with the Trainer's arguments that no launcher starts
    nodes: int | None = None  # nodes of the job, the most of them where it is a range; None where the file does not say
    protected: tuple[tuple[int, int], ...] = ()  # spans of the text in which this shell expands nothing
    strings: tuple[tuple[int, int], ...] = ()  # spans in double quotes
    commands: tuple[tuple[int, int], ...] = ()  # each with its continued lines and here-documents
    files: tuple[tuple[str, str, int], ...] = ()  # that here-documents write: name, text, line before the text

    @property
    def calls(self) -> tuple[LauncherCall, ...]:
        """Every start of a training, with a launcher or without."""
        return (*self.launches, *self.alone)

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
            if not in_comment(self.text, found.start()):
                yield found, self.line_at(found.start())

    def mentions(self, pattern: str) -> bool:
        """Return True if a pattern occurs outside of comments."""
        return next(self.find(pattern), None) is not None


EMPTY_SCRIPT = JobScript(text="", first_line=1, directives={}, launches=())


def read_script(text: str, *, first_line: int = 1, nodes: int | None = None) -> JobScript:
    """Read a script; `nodes` is the number of nodes where another part of the file says it."""
    directives = {}
    for found in itertools.chain(*(_DIRECTIVE.finditer(text, *line.span()) for line in _DIRECTIVES.finditer(text))):
        name = found[1].lstrip("-")
        directives[DIRECTIVE_NAMES.get(name, name)] = found[2], text.count("\n", 0, found.start()) + first_line
    breaks, protected, strings, files = _scan(text)
    if "export -f" in text:  # run by another shell, on the node
        protected += [found.span() for found in _FUNCTION.finditer(text)]
    if nodes is None and "nodes" in directives:
        counts = re.findall("[0-9]+", directives["nodes"][0])
        nodes = max((int(count[:9]) for count in counts), default=None)
    commands = tuple(itertools.pairwise([0, *breaks, len(text)]))
    calls = list(itertools.islice(_launches(text, commands, first_line), MAX_LAUNCHES))
    known = launcher_tables()["of_trainer"]
    lines = text.split("\n")

    def trains(call: LauncherCall) -> bool:
        there = _AND_LOST.match("\n".join(lines[call.line - first_line :][:MAX_LINES])) if call.tool == PYTHON else None
        return there is not None and len({*call.arguments, *re.findall(r"(?m)^[ \t]*--(\w+)", there[0])} & {*known}) > 1

    alone = tuple(filter(trains, calls))
    return JobScript(
        text=text,
        first_line=first_line,
        directives=directives,
        launches=tuple(call for call in calls if call.tool != PYTHON),
        alone=alone,
        nodes=nodes,
        protected=tuple(protected),
        strings=tuple(strings),
        commands=commands,
        files=tuple((name, body, line + first_line - 1) for name, body, line in files),
    )


def read_calls(text: str) -> Iterator[LauncherCall]:
    """Yield every start of a program, by a launcher or by Python; SLURM's number of nodes is the one of the file."""
    breaks, *_ = _scan(text)
    nodes = read_script(text).nodes if "SLURM_" in text else None
    known = {} if nodes is None else dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
    yield from _launches(text, tuple(itertools.pairwise([0, *breaks, len(text)])), 1, known)


def with_exports(call: LauncherCall, text: str) -> LauncherCall:
    """Return a call of a script with the lines in front of it that export variables, each with its text in place."""
    exported = [line for line in text.split("\n")[: call.line - 1] if re.match(r"[ \t]*export[ \t]", line)]
    variables = _variables(text)
    before = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2]) or found[0], call.before)
    return replace(call, before="\n".join([*exported, before]))


def processes_of_call(call: LauncherCall, in_yaml: object = None) -> int | None:
    """Return the number of processes that a launcher starts, where its options, or accelerate's YAML, say it."""
    options, tool = call.options, call.tool
    if tool == "deepspeed" and ("include" in options or ("hostfile" in options and "num-nodes" not in options)):
        included = re.fullmatch(r"[\w.-]+:(\d+(?:,\d+)*)", options.get("include") or "")
        return len(included[1].split(",")) if included else None
    visible = re.findall(r"\bCUDA_VISIBLE_DEVICES=[\"']?(\d+(?:,\d+)*)\b", call.before)[-1:]
    if tool == "deepspeed" and visible and not {"num-gpus", "hostfile", "exclude", "num-nodes"} & options.keys():
        return len(visible[0].split(","))
    if tool in PROCESSES_AND_NODES:
        per_node, nodes = PROCESSES_AND_NODES[tool]
        counts = [_count(options.get(per_node)), _count(options.get(nodes) or 1)]
        return math.prod(map(int, filter(None, counts))) if all(counts) else None
    if tool in ("swift", "llamafactory-cli"):
        said = [re.findall(rf"\b{name}=[\"']?(\d+\b|[^\s\d])", call.before)[-1:] for name in COUNT_VARIABLES]
        counts = [_count(each) for last in said for each in last]
        return math.prod(map(int, filter(None, counts))) if said[0] and all(counts) else None
    if tool == PYTHON:  # one, unless something else starts it on each rank
        return None if re.search(r"\b(?:srun|mpirun|mpiexec|horovodrun|ray)\b", call.before) else 1
    return _count(options.get("num-processes") or in_yaml)


def _count(value: object) -> int | None:
    return int(str(value)) if str(value).isdecimal() else None


def _launches(
    text: str, commands: tuple[tuple[int, int], ...], first_line: int, known: Mapping[str, str] = {}
) -> Iterator[LauncherCall]:
    """Yield the calls in each command, with its continued lines, its quoted lines and its here-documents."""

    def line_at(at: int, word: str = "") -> int:
        if word and text[at : at + 1] == "$" and text.count(word) == 1:  # where the variable is set
            at = text.find(word)
        return first_line + text.count("\n", 0, at)

    held = {found[1]: found[2] for found in _PROGRAM.finditer(text)}  # each in the variable's place, as many letters
    for use in [each for each in _USED.finditer(text) if len(held.get(each[2], each[0])) < len(each[0])]:
        text = text[: use.start()] + held[use[2]].rjust(len(use[0])) + text[use.end() :]
    set_once: Mapping[str, str | None] | None = None
    options = set(_SET_TO_OPTION.findall(text))  # which are words in one branch, and nothing in another
    for start, end in commands:
        command = text[start:end]
        calls = [(found, tool) for tool, pattern in _LAUNCHERS.items() for found in pattern.finditer(command)]
        calls = [each for each in calls if each[1] != PYTHON] or calls  # a launcher may be told of Python
        for found, tool in sorted(calls, key=lambda call: call[0].start()):
            before = command[command.rfind("\n", 0, found.start()) + 1 : found.start()]
            is_comment = command.lstrip().startswith("#") or in_comment(command, found.start())
            if is_comment or _NOT_STARTED.search(before) or _NOT_STARTED.match(command):
                continue
            set_once = _variables(text) if set_once is None else set_once
            set_last = _variables(text[:start], last_counts=True)
            variables = {**known, **set_once, **{name: value for name, value in set_last.items() if value is not None}}
            words = _words_behind(text, (start, end), start + found.end(), variables, options)
            call = replace(
                _read_call(tool, words, line_at, start + found.start()), before=_in_front(command[: found.start()])
            )
            holder = _ASSIGNMENT.match(command) if call.script is None else None
            uses = list(_uses(text, commands, holder[2])) if holder and found.end() <= holder.end() else []
            for base, stop, used, after in uses:
                words_there = [*words, *_words_behind(text, (base, stop), after, variables, options)]
                yield replace(_read_call(tool, words_there, line_at, used), before=_in_front(text[base:used]))
            yield from () if uses else (call,)


def _in_front(text: str) -> str:
    """Return what is in front of a launcher without the earlier commands of its line, but for exports, and for what
    begins the string that it is in."""
    masked = _STRING.sub(lambda string: "_" * len(string[0]), text)
    ends = [0, *(found.end() for found in _SEPARATOR.finditer(masked)), len(text)]
    *others, last = (slice(*span) for span in itertools.pairwise(ends))
    kept = [text[each] for each in others if re.match(r"\s*export\s|.*['\"]", masked[each], re.DOTALL)]
    return "".join(kept) + text[last]


def _uses(text: str, commands: tuple[tuple[int, int], ...], name: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield where a variable with a launcher in it is used: the span of the command, and that of the variable."""
    for start, end in commands:
        command = text[start:end]
        for found in re.finditer(rf"\$(?:{name}\b|\{{{name}(?:\[[@*]\])?\}})", command):
            if not (in_comment(command, found.start()) or _NOT_STARTED.match(command)):
                yield start, end, start + found.start(), start + found.end()


def _words_behind(
    text: str, span: tuple[int, int], at: int, variables: Mapping[str, str | None], options: Collection[str]
) -> list[tuple[str, int, bool]]:
    """Return the words from an offset to the end of its command, or of the string that it is in."""
    command, start = text[slice(*span)], span[0]
    held = _ASSIGNMENT.match(command)
    if held and held[4].startswith("("):  # the words of an array may be on several lines
        inner = re.sub(r"(?<=\s)#[^\n]*", lambda comment: " " * len(comment[0]), command[: held.end()])
        command = inner.replace("\\\n", "  ").replace("\n", " ") + command[held.end() :]
    around = [token for token in _TOKEN.finditer(command) if token[0][0] in "'\""]
    stop = next((each.end() - 1 for each in around if each.start() < at - start < each.end() - 1), len(command))
    in_string = stop < len(command)
    # To the shell that runs the string, two backslashes are one, and continue its line.
    inner = _ESCAPED_STRING.sub(r'"""\1"', command[:stop]).replace("\\\\\n", " \\\n") if in_string else command
    words = _words(inner, at - start, variables, in_string=in_string)
    return [
        ("$@" if is_open and word.strip("${}") in options else word, start + offset, is_open)
        for word, offset, is_open in itertools.islice(words, MAX_WORDS)
    ]


def _read_call(tool: str, words: list[tuple[str, int, bool]], line_at: Any, start: int) -> LauncherCall:
    """Split the words behind a launcher as it splits them: its options, the script, the script's arguments."""
    flags, options, index = launcher_tables()["flags"].get(tool, ()), {}, 0
    complete = True
    while index < len(words) and tool not in PROGRAMS:
        word, _, is_open = words[index]
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        name = launcher_tables()["short"].get(tool, {}).get(name, name)
        has_dash = "-" in word.lstrip("-").partition("=")[0]
        own = f"{name}-" if tool == "deepspeed" and has_dash else name  # DeepSpeed's options have underscores alone
        if not word.startswith("-"):
            if not (is_open and _MANY_WORDS.search(word)):
                break
            complete = False
        elif equals or name in flags or index + 1 == len(words) or words[index + 1][0].startswith("--"):
            options[own] = word.partition("=")[2] if equals else None
        else:
            index += 1
            options[own] = words[index][0]
        index += 1
    script, index = (words[index][0], index + 1) if index < len(words) else (None, index)
    arguments: dict[str, tuple[Any, int]] = {}
    argument: str | None = None
    for word, at, is_open in words[index:]:
        if re.match(r"--\w", word):
            argument, equals, value = word[2:].partition("=")
            argument = argument.replace("-", "_")
            arguments[argument] = value if equals else None, line_at(at, word)
            continue
        has_value = argument is not None and arguments[argument][0] is not None
        if is_open and not PAIR.match(word) and (argument is None or has_value or _MANY_WORDS.search(word)):
            complete = False
        elif argument is not None and (word.strip() or not word):  # an escaped space is nobody's value, and "" is one
            old, line = arguments[argument]
            arguments[argument] = word if old is None else [*(old if isinstance(old, list) else [old]), word], line
    return LauncherCall(
        tool=tool,
        line=line_at(start),
        options=options,
        script=f"{tool} {script}" if tool in PROGRAMS else script,
        arguments=arguments,
        words=tuple(word for word, _, _ in words[index:]),
        is_complete=complete and script is not None,
    )


def _variables(text: str, *, last_counts: bool = False) -> dict[str, str | None]:
    """Return the text of each variable, outside of comments; None for one that has several.

    With `last_counts`, the last text counts of those that are set outside of conditions, loops and functions.
    """
    variables: dict[str, str | None] = {}
    blocks, assignments = list(_BLOCK.finditer(text)), list(itertools.islice(_ASSIGNMENT.finditer(text), 500))
    inside = [(each.start(), bool(each[1]) - bool(each[2])) for each in blocks] if last_counts else []
    branching = [each for each in blocks if (each[1] or each[2]) not in ("for", "while", "until", "done")]
    alternatives = _alternatives(branching, [each for each in assignments if each[3]])
    others = Counter(_SET_ANYWHERE.findall(text))  # behind `;`, `&&` or a pattern of `case` too
    for found in assignments:
        others[found[2]] -= 1
        is_sure = last_counts and found[0][:1] not in " \t" and sum(n for at, n in inside if at < found.start()) <= 0
        is_quoted = found[4][:1] == "(" or re.fullmatch(r"'[^']*'|\"[^\"]*\"", found[4])
        value = found[4][1:-1] if is_quoted else found[4]
        if found[4][:1] == "(":
            value = re.sub(r"(?<!\S)#[^\n]*", "", value)
        elif escaped := _ESCAPED_STRING.fullmatch(value):  # in the string of `bash -c`
            value = escaped[1].replace("\\$", "$")
        value = re.sub(r"^\$\((?:dirname|pwd|realpath|git rev-parse)\b[^()]*\)(?=/)", "$PWD", value)
        computed = r"`|(?<!=)\$\((?!\()" if found[4][:1] == "(" else r"`|\$\((?!\()"  # of an array, as a word's value
        plain = None if re.search(computed, value) or len(value) > 5000 else value.replace("\\\n", " ")
        if found[3]:
            plain = "$@" if found.start() in alternatives else plain  # words of one branch or of another
            plain = None if plain is None or variables.get(found[2]) is None else f"{variables[found[2]]} {plain}"
        elif not is_sure and found[2] in variables and variables[found[2]] != plain:
            plain = None
        variables[found[2]] = plain
    return {name: value if others[name] <= 0 else None for name, value in variables.items()}


def _alternatives(bounds: Sequence[re.Match[str]], appended: Sequence[re.Match[str]]) -> set[int]:
    """Return where words are appended to a variable to which another branch of the same block appends others."""
    blocks: list[list[dict[str, list[int]]]] = []  # the branches of each block that is open
    found: set[int] = set()
    for event in sorted([*bounds, *appended], key=lambda event: event.start()):
        if event.re is _ASSIGNMENT:
            for branches in blocks:
                branches[-1].setdefault(event[2], []).append(event.start())
        elif event[1]:
            blocks.append([{}])
        elif blocks and event[2]:
            branches = blocks.pop()
            for name in {name for branch in branches for name in branch}:
                places = [branch[name] for branch in branches if name in branch]
                found.update(itertools.chain(*places) if len(places) > 1 else ())
        elif blocks:
            blocks[-1].append({})
    return found


def _words(
    text: str, start: int, variables: Mapping[str, str | None], depth: int = 0, *, in_string: bool = False
) -> Iterator[tuple[str, int, bool]]:
    """Yield the words of a command: text, offset, and True where an unquoted variable stands for more of them.

    In a string of another command an escaped variable is one.
    """
    word, begin, is_open, at = None, start, False, start + len(re.match(r"[\"')]*", text[start:])[0])  # type: ignore[index]
    while at < len(text) and (piece := _PIECE.match(text, at)):
        at = piece.end()
        if piece["space"] or piece["end"]:
            if word is not None:
                yield from _expanded(word, begin, is_open, variables, depth)
            word, is_open = None, False
            if piece["end"]:
                return
            continue
        if word is None:
            word, begin = "", piece.start()
        token = piece[0]
        is_open |= token[0] == "$" or (token == "\\$" and in_string)
        is_open |= bool(re.fullmatch(r'"\$(?:@|\{(?:@|\w+\[[@*]\])\})"', token))
        if token[0] in "'\"" and len(token) > 1:
            word += token[1:-1] if token[0] == "'" else re.sub(r'\\(["\\$])', r"\1", token[1:-1])
        else:
            word += token[1:] if token[0] == "\\" else token
    if word is not None:
        yield from _expanded(word, begin, is_open, variables, depth)


def _expanded(
    word: str, begin: int, is_open: bool, variables: Mapping[str, str | None], depth: int
) -> Iterator[tuple[str, int, bool]]:
    """Put the text of known variables in place; a whole word may become several."""

    def text_of(found: re.Match[str]) -> str:
        value = variables.get(found[1] or found[2])
        value = None if value is None else _computed(value, variables)
        return found[0] if value is None or value.startswith("$((") else value  # the name says more than its sum

    word = _computed(word, variables)
    for _ in range(3):
        new = _VARIABLE.sub(text_of, word)
        if (is_open and not new) or len(new) > 20_000:  # an empty word in quotes is one
            return
        if new == word:
            break
        if is_open and depth < 3 and re.search(r"\s", new):
            yield from (
                (text, begin, is_open) for text, _, is_open in _words(new.replace("\n", " "), 0, variables, depth + 1)
            )
            return
        word = new
    yield word, begin, is_open and "$" in word


def _computed(text: str, variables: Mapping[str, str | None], depth: int = 0) -> str:
    """Put whole numbers in the place of arithmetic whose variables are known."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if depth < MAX_DEPTH:
                return int(_computed(f"$(({variables.get(name)}))", {**variables, name: None}, depth + 1))
            case ast.BinOp(left=left, op=sign, right=right):
                return _OPERATORS[type(sign)](value(left), value(right))
        raise ValueError(node)

    def number(found: re.Match[str]) -> str:
        names = _VARIABLE.sub(lambda each: name if variables.get(name := each[1] or each[2]) else each[0], found[1])
        expression = re.sub(r"[${}\s\\\"']", "", DEFAULT.sub(r"\1", names)).replace("/", "//")
        with contextlib.suppress(ValueError, KeyError, SyntaxError, ZeroDivisionError, RecursionError):
            return str(value(ast.parse(expression, mode="eval").body))
        return found[0]

    return _ARITHMETIC.sub(number, text) if "$(" in text and len(text) < MAX_ARITHMETIC else text


def in_comment(text: str, offset: int) -> bool:
    """Return True for an offset of a text in a line that is a comment."""
    return text[text.rfind("\n", 0, offset) + 1 : offset + 1].lstrip().startswith("#")


def _scan(
    text: str,
) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]], list[tuple[str, str, int]]]:
    """Return the offsets after each command, spans in which nothing is expanded, strings, and written files."""
    breaks: list[int] = []
    protected: list[tuple[int, int]] = []
    strings: list[tuple[int, int]] = []
    files: list[tuple[str, str, int]] = []
    waiting: list[re.Match[str]] = []
    arrays = [found.span(4) for found in _ASSIGNMENT.finditer(text) if found[4].startswith("(")]
    at = 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found[0][0] in "'#":
            protected.append(found.span())
        elif found[0][0] == '"':
            strings.append(found.span())
        elif found[0][0] == "<":
            waiting.append(found)
        elif found[0] == "\n":
            line = text[text.rfind("\n", 0, at - 1) + 1 : at]
            for start in waiting:  # the bodies of here-documents; one with a quoted end is protected
                indent = "[ \t]*" if start[1] else ""
                end = re.compile(rf"^{indent}{re.escape(start[3])}[ \t]*$\n?", re.MULTILINE).search(text, at)
                stop = len(text) if end is None else end.end()
                protected += [(at, stop)] if start[2] else []
                if written := _WRITTEN.search(line):
                    body = text[at : stop if end is None else end.start()]
                    files.append((written[1], body, text.count("\n", 0, at) + 1))
                at = stop
            waiting = []
            if not any(start < at <= stop for start, stop in arrays):
                breaks.append(at)
    return breaks, protected, strings, files

"""Rules about the shell around a launcher: lost lines, quotes, variables, and words that reach another program."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from toolkit.convert.job_script import (
    ARRAY_WORDS,
    DEFAULT,
    ENGINE_FLAGS,
    PROGRAMS,
    JobScript,
    LauncherCall,
    launcher_tables,
)
from toolkit.errors import ToolkitError, nearest
from toolkit.files.documents import read_text
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.document import SBATCH, SCRIPTS, SKYPILOT, SUFFIXES, Document, accelerate_file, named_settings
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import LINT_TABLES, find_named, project_source, scripts_named, source_of
from toolkit.lint.rules.kubernetes import refusals
from toolkit.lint.rules.settings import as_enum, as_int, is_template, shorten
from toolkit.lint.script_options import is_refused, options_of

ARRAY = re.compile(rf"\w\+?=\({ARRAY_WORDS}\)?", re.DOTALL)
LOST = re.compile(r"\s*(2>&1|--[A-Za-z][\w-]*|\+*[A-Za-z_]\w*(?:\.\w+)+=\S*)(?![\w-]*(?:=[^\s)]*)?\s*(?:\|[^)\n]*)?\))")
BLANK_BEHIND = re.compile(r"^[^#\n]*\s\\[ \t]+\n?\Z", re.MULTILINE)  # behind a backslash, which then continues nothing
ONLY_ASSIGNED = re.compile(r"\s*(?:export\s+)?(?>\w+=(?:\$\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s\"';&|])*+[\s\\]*)*+")
FIRST_WORD = re.compile(r"\s*([\w./$\"'-][^\s;]*)")
TYPOGRAPHIC = re.compile(r"[“”‘’]|(?<=\s)[–—](?=-?\w)")
A_COMMAND = re.compile(r"(?:^|\s)(?:[–—-]{1,2}\w|\w+=)")  # with an option or an assignment, unlike prose
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|[^\s;&|\"']*)"
# With one value; prose has more words.
BLANK_ASSIGNED = re.compile(
    rf"\s*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]+=(?![=~])[ \t]*(?!\s){_VALUE}[ \t]*(?:[;#&|\n]|\Z)"
)
# On a line of their own, or in front of `;`.
ASSIGNED = re.compile(
    rf"^[ \t]*((?:[A-Z_][A-Z0-9_]*={_VALUE}(?:[ \t;]|\\\n)*)+)(?:(?:#.*)?$|(?<=;)|(?<=;[ ]))", re.MULTILINE
)
AS_UNSET = re.compile(r"WANDB_MODE=\W?online\b|(?:\w+_OFFLINE|NCCL_\w+_DISABLE|WANDB_DISABLED)=\W?(?:0|false)\b", re.I)
READ_BY_LIBRARIES = re.compile(r"^[ \t]*(?:export[ \t]+)?((FSDP|ACCELERATE)_(\w+))=", re.M)
UNIX_ENDS = "`dos2unix`, or `sed -i 's/\\r$//'`"
TIMEOUTS = LINT_TABLES["unread_timeouts"]  # which people set, and nothing reads
NO_SUCH_LETTER = {("deepspeed", "m"): "`--module`", ("torchrun", "c"): "`--no-python python -c`"}
# A server on a line that begins with it, without a `&` behind it.
SERVER = re.compile(
    r"^(?:\w+=\S*[ \t]+)*(?:uv run |python3? -m )?(vllm serve|trl vllm-serve|(?:vllm|sglang)[\w.]*_server)\b"
    r"(?!(?:[^\n]|(?<=\\)\n)*(?<![&>])&(?![&>\d]))",
    re.MULTILINE,
)
OF_SERVER = {"port": "`GRADIO_SERVER_PORT`, of `api` `API_PORT`", "host": "`GRADIO_SERVER_NAME`, of `api` `API_HOST`"}
NOT_A_SCRIPT = ("true", "false", "yes", "no", "on", "off")


# Variables that have an effect where a process inherits them.
INHERITED = {name for names in launcher_tables()["exported"].values() for name in names}


def in_spans(offset: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Return True for an offset inside of one of the spans."""
    return any(start <= offset < end for start, end in spans)


def arrays_and_strings(script: JobScript) -> tuple[tuple[int, int], ...]:
    """Return the spans of a script whose lines are words, and no commands."""
    return (*(found.span() for found in ARRAY.finditer(script.text)), *script.strings, *script.protected)


@rule(ERROR, *SCRIPTS, library="bash", fix="a backslash at the very end of the line before")
def lost_line(doc: Document) -> Iterator[Match]:
    """bash takes a line that begins with an option for a command: the launcher starts without it. The backslash
    before it is missing, or followed by a space, a comment, a blank line or a Windows line end. Behind a backslash and
    a space any line is lost.
    """
    script, words = doc.script, arrays_and_strings(doc.script)
    lost = -1  # where the last lost line ends: those that follow it are lost with it
    is_job = script.calls or doc.kind == SBATCH
    for (first, _), (start, end) in itertools.pairwise(((0, 0), *script.commands)) if is_job else ():
        found = LOST.match(script.text, start, end)
        if BLANK_BEHIND.search(script.text, max(0, start - 500), start):
            found = FIRST_WORD.match(script.text, start, end)
        if found and not in_spans(start, words):
            follows = start == lost
            is_log = found[1].startswith(("2>", ">", "|"))
            lost = lost if is_log else end
            if follows:
                continue
            line, before = script.line_at(found.start(1)), script.text[:start]
            message = f"continues nothing: bash runs {found[1]} as a command, and the launcher does not get it"
            if re.match(r"\w+=", found[1]) and ONLY_ASSIGNED.fullmatch(script.text, first, start):
                message = "what stands in front of it ends there: its variables do not reach the launcher"
            code = re.sub(r"(?m)(?:^[ \t]*#[^\n]*\n)+\Z", "", before)  # in front of the comments
            fix = "end the line before with a backslash, and nothing behind it"
            if len(code) < start:
                fix = "no comment between the lines: it ends the command"
                fix += "" if code.endswith("\\\n") else "; and a backslash at the end of the line before it"
            if before.endswith("\n\n") and not before.rstrip().endswith("\\"):
                fix = "move it into the command that it is for, or remove it"
            if before.endswith("\\\r\n"):
                message = "continues nothing, and so does each line like it: the file has Windows' line ends, and bash"
                yield Match(found[1], f"{message} runs {found[1]} as a command", UNIX_ENDS, line=line)
                return
            yield Match(found[1], message, fix, line=line, level=WARNING if is_log else None)
    for found, line in script.find(r"(?<=\s)\\[ \t]+(?=--?\w)") if script.calls else ():
        if not in_spans(found.start(), (*script.strings, *script.protected)):
            message = "is a word with a space to bash, and reaches the program as an argument"
            yield Match("\\", message, "a line break behind the backslash, or no backslash", line=line)
    if script.calls and script.text.count("\r\n") * 2 > script.text.count("\n"):
        message = "the file has Windows' line ends: each last word has one"
        yield Match("\\r", message, UNIX_ENDS, line=script.first_line)


@rule(ERROR, *SCRIPTS, library="bash", fix="no blanks around =")
def blank_in_assignment(doc: Document) -> Iterator[Match]:
    """With blanks around `=` bash assigns nothing."""
    script, words = doc.script, arrays_and_strings(doc.script)
    for start, end in script.commands if script.calls else ():
        found = BLANK_ASSIGNED.match(script.text, start, end)
        if found and not in_spans(start, words):
            message, line = "blanks stand around `=`: bash assigns nothing", script.line_at(found.start(1))
            is_read = found[1] in INHERITED or script.mentions(rf"\$\{{?{found[1]}\b|\bset[ \t]+-\w*e|\bexport\b")
            yield Match(found[1], message, f"`{found[1]}=...`", line=line, level=None if is_read else WARNING)


@rule(ERROR, *SCRIPTS, library="torch", fix="a value of that form")
def refused_value(doc: Document) -> Iterator[Match]:
    """Another form is refused: by the launcher, sbatch, Kubernetes or the library that reads the variable; NCCL passes
    over it.
    """
    yield from refusals(doc) if doc.script.calls else ()
    script, table = doc.script, launcher_tables()["forms"]
    said = [
        (f"--{option}", call.options.get(option) or "", each, call.line)
        for call in script.launches
        for option, each in table.get(call.tool, {}).items()
    ]
    for found, line in script.find(r"(?<![\w-])([A-Z][A-Z0-9_]{5,})=[\"']?([^\s\"';|&)]+)") if script.calls else ():
        if found[1] in table["variables"]:
            said.append((found[1], found[2], table["variables"][found[1]], line))
    for name, each in table["sbatch"].items() if doc.kind == SBATCH else ():
        value, line = script.directives.get(name, ("", 0))
        said.append((f"--{name}", value.strip("\"'"), each, line))
    for name, value, each, line in said:
        if value and not (is_template(value) or re.search(r"[<{`%]", value) or re.fullmatch(each["form"], value)):
            library = each.get("library", "torch")
            message, level = f"{shorten(value)} {each['effect']}", each.get("level")
            yield Match(name, message, each["fix"], line=line, library=library, level=level)


@rule(ERROR, *SCRIPTS, library="bash", fix="straight quotes and plain dashes")
def typographic_quotes(doc: Document) -> Iterator[Match]:
    """To bash typographic quotes are letters."""
    script = doc.script
    for start, end in script.commands if script.calls else ():
        found = TYPOGRAPHIC.search(script.text, start, end)
        command = script.text[start:end]
        is_said = re.match(r"\s*(?:echo|printf)\b", command) or "<<" in command or not A_COMMAND.search(command)
        if found and not is_said and not in_spans(found.start(), (*script.strings, *script.protected)):
            line = script.line_at(found.start())
            yield Match(found[0], f"{found[0]} is a letter to bash", "`\"`, `'` or `-`", line=line)


@rule(WARNING, *SCRIPTS, library="bash", fix="export NAME=VALUE")
def not_exported(doc: Document) -> Iterator[Match]:
    """A variable that is not exported stays in this shell: launcher and ranks do not have it."""
    script, table = doc.script, launcher_tables()["exported"]
    if not script.calls or script.mentions(r"^\s*set\s+(?:-a|-o\s+allexport)"):
        return
    names = {name for tool in ("all", *(call.tool for call in script.calls)) for name in table.get(tool, ())}
    if script.mentions(r"\bexport\b.*\bWANDB_(?:DISABLED=[\"']?(?:true|1)\b|MODE=[\"']?(?:disabled|offline|dryrun)\b)"):
        names -= {"WANDB_API_KEY"}
    reported = set()
    for found in ASSIGNED.finditer(script.text):
        for place in re.finditer(r"(?<![\w$])([A-Z_][A-Z0-9_]*)=", found[1]):
            name, quotes = place[1], found[1][: place.start()].count('"')
            is_continued = script.text[max(0, found.start() - 2) : found.start()] == "\\\n"
            if name not in names or name in reported or is_continued or quotes % 2:
                continue
            is_string = in_spans(found.start(), arrays_and_strings(script))
            if is_string or script.mentions(
                rf"(?<!\b{name}=)(?<!\b{name}=[\"'])\$\{{?{name}\b|\b(?:export|declare\s+-\w*x\w*)\b[^\n;]*\b{name}\b"
            ):
                continue
            if any(re.search(rf"(?<!\w){name}=", call.before) for call in script.launches):
                continue
            reported.add(name)
            of_slurm = name == "CUDA_VISIBLE_DEVICES" and doc.kind == SBATCH  # which exports it
            fix, at = f"`export {name}=...`, or in front of the launcher on its line", found.start(1) + place.start()
            # vLLM's sleep mode refuses expandable segments: the job may run because nothing reads the variable.
            of_vllm = name.endswith("ALLOC_CONF") and "vllm" in f"{script.text}{doc.reader_source}".lower()
            fix = f"{fix}, if vLLM does not sleep; or remove it" if of_vllm else fix
            level = NOTE if of_slurm or of_vllm or AS_UNSET.match(found[1], place.start()) else None
            message = f"{name} is assigned, and not exported: it has no effect unless the environment has it already"
            yield Match(name, message, fix, line=script.line_at(at), level=level)


@rule(WARNING, *SCRIPTS, library="accelerate", fix="the name that accelerate reads")
def unknown_variable(doc: Document) -> Iterator[Match]:
    """Neither accelerate nor transformers reads a variable of this name: the default applies."""
    by_name = {found[1]: found for found in READ_BY_LIBRARIES.finditer(doc.script.text)}
    for found in by_name.values() if doc.script.calls else ():
        known = launcher_tables()["variables"][found[2]]
        used = _is_read(doc, found[1]) or found[3].endswith(("CONFIG", "CONFIG_FILE", "ARGS", "DIR"))
        used |= found[3].startswith(("KT_", "USE_KT"))  # of accelerate-kt
        if found[3] not in known and not used:
            close = nearest(found[3].replace("_LAYER", ""), known, cutoff=0.75)
            fix = f"`{found[2]}_{close}`" if close else "remove it, unless your script reads it"
            yield Match(found[1], "no library reads it", fix, line=doc.script.line_at(found.start(1)))
    others = r"^[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]{7,})=(\w*)"
    for found, line in doc.script.find(others) if doc.script.calls else ():
        close = None if found[1] in TIMEOUTS else nearest(found[1], INHERITED, cutoff=0.95)
        if (close or found[1] in TIMEOUTS) and not (found[1] in INHERITED or _is_read(doc, found[1])):
            is_seen = doc.has_code or any(scripts_named(call.script or "", doc.path) for call in doc.script.launches)
            is_idle = found[2] == "1800" or not is_seen  # the Trainer's default; and some scripts read it
            level = NOTE if found[1] in TIMEOUTS and is_idle else None
            fix = f"`{close}`" if close else "the Trainer's `ddp_timeout`, or init_process_group's `timeout`"
            yield Match(found[1], "no library reads it", fix, line=line, level=level, library="torch")


def _is_read(doc: Document, name: str) -> bool:
    """Return True where the script itself, a program in a here-document, or the project's own code may read it."""
    return bool(re.search(rf"\b{name}\b(?!=)", doc.script.text)) or name in project_source(doc.folder)


@rule(ERROR, *SCRIPTS, library="accelerate", fix="the flag alone")
def flag_with_value(doc: Document) -> Iterator[Match]:
    """The option takes no value: the launcher starts the next word as the script."""
    for call in doc.script.launches if "\r\n" not in doc.script.text else ():
        is_value = str(call.script).lower() in NOT_A_SCRIPT or str(call.script).isdigit()
        is_module = {"m", "module", "no-python"} & call.options.keys() or "$" in str(call.script)
        behind = str(call.script)[-3:] != ".py" and call.words[:1] and call.words[0].endswith(".py") and not is_module
        if call.tool not in PROGRAMS and call.script and (is_value or behind):
            starts_python = Path(call.script).name.startswith("python")
            fix = f"remove `{call.script}`" if starts_python else "the option without a value"
            yield Match(call.tool, f"{call.tool} takes {call.script} for the script", fix, line=call.line)


@rule(ERROR, *SCRIPTS, library="torch", fix="torchrun, and LOCAL_RANK of the environment")
def local_rank_with_dash(doc: Document) -> Iterator[Match]:
    """Since torch 2.0 `torch.distributed.launch` passes `--local-rank=N`, with a dash, to the script. A parser that has
    `--local_rank` alone refuses it."""
    starts = {line for _, line in doc.script.find(r"-m[ \t]+torch\.distributed\.launch\b")}
    for call in doc.script.launches:
        if call.line not in starts or call.tool != "torchrun" or {"use-env", "use_env"} & call.options.keys():
            continue
        script, beside = source_of(call.script or "", doc.path)
        source = script if "ArgumentParser(" in script else f"{script}\n{beside}"
        has_parser = "parse_args(" in script or "--local-rank" not in project_source(doc.folder)
        if has_parser and not re.search(r"--local-rank|parse_known_args|HfArgumentParser|extra_args_provider", source):
            has = "--local_rank" if "--local_rank" in source else "neither this nor --local_rank"
            level = None if "ArgumentParser(" in source and "parse_args(" in source else NOTE  # or a library's parser
            message = f"{call.script} gets --local-rank=N" + (f", and has {has}" if level is None else "")
            starts_ranks = re.search(r"\bmp\.spawn\(|multiprocessing\.spawn\(", source)
            fix = "`python`: the script starts its own ranks" if starts_ranks else "`torchrun`, and `LOCAL_RANK`"
            yield Match("--local-rank", message, fix, line=call.line, level=level)


@rule(ERROR, *SCRIPTS, library="bash", fix="NAME=VALUE in front of the command")
def variable_behind_command(doc: Document) -> Iterator[Match]:
    """An assignment sets a variable in front of a command only: behind it, it is an argument of the command."""
    for call in doc.script.launches:
        for word in (call.script or "", *call.words):
            name = word.split()[-1].partition("=")[0] if "=" in word else ""
            if name in INHERITED:
                takes_pairs = re.search("OmegaConf|hydra", "".join(source_of(call.script or "", doc.path)))
                level, fix = NOTE if takes_pairs else None, f"`{name}=...` in front of the command"
                yield Match(name, f"{name} is an argument here", fix, line=call.line, level=level)


@rule(WARNING, *SCRIPTS, library="accelerate", fix="the script's options behind its name")
def unknown_launcher_option(doc: Document) -> Iterator[Match]:
    """A launcher refuses an option in front of the script's name that it lacks: it may be the script's. `deepspeed` has
    `--module`, and no `-m`, and underscores in its names."""
    of_sbatch = launcher_tables()["options"]["sbatch"]
    for name, (_, line) in doc.script.directives.items() if doc.kind == SBATCH and doc.script.launches else ():
        close = nearest(name.replace("_", "-"), of_sbatch, cutoff=0.85) if len(name) > 1 else None
        if close and not any(each.startswith(name) for each in of_sbatch):
            message = "sbatch has no such option, and refuses it"
            yield Match(f"--{name}", message, f"`--{close}`", line=line, level=ERROR, library="slurm")
    for call in doc.script.launches:
        known = launcher_tables()["options"].get(call.tool, ())
        for name in call.options if known else ():
            if fix := NO_SUCH_LETTER.get((call.tool, name)):
                message = f"{call.tool} has no -{name}, and refuses it"
                yield Match(f"-{name}", message, fix, line=call.line, level=ERROR)
            is_name = re.fullmatch("[a-z][a-z0-9-]{2,}", name)
            is_known = name in known if call.tool == "accelerate" else any(each.startswith(name) for each in known)
            if is_name and not is_known and call.script:
                option = f"--{name.rstrip('-').replace('-', '_')}"
                is_script = re.search(r"\.py$|^\$|/", call.script or "") or {"m", "module"} & call.options.keys()
                fix = f"behind {call.script}, if it is the script's" if is_script else "the script in front of it"
                former = launcher_tables()["former"].get(call.tool, {}).get(name)
                if present := former or nearest(name, known, cutoff=0.9):
                    fix = f"`--{present.replace('-', '_')}`"
                message, has_dash = f"{call.tool} has no such option, and refuses it", name.rstrip("-") in known
                message, fix = ("refused with dashes", f"`{option}`") if has_dash else (message, fix)
                yield Match(option, message, fix, line=call.line, level=ERROR if has_dash else None)


def file_behind(call: LauncherCall) -> str:
    """Return the configuration that stands right behind a script's name, empty where there is none."""
    first = call.words[0] if call.words else ""
    return first if first.endswith(SUFFIXES) and not first.startswith("-") else ""


@rule(ERROR, *SCRIPTS, library="transformers", fix="--config in front of the file, where the parser has it")
def file_not_read(doc: Document) -> Iterator[Match]:
    """A parser refuses a file's path behind the script's name unless the script reads it: TRL's `TrlParser` takes
    it behind `--config` alone, and `parse_args_into_dataclasses` of transformers takes none."""
    for call in doc.script.launches:
        first = file_behind(call)
        if call.tool in PROGRAMS or not first:
            continue
        source, beside = source_of(call.script or "", doc.path)
        reads = r"parse_(?:yaml|json)_file|parse_known_args|sys\.argv|H4ArgumentParser|read_args|OmegaConf|args_file"
        refuses = re.search(r"TrlParser\(|parse_args_into_dataclasses\(\)", source)
        if refuses and not re.search(reads, source + beside):
            fix = f"`--config {first}`" if "TrlParser(" in source else "its settings as arguments"
            yield Match(first, f"{call.script} does not read it, and refuses the word", fix, line=call.line)


@rule(ERROR, *SCRIPTS, library="llamafactory", fix="name=value")
def option_behind_file(doc: Document) -> Iterator[Match]:
    """Behind a file LLaMA-Factory reads `name=value` alone: to its parser `--name` is a setting that nothing has."""
    for call in doc.script.launches:
        if call.tool == "llamafactory-cli" and named_settings(call).endswith(SUFFIXES):
            for name, (value, line) in call.arguments.items():
                shown = "true" if value is None else shorten(value)
                fix = f"`{name}={shown}`" if name not in OF_SERVER else f"remove it; a variable is {OF_SERVER[name]}"
                yield Match(f"--{name}", "refused behind a file", fix, line=line)


@rule(ERROR, *SCRIPTS, library="accelerate", fix="one engine, in the YAML or as a flag")
def two_engines(doc: Document) -> Iterator[Match]:
    """A flag for one engine (`--multi_gpu`) turns the YAML's off. `accelerate launch` refuses two such flags."""
    for call in doc.script.launches:
        flags = [name for name in reversed(ENGINE_FLAGS) if name in call.options] if call.tool == "accelerate" else []
        named = accelerate_file(doc, call) if flags else None
        engine = as_enum(named.get("distributed_type")) if named else ""
        is_other = engine in ("FSDP", "DEEPSPEED") and flags and engine != ENGINE_FLAGS[flags[0]]
        if len(flags) > 1 or is_other:
            runs = f"{engine} of the file is off: the run is {ENGINE_FLAGS[flags[0]]}"
            message = runs if len(flags) == 1 else f"refused together with --{flags[1].replace('-', '_')}"
            yield Match(f"--{flags[0].replace('-', '_')}", message, "one engine", line=call.line)


@rule(ERROR, *SCRIPTS, library="ms-swift", fix="NPROC_PER_NODE: as many as GPUs")
def one_process_for_gpus(doc: Document) -> Iterator[Match]:
    """Without `NPROC_PER_NODE` ms-swift starts one process for all GPUs, and refuses DeepSpeed and vLLM."""
    is_told = doc.script.mentions("NPROC_PER_NODE|NNODES|SWIFT_SINGLE_DEVICE_MODE")
    for call in doc.script.launches if not is_told else ():
        gpus, parts = visible_devices(doc, call)[0], call.arguments.get("sequence_parallel_size") or ("1", 0)
        needs = call.arguments.get("deepspeed") or call.arguments.get("use_vllm") or ("false", 0)
        if call.tool == "swift" and (as_int(parts[0]) or 1) > 1:
            message = f"one process starts, and sequence_parallel_size is {parts[0]}"
            yield Match("NPROC_PER_NODE", message, f"{parts[0]}, or a multiple", line=parts[1])
        elif call.tool == "swift" and "," in gpus and str(needs[0]).lower() != "false":
            message, since = "refused: one process has several GPUs", "3.0.0" if "deepspeed" in call.arguments else None
            yield Match("NPROC_PER_NODE", message, "as many as GPUs", line=needs[1], since=since)


@rule(WARNING, *SCRIPTS, library="transformers", fix="the name with its two dashes")
def option_without_dashes(doc: Document) -> Iterator[Match]:
    """A parser refuses a word that is no option, nor its value, and an option with one dash."""
    known = {*trainer_argument_names(), *launcher_tables()["of_trainer"]}
    for call in doc.script.calls:
        for before, word in itertools.pairwise(("", *call.words)):
            name, has_dash = word.partition("=")[0].removeprefix("-"), word[:1] == "-"
            if name not in known or "_" not in name or (before.startswith("-") and not has_dash):
                continue
            source = source_of(call.script or "", doc.path)[0] if has_dash else ""
            if word == name or (has_dash and not re.search(rf"[\"']-{name}\b", source)):
                missing = "with one dash" if has_dash else "without dashes"
                yield Match(word, f"{word} is no option {missing}: it is refused", f"`--{name}`", line=call.line)


def passes_local_rank(call: LauncherCall) -> bool:
    """Return True for `deepspeed`, unless MPI or SLURM starts the ranks, or an option says that it passes none."""
    is_own = (call.options.get("launcher") or "pdsh").lower() == "pdsh"
    return call.tool == "deepspeed" and is_own and "no-local-rank" not in call.options


@rule(ERROR, *SCRIPTS, library="transformers", fix="an option that the script has")
def unknown_script_option(doc: Document) -> Iterator[Match]:
    """A parser refuses an option that the script does not have; `deepspeed` passes `--local_rank=N` too."""
    for call in doc.script.calls:
        scripts = scripts_named(call.script or "", doc.path) if call.tool not in PROGRAMS else []
        if any(re.search(r"\b(?:HfArgument|Trl)Parser\(", each) for each, _ in scripts):
            scripts = [] if any(map(doc.has_own_copy, ("trl", "transformers"))) else scripts  # whose classes differ
        written = [word for word in call.words if re.match(r"--\w[^\s$]*(?:=|$)", word)] if scripts else []
        for word in dict.fromkeys(written):
            name = word.partition("=")[0]
            if all(is_refused(word, *each) for each in scripts):
                value, line = call.arguments[name[2:].replace("-", "_")]
                close = nearest(name[2:], {each for source in scripts for each in options_of(*source)}, cutoff=0.85)
                fix = "remove it" if value is None else "the script's own name for it, or remove it"
                fix = f"`--{close}`" if close else fix
                level = WARNING if doc.script.mentions(r"^[ \t]*cd[ \t]+[\"']?/") else None  # to another copy
                yield Match(name, f"{call.script} has no such option, and refuses it", fix, line=line, level=level)
        if passes_local_rank(call) and scripts and all(is_refused("--local_rank", *each) for each in scripts):
            message = f"deepspeed passes --local_rank=N, and {call.script} refuses it"
            yield Match("--local_rank", message, "`deepspeed --no_local_rank`, or `torchrun`", line=call.line)


@rule(ERROR, *SCRIPTS, library="bash", fix="`&` behind it, and a wait until it answers")
def server_in_front(doc: Document) -> Iterator[Match]:
    """A server runs until it is stopped: bash does not come to the training behind it."""
    last = max((call.line for call in doc.script.launches), default=0)
    is_shell = doc.kind == SKYPILOT or not doc.path.endswith(SUFFIXES)  # others have containers, which run at once
    for found in SERVER.finditer(doc.script.text) if is_shell else ():
        line = doc.script.line_at(found.start(1))
        if line < last and not in_spans(found.start(1), (*doc.script.strings, *doc.script.protected)):
            message = "runs until it is stopped: the training behind it never starts"
            yield Match(found[1], message, "`&` at its end, and a wait until it answers", line=line)


@rule(WARNING, *SCRIPTS, library="accelerate", fix="the option in front of the script's name")
def behind_the_script(doc: Document) -> Iterator[Match]:
    """A launcher reads options in front of the script's name only: the others are the script's."""
    for call in doc.script.launches if doc.script.text else ():
        options = launcher_tables()["launcher_options"].get(call.tool, ())
        names = [name for name in call.arguments if name in options and name.replace("_", "-") not in call.options]
        if not names:
            continue
        shared = launcher_tables()["shared_options"].get(call.tool, ())
        source = "\n".join(source_of(call.script or "", doc.path))
        for name in [*names, *(name for name in call.arguments if name in shared)]:
            message = f"{call.script} gets --{name}, {call.tool} does not"
            fix = f"write it in front of {call.script}"
            level = NOTE if name in source else None  # the script has one of that name too
            yield Match(f"--{name}", message, fix, line=call.arguments[name][1], level=level)


@rule(WARNING, *SCRIPTS, library="deepspeed", fix="--include localhost:2,3")
def visible_devices_ignored(doc: Document) -> Iterator[Match]:
    """With `--num_gpus`, `--include` or `--exclude`, `deepspeed` drops `CUDA_VISIBLE_DEVICES` and takes the node's
    first GPUs.
    """
    for call in doc.script.launches:
        gpus, line = visible_devices(doc, call)
        options = call.options.keys() & {"num-gpus", "include", "exclude"}
        first, included = ",".join(map(str, range(gpus.count(",") + 1))), call.options.get("include")
        in_force = gpus in ("", first) or included == f"localhost:{gpus}"
        if call.tool == "deepspeed" and options and not in_force and "hostfile" not in call.options:
            message = f"--{options.pop().replace('-', '_')} makes deepspeed ignore it"
            fix, count = f"`--include localhost:{gpus}`, without --num_gpus", call.options.get("num-gpus")
            if count not in (None, str(gpus.count(",") + 1)):
                fix += f"; or no CUDA_VISIBLE_DEVICES, for {count}"
            yield Match("CUDA_VISIBLE_DEVICES", message, fix, line=line, since="0.8.0")


@rule(WARNING, *SCRIPTS, library="torch", fix="as many processes as GPUs")
def more_processes_than_gpus(doc: Document) -> Iterator[Match]:
    """A rank takes the GPU of its number: where CUDA_VISIBLE_DEVICES lists fewer, CUDA raises ("invalid device
    ordinal"), unless the script shares GPUs.
    """
    for call in doc.script.launches:
        gpus, line = visible_devices(doc, call)
        is_one = call.options.get("num-machines") in (None, "1") and "cpu" not in call.options
        option = {"torchrun": "nproc-per-node", "accelerate": "num-processes" if is_one else ""}.get(call.tool, "")
        said = DEFAULT.fullmatch(call.options.get(option) or "")  # unless the environment has another number
        processes, count, level = as_int(said[1] if said else call.options.get(option)), gpus.count(",") + 1, None
        if file := accelerate_file(doc, call) if gpus and option == "num-processes" else None:
            is_one = (as_int(file.get("num_machines")) or 1) == 1 and as_enum(file.get("distributed_type")) != "NO"
            processes = as_int(call.options.get(option, file.get("num_processes") if is_one else None))
            level = ERROR if is_one else None  # a rank takes its GPU before the script does
        if gpus and processes and processes > count:
            takes_own = re.search(r"Trainer\(|Accelerator\(|set_device\(", source_of(call.script or "", doc.path)[0])
            level = ERROR if takes_own and not said else level
            message, fix = f"{processes} processes, and CUDA_VISIBLE_DEVICES lists {count} GPUs", "as many of both"
            if call.tool == "accelerate" and count == 1 and not call.options.keys() & {*ENGINE_FLAGS, "config-file"}:
                message = f"{processes} processes are asked for: accelerate starts one where it sees one GPU"
                fix = "`--num_processes 1`, or more GPUs"
            yield Match("CUDA_VISIBLE_DEVICES", message, fix, line=line, level=level)


def visible_devices(doc: Document, call: LauncherCall) -> tuple[str, int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists for a launch, and the line; empty where nothing says it."""
    assigned = r"\bCUDA_VISIBLE_DEVICES=[\"']?([0-9][0-9,]*|\$\w+)"
    exported = [
        (found[1], line) for found, line in doc.script.find(rf"\bexport\b[^\n;&|]*{assigned}") if line <= call.line
    ]
    in_front = re.findall(assigned, call.before)[-1:]
    gpus, line = (in_front[0], call.line) if in_front else exported[-1] if exported else ("", 0)
    if gpus.startswith("$"):
        gpus = next((found[1] for found, _ in doc.script.find(rf"\b{gpus[1:]}=[\"']?([\d,]+)")), "")
    return gpus.strip(","), line


@rule(ERROR, *SCRIPTS, library="deepspeed", fix="--include alone")
def include_with_count(doc: Document) -> Iterator[Match]:
    """`deepspeed` refuses `--include` and `--exclude` together with `--num_gpus` and `--num_nodes`."""
    for call in doc.script.launches:
        counts, filters = call.options.keys() & {"num-gpus", "num-nodes"}, call.options.keys() & {"include", "exclude"}
        if call.tool == "deepspeed" and counts and filters:
            message = f"refused together with --{min(counts).replace('-', '_')}"
            yield Match(f"--{min(filters)}", message, f"`--{min(filters)}` alone", line=call.line)


@rule(ERROR, *SCRIPTS, library="deepspeed", fix="what the message names")
def refused_hostfile(doc: Document) -> Iterator[Match]:
    """`deepspeed` refuses a hostfile with another line than `HOST slots=N`, and hosts and GPUs that it lacks."""
    for call in doc.script.launches:
        file = find_named(call.options.get("hostfile") or "", doc.path) if call.tool == "deepspeed" else None
        try:
            lines = [line.strip() for line in read_text(file).splitlines()] if file else []
        except ToolkitError:  # it is no text, and no hostfile
            continue
        entries = {line: re.match(r"(\S+)\s+slots=(\d+)", line) for line in lines if line and not line.startswith("#")}
        for line in [line for line, found in entries.items() if not found]:
            yield Match("--hostfile", f"{shorten(line)} is no entry", "`HOST slots=N`", line=call.line)
        hosts = [found[1] for line in lines if (found := entries.get(line))]
        for host in sorted({host for host in hosts if hosts.count(host) > 1}):
            message = f"{shorten(host)} is there twice: refused"
            yield Match("--hostfile", message, "one line with all of its slots", line=call.line)
        slots = {found[1]: int(found[2]) for found in entries.values() if found}
        for name in ("include", "exclude") if slots else ():
            for part in filter(None, (call.options.get(name) or "").split("@")):
                host, _, gpus = part.partition(":")
                is_listed = host in slots and all(int(n) < slots[host] for n in re.findall(r"\d{1,9}", gpus))
                if not is_listed and "$" not in part:
                    message = f"{shorten(part)}: the hostfile has {slots.get(host, 'no')} slots of {shorten(host)}"
                    yield Match(f"--{name}", message, "its hosts, and slots from 0", line=call.line)


@rule(WARNING, *SCRIPTS, library="deepspeed", fix="torchrun, or --no_local_rank")
def file_behind_local_rank(doc: Document) -> Iterator[Match]:
    """`deepspeed` puts `--local_rank=N` first, where LLaMA-Factory and transformers' examples look for the file."""
    for call in doc.script.launches:
        first = file_behind(call)
        if not (first and passes_local_rank(call)):
            continue
        source = source_of(call.script or "", doc.path)[0]
        reads = r"\bargv\b|\brun_exp\b" + ("" if source else r"|\bsrc/train\.py|\brun_\w+\.py$")
        looks_there = re.search(reads, source or call.script or "")
        if looks_there or not source:
            message = f"--local_rank=N stands in front of {first}"
            fix, level = "`torchrun`, or `deepspeed --no_local_rank`", None if looks_there else NOTE
            yield Match(first, message, fix, line=call.line, level=level)

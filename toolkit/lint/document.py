"""A configuration file as a document: its keys, values and their lines, and the library that reads it.

>>> document = read_text("zero_optimization:\\n  stage: 2\\n", "mine.yaml")
>>> document.kind, document.get("zero_optimization.stage"), document.line("zero_optimization.stage")
('deepspeed', 2, 2)
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.convert import job_script
from toolkit.convert.job_script import EMPTY_SCRIPT, PROGRAMS, SCRIPT_SUFFIXES, JobScript, LauncherCall, read_script
from toolkit.convert.programs import FOREIGN, TOOLKIT, program_of, program_schema, program_schemas, reader_of
from toolkit.errors import ToolkitError, nearest
from toolkit.files import documents
from toolkit.files.documents import CONFIGURATION, LOADER, MAX_YAML_BYTES, YAML_TAG, check_values, check_yaml
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint import named_files
from toolkit.lint.commands_in_yaml import script_of
from toolkit.lint.named_files import LINT_TABLES, declares, find_named, has_own_copy, occurs, project_source
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS
from toolkit.presets.removed_keys import DEEPSPEED_REMOVED, TRAINER_FSDP_KEYS, TRAINING_ARGUMENTS_REMOVED

ACCELERATE, DEEPSPEED, TRAINER, AXOLOTL = "accelerate", "deepspeed", "trainer", "axolotl"
ENGINE_FILES = (ACCELERATE, DEEPSPEED)
VERL, OPENRLHF = "verl", "openrlhf"  # the words behind their modules
OWN_KINDS = {VERL: r"verl main_ppo$", OPENRLHF: r"openrlhf(?:\.cli\.| )train_"}
SCRIPTS = SBATCH, SHELL, SKYPILOT = "sbatch", "shell", "skypilot"
SUFFIXES = (".yaml", ".yml", ".json")
LINTED_SUFFIXES = (*SUFFIXES, *SCRIPT_SUFFIXES)  # of the files that are read in a folder

# Fields of a script's dataclass whose defaults in transformers and TRL the rules count on.
_COUNTED_ON = "eval_strategy|save_strategy|[bf][fp]16|per_device_train_batch_size|gradient_accumulation_steps"
_COUNTED_ON += "|dataloader_num_workers|lr_scheduler_kwargs|num_generations"
OWN_DEFAULT = re.compile(rf"^[ \t]+(?:{_COUNTED_ON})[ \t]*:[^=\n]+=", re.MULTILINE)
SET_BY_SCRIPT = re.compile(rf"(?:\.|\[[\"'])(?:{_COUNTED_ON})(?:[\"']\])?(?:\[[^\]\n]*\])?[ \t]*=(?!=)")
PARSED_TWICE = re.compile(r"\.parse_args_and_config\(.{,200}?\bTrlParser\(", re.DOTALL)

# How a script reads a setting; `torch.seed` and a list with "seed" are other things.
READS = r"[\w\])]\[\s*[\"']NAME[\"']\s*\]|\((?:\w+,)?\s*[\"']NAME[\"']\s*[),]|[\"']NAME[\"'] (?:not )?in\b"
READS += r"|(?i:args?|conf\w*|cfg|opts?|params|settings)[\w.]*\.NAME\b"
# As a script takes a setting out of a file. A copy of the program has the same names, as attributes.
TAKEN = r"(?:\.get\(|\[|(?<!attr)\(\s*\w+,\s*)[\"']{}[\"']"  # also by a function of one's own

CONFLICT = re.compile(r"(?>(.*?)^<{7} )(?>.*?^={7}$)(?>.*?^>{7} )", re.MULTILINE | re.DOTALL)
_ABSENT = object()


class NotAConfiguration(ToolkitError):
    """A file that no library would read as a configuration: a list, a single value, or nothing."""


class MergeConflict(ToolkitError):
    """A file with both sides of a merge: bash stops at the first mark, and no parser takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPosition:
    """Where a key and its value are in a text; spans are character offsets, end exclusive."""

    key: str  # dotted, as `zero_optimization.stage`; an item of a list has its index as a key
    line: int  # 1-based
    key_span: tuple[int, int]
    value_span: tuple[int, int]
    in_braces: bool  # inside YAML flow braces or JSON, where entries are separated by commas
    repeated: bool = False  # an entry before it in the same block has the same key
    dotted: bool = False  # a key at the top level whose own name has a dot


@dataclass(frozen=True, kw_only=True)
class Document:
    """One configuration file. Keys are dotted; an item of a list has its index as a key."""

    path: str
    text: str
    kind: str | None  # `accelerate`, `deepspeed`, `trainer`, `sbatch`, `shell`, `skypilot`, `axolotl`, or None
    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, KeyPosition] = field(default_factory=dict)
    repeated: tuple[KeyPosition, ...] = ()  # keys that repeat one in the same block
    dotted_lines: dict[str, int] = field(default_factory=dict)  # of keys at the top level with a dot in their names
    is_json: bool = False
    deepspeed_json: Document | None = None  # the DeepSpeed JSON that this file names, where it was found, or has itself
    fsdp_json: Document | None = None  # the JSON that `fsdp_config` names; its settings are in `data` too
    launch_config: Document | None = None  # accelerate's YAML that the command line names
    script: JobScript = EMPTY_SCRIPT  # the shell script that this file is or has
    parts: tuple[Document, ...] = ()  # the arguments of each launch in a script, and the files that it writes
    call: LauncherCall | None = None  # the launch that these are the arguments of
    command: Document | None = None  # the launch that names this file, with its own words in place of the file's
    program: str | None = None  # who reads these Trainer arguments; None where the file does not say
    named_by: Document | None = None  # the file or the launch that names this DeepSpeed JSON or accelerate YAML
    source: str = ""  # of the script that a launch starts, and of the Python files beside it, where they are here

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or the default where the key is absent."""
        if self.start is not None and key in self.data:  # a command names the settings of a block so; no file does
            return self.data[key]
        value: Any = self.data
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Return True where a dotted key is present, whatever its value."""
        return self.get(key, _ABSENT) is not _ABSENT

    def block(self, key: str) -> dict[str, Any]:
        """Return a nested mapping; empty where it is absent or something else."""
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    def line(self, key: str) -> int | None:
        """Return the 1-based line of a key, or None where it is absent."""
        position = self.positions.get(key)
        return position.line if position else None

    @property
    def start(self) -> LauncherCall | None:
        """The launch that these are the arguments of, or that names the file."""
        return self.call or (self.command.call if self.command else None)

    def is_flag(self, key: str) -> bool:
        """Return True for a setting that stands on a command line, not in a file."""
        holder = self if self.call else self.command
        return holder is not None and key in holder.positions

    @property
    def is_complete(self) -> bool:
        """False where a variable, a file, or a script's own default may stand for more arguments of a command."""
        named = named_settings(self.call) if self.call else ""
        names_file = named.endswith(SUFFIXES) or named.startswith("$")
        is_all = self.start is None or (self.start.is_complete and not names_file)
        return is_all and not (occurs(OWN_DEFAULT, self.source) or occurs(SET_BY_SCRIPT, self.reader_source))

    @property
    def folder(self) -> Path:
        """The folder of the file, absolute."""
        return Path(self.path).absolute().parent

    def is_declared(self, name: str) -> bool:
        """Return True for an argument that a script has itself: a field of a dataclass of its own, or of its parser.

        For a file, the Python files of its project are looked at: one of them may read it.
        """
        known = trainer_argument_names()
        if self.call is not None and name not in known and sum(each.startswith(name) for each in known) == 1:
            return True  # argparse takes the beginning of one option for it
        if self.call is None or self.call.tool in PROGRAMS or self.program in FOREIGN:
            return declares(project_source(self.folder), name)
        of_a_fork = project_source(self.folder, "training_args.py", "/trl/trainer/")
        imported = named_files.imported_source(self.source, self.folder)
        return any(declares(each, name) for each in (self.source, of_a_fork, imported))

    def is_read(self, name: str) -> bool:
        """Return True for a setting that the script, or the project, reads by this name."""
        pattern = rf"{READS}|\.NAME\b" if "_" in name else READS  # a name of several words is hardly another thing's
        source = self.reader_source
        return name in source and occurs(re.compile(pattern.replace("NAME", re.escape(name))), source)

    def is_read_from_arguments(self, name: str) -> bool:
        """Return True where the project's code reads a setting from its parsed arguments: `args.NAME`."""
        source = project_source(self.folder)
        return name in source and occurs(re.compile(rf"(?:args|config)\.{re.escape(name)}\b"), source)

    def pinned_below(self, library: str, version: str | None) -> str | None:
        """Return what the project asks for where that is a library from before a version; None without a version."""
        script = named_files.installing((self.command or self).text)
        return named_files.pinned_below(self.folder, library, version, script) if version else None

    def has_own_copy(self, library: str) -> bool:
        """Return True where the file's project has the modules of a library itself."""
        return has_own_copy(self.folder, library)

    @property
    def is_guessed(self) -> bool:
        """Return True for a file that nothing names, with many keys that its library does not have, or of a program
        that nothing else in a project of its own code names."""
        if self.program in PROGRAM_NAMES and self.kind == TRAINER and self.has_code:
            schema = program_schema(self.program)
            is_taken = self.call is None and not self.has_own_copy(schema.distribution)
            keys = self.data.keys() & schema.decisive if is_taken else ()
            taken = [key for key in keys if occurs(re.compile(TAKEN.format(re.escape(key))), self.reader_source)]
            if len(taken) > 1 or not self.is_of(self.program):
                return True  # a script takes them out of the file, by their names
        is_axolotls = self.kind == AXOLOTL and not self.is_of("axolotl")
        known = program_schema("axolotl").known if is_axolotls else KNOWN_KEYS.get(self.kind or "", self.data)
        unknown = [key for key in self.data if key not in known and key[:1] != "_"]
        if is_axolotls and not self.data.keys() & AXOLOTL_ROWS and any(key.startswith("data") for key in unknown):
            return True
        return self.named_by is None and len(unknown) > max(MOST_UNKNOWN, len(self.data) / (4 if is_axolotls else 3))

    def is_of(self, program: str) -> bool:
        """Return True where a file, its path, a command, or its project's code or requirements name a program."""
        names, start = PROGRAM_NAMES[program], self.start
        texts = (self.text, Path(self.path).name, str(start.script) if start else "")
        is_named = any(name in text for name in names for text in texts)
        is_named |= start is not None and start.tool in PROGRAMS
        return is_named or named_files.names_program(self.folder, *names)

    @property
    def has_code(self) -> bool:
        """Return True where the script, or a Python file of the file's project, is here: what reads the settings."""
        return bool(self.source or named_files.project_files(self.folder))

    def may_be_older(self, library: str, version: str) -> bool:
        """Return True for a setting in a project, or of a script, that does not ask for this version of a library."""
        is_alone = named_files.project_root(self.folder) is None and not self.has_code
        return not (is_alone or named_files.asks_from(self.folder, library, version))

    @property
    def has_trl_parser(self) -> bool:
        """Return True where the script, or the project, uses TRL's parser and ModelConfig, which refuse other names."""
        return all(name in self.reader_source for name in ("TrlParser(", "ModelConfig")) and not self.is_read_in_parts

    @property
    def is_read_in_parts(self) -> bool:
        """Return True where a script reads the same file with several of TRL's parsers, and may change it."""
        return self.call is None and occurs(PARSED_TWICE, self.reader_source)

    @property
    def reader_source(self) -> str:
        """The source of the script, or that of a file's project."""
        return self.source or project_source(self.folder)

    @property
    def linted(self) -> list[Document]:
        """The document, the parts of it, and the files that it names."""
        named = [each for each in (self.deepspeed_json, self.launch_config) if each is not None]
        return [self, *(inner for each in (*named, *self.parts) for inner in each.linted)]


# -- reading


def load_document(path: Path) -> Document:
    """Read a file, recognise its kind, and read the files that it names.

    Raises ToolkitError for a file that is missing, too large, not text, not YAML or JSON, or not a mapping.
    """
    return with_named_files(_read_file(path))


def with_named_files(document: Document) -> Document:
    """Return the document with the JSON that it names, where that file exists, or that it has itself, and its parts."""
    if document.script.calls:
        written = [_written_file(document, *file) for file in document.script.files]
        called = (_arguments(document, call) for call in document.script.calls)
        files = (_named_file(document, call, written) for call in document.script.calls)
        parts = [each for each in (*written, *called, *files) if each is not None]
        return replace(document, parts=tuple(_with_written(with_named_files(part), parts) for part in parts))
    fsdp = document.get("fsdp_config")
    if document.kind == TRAINER and isinstance(fsdp, str) and (file := find_named(fsdp, document.path)):
        section = _read_file(file, is_section=True)
        data = document.data | {"fsdp_config": section.block("fsdp_config")}
        document = replace(document, data=data, fsdp_json=section)
    value, position = document.get(key := deepspeed_files(document)[0]), document.positions.get(key)
    if position is not None and isinstance(value, str) and value.startswith("{") and document.call is None:
        lines = document.text.count("\n", 0, position.value_span[0]) + (document.text[position.value_span[0]] in "|>")
        inner = read_text("\n" * lines + value, document.path, is_json=True)  # as a block on the lines below
        return replace(document, deepspeed_json=replace(inner, kind=DEEPSPEED, is_json=False))
    named = find_named(deepspeed_files(document)[1], document.path)
    if document.kind in (None, DEEPSPEED) or named is None or named.suffix != ".json":
        return document
    return replace(document, deepspeed_json=replace(_read_file(named), kind=DEEPSPEED, named_by=document))


def _written_file(document: Document, name: str, text: str, line: int) -> Document | None:
    """Return the configuration that a here-document of a script writes; None for one that the shell completes."""
    try:
        written = read_text("\n" * (line - 1) + text, name)
    except ToolkitError:
        return None
    named = replace(written, path=document.path, fsdp_json=None, text=f"{name}\n{written.text}")
    return named if written.kind else None


def _with_written(part: Document, parts: Sequence[Document]) -> Document:
    """Return the arguments of a launch with the DeepSpeed JSON that the same script writes."""
    names = {Path(each.text.partition("\n")[0]).name: each for each in parts if each.call is None}
    written = names.get(Path(deepspeed_files(part)[1] or ".").name)
    if part.call is None or written is None or written.kind != DEEPSPEED:
        return part
    return replace(part, deepspeed_json=written)


def _arguments(document: Document, call: LauncherCall) -> Document | None:
    """Return the words behind a script's name as Trainer arguments; None where nothing says that they are."""
    data = {name: True if value is None else value for name, (value, _) in call.arguments.items()}
    own_kind = next((kind for kind in (VERL, OPENRLHF) if re.match(OWN_KINDS[kind], call.script or "")), None)
    if own_kind is not None:
        data = _values_behind(call)
        places = {name: _place_of(call, name) for name in data}
        return Document(path=document.path, text=document.text, kind=own_kind, data=data, positions=places, call=call)
    # HfArgumentParser has `--no_NAME` for each switch that is on by default.
    off = [name for name in data if name not in _switches() and name.removeprefix("no_") in _switches()]
    renamed = {name: name.removeprefix("no_") for name in off if data[name] is True}
    data = {renamed.get(name, name): False if name in renamed else value for name, value in data.items()}
    own, beside = named_files.source_of(call.script or "", document.path)
    source = own + beside
    imported = named_files.imported_source(own, document.folder)
    others = {name: value for name, value in data.items() if not declares(source, name)}
    program = reader_of(others, script=call.script or "")
    program = program or named_files.reader_in(own, imported, beside, is_trainer=bool(data.keys() & TRAINER_EVIDENCE))
    is_trainer = (program is None and len(data.keys() & TRAINER_EVIDENCE) > 1) or program in (*OUR_PROGRAMS, *FOREIGN)
    launch_config = launch_settings(document, call)
    if not (is_trainer or launch_config):
        return None
    places = {(key := renamed.get(name, name)): _place_on(line, key) for name, (_, line) in call.arguments.items()}
    part = Document(
        path=document.path,
        text=document.text,
        kind=TRAINER if is_trainer else None,
        data=data,
        positions=places,
        call=call,
        program=program,
        source=source,
    )
    return _with_launcher(part, launch_config)


def _with_launcher(part: Document, launch_config: Document | None) -> Document:
    """Return the settings of a launch with what its command says to accelerate."""
    if launch_config is None or launch_config.kind != ACCELERATE:
        return part
    return replace(part, launch_config=replace(launch_config, named_by=part))


def named_settings(call: LauncherCall) -> str:
    """Return the file with a script's settings that a command names: its first word, or behind `--config`; the default
    of a variable."""
    first = call.words[0] if call.words else ""
    return named_files.plain_path(str(call.arguments.get("config", (first, 0))[0]))


def _named_file(document: Document, call: LauncherCall, written: Sequence[Document | None]) -> Document | None:
    """Return the YAML that a command names, with the words behind it in place of the file's; None without one."""
    named = named_settings(call)
    by_name = {Path(each.text.partition("\n")[0]).name: each for each in written if each is not None}
    file = find_named(named, document.path) if named.endswith((".yaml", ".yml")) else None
    settings = by_name.get(Path(named).name)
    with contextlib.suppress(ToolkitError):  # it may be no configuration
        settings = _read_file(file) if file else settings
    if settings is None or settings.kind not in (TRAINER, AXOLOTL):
        return None
    has_pairs = settings.program == "llama-factory"
    behind = {key: value for key, value in _values_behind(call).items() if has_pairs or key in call.arguments}
    data = {**settings.data, **behind}
    data.pop("config", None)
    changed = [name for name in data if data[name] is not settings.get(name)]
    places = {name: _place_of(call, name) for name in changed}
    command = Document(path=document.path, text=document.text, kind=None, call=call, positions=places)
    positions = {key: each for key, each in settings.positions.items() if key.partition(".")[0] not in places}
    program = settings.program or (reader_of(data, script=call.script or "") if settings.kind == TRAINER else None)
    own = named_files.source_of(call.script or "", document.path)[0]
    has_parser = "parse_yaml_file(" in own and not any(name in own for name in PROGRAM_NAMES.get(program or "", ()))
    if program in FOREIGN and has_parser:
        program = None  # the script has a parser of its own, for settings with some of the program's names
    part = replace(settings, data=data, positions=positions, command=command, program=program)
    return _with_launcher(part, launch_settings(document, call))


def _values_behind(call: LauncherCall) -> dict[str, Any]:
    """Return the arguments of a command: `--name value`, and `name=value` as OmegaConf and Hydra read it."""
    pairs = (word.lstrip("+").split("=", 1) for word in call.words if job_script.PAIR.match(word))
    return {name: True if value is None else value for name, (value, _) in call.arguments.items()} | dict(pairs)


def _place_on(line: int, key: str) -> KeyPosition:
    """Return the place of an argument of a command, of which the line alone is known."""
    return KeyPosition(key=key, line=line, key_span=(0, 0), value_span=(0, 0), in_braces=False)


def _place_of(call: LauncherCall, name: str) -> KeyPosition:
    """Return the place of a setting of a command: of an argument its line, of another word that of the launcher."""
    return _place_on(call.arguments.get(name, ("", call.line))[1], name)


def accelerate_file(document: Document, call: LauncherCall) -> Document | None:
    """Return accelerate's configuration that a launch in a script names, where it is here."""
    config = find_named(call.options.get("config-file") or "", document.path)
    return with_named_files(_read_file(config)) if config and config.suffix in SUFFIXES else None


def launch_settings(document: Document, call: LauncherCall) -> Document | None:
    """Return what `accelerate launch` is told, by the YAML that it names and by its flags, which win over the file."""
    file, flags = accelerate_file(document, call), call.as_yaml
    if (not file and not flags) or (file.kind != ACCELERATE if file else "config-file" in call.options):
        return file
    data = {key: value for key, value in file.data.items() if key.replace("_", "-") not in call.options} if file else {}
    if file and not flags and len(data) == len(file.data):
        return file
    for key, value in flags.items():
        block, _, name = key.rpartition(".")
        data |= {block: {**(data.get(block) or {}), name: value}} if block else {name: value}
    told = Document(path=document.path, text=document.text, kind=ACCELERATE, data=data, call=call)
    told = replace(told, positions={key: _place_on(call.line, key) for key in flags})
    return with_named_files(replace(file, data=data, command=told) if file else told)


@functools.cache
def _switches() -> frozenset[str]:
    """Return the arguments of transformers and of the programs that use its parser."""
    return frozenset(trainer_argument_names()).union(*(each.fields for each in program_schemas().values()))


def _read_file(path: Path, *, is_section: bool = False) -> Document:
    return read_text(documents.read_text(path, max_bytes=MAX_YAML_BYTES), str(path), is_section=is_section)


def read_text(text: str, path: str, *, is_json: bool = False, is_section: bool = False) -> Document:
    """Parse a text; the suffix of `path` decides between a script, JSON and YAML, the keys decide its kind.

    `is_section` where `fsdp_config` names the file.
    """
    if path.endswith(".py"):
        hint = f"name what starts it, a script or a YAML; `toolkit rehearse --preset zero2 --script {path}` runs it"
        raise NotAConfiguration(f"{path} is Python, of which lint reads nothing", hint=hint)
    if conflict := CONFLICT.match(text):
        line = conflict[1].count("\n") + 1
        raise MergeConflict(f"{path}, line {line}: a merge conflict is not resolved", hint="keep one side")
    if path.endswith(SCRIPT_SUFFIXES) or (text.startswith("#!") and not path.endswith(SUFFIXES)):
        script = read_script(text)
        # Without sbatch's directives it is a script of training only if it starts a launcher.
        kind = SBATCH if script.directives else SHELL if script.calls else None
        return Document(path=path, text=text, kind=kind, script=script)
    is_json = is_json or path.endswith(".json")
    if not is_json and (commands := script_of(text)) is not None:
        return Document(path=path, text=text, kind=SHELL if commands.calls else None, script=commands)
    data, found = (_parse_json if is_json else _parse_yaml)(text, path)
    if not isinstance(data, dict):
        raise NotAConfiguration(f"{path} contains {type(data).__name__}, expected keys and values")
    is_section = is_section or len(data.keys() & FSDP_SECTION) > max(1, len(data) / 2)
    if is_section:  # of a Trainer's arguments, in a file of its own
        data = {"fsdp": True, "fsdp_config": data}
        found = [replace(position, key=f"fsdp_config.{position.key}") for position in found]
    kind = TRAINER if is_section else detect_kind(data)
    if kind == AXOLOTL and is_json and not data.keys() & AXOLOTL_ROWS:
        kind = None  # what a script has written about a model
    positions = {position.key: position for position in found if not position.dotted}
    firsts = {position.key: position for position in reversed(found)}

    def text_of(position: KeyPosition) -> str:
        return text[slice(*position.value_span)]

    return Document(
        path=path,
        text=text,
        data=data,
        positions=positions,
        repeated=tuple(each for each in found if each.repeated and text_of(each) != text_of(firsts[each.key])),
        dotted_lines={position.key: position.line for position in found if position.dotted},
        is_json=is_json,
        kind=kind,
        script=_task_script(text, data, positions) if kind == SKYPILOT else EMPTY_SCRIPT,
        program=reader_of(data) if kind == TRAINER else None,
    )


def _task_script(text: str, data: dict[str, Any], positions: dict[str, KeyPosition]) -> JobScript:
    """The commands of a SkyPilot task; those of a block begin on the line after its mark."""
    start = positions["run"].value_span[0]
    line = text.count("\n", 0, start) + (2 if text[start] in "|>" else 1)
    nodes = data.get("num_nodes")
    return read_script(data["run"], first_line=line, nodes=nodes if isinstance(nodes, int) else 1)


# -- the position of each key


def _parse_yaml(text: str, path: str) -> tuple[Any, list[KeyPosition]]:
    """Parse YAML without executing anything. A date stays text, every key is text, and an infinity is a value."""
    check_yaml(text, path, CONFIGURATION)
    try:
        root = yaml.compose(text, Loader=LOADER)
        found = [] if root is None else list(_yaml_positions(root, "", path))
        data = None if root is None else yaml.SafeLoader("").construct_document(root)
    except ToolkitError:
        raise
    except Exception as error:  # PyYAML raises KeyError, TypeError and more for scalars like `!!int ''`
        raise documents.not_yaml(path, error) from None
    check_values(data, path, CONFIGURATION, allow_nan=True)
    return data, found


def _parse_json(text: str, path: str) -> tuple[Any, list[KeyPosition]]:
    data = documents.parse_json(text, path, limits=CONFIGURATION, allow_nan=True)
    if not isinstance(data, dict) or not (detect_kind(data) or data.keys() & FSDP_SECTION):
        return data, []  # results and data, of which folders are full: nothing in them is pointed to
    try:
        return data, list(_json_positions(text))
    except RecursionError:  # in a value that a repeated key replaces, which is not among those that were checked
        CONFIGURATION.check(path, values=0, depth=CONFIGURATION.depth + 1)
        raise


def _yaml_positions(node: yaml.Node, key: str, path: str) -> Iterator[KeyPosition]:
    """Yield the position of each key below a node, and mark keys and dates as text."""
    prefix = f"{key}." if key else ""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _yaml_positions(item, f"{prefix}{index}", path)
    elif isinstance(node, yaml.ScalarNode) and node.tag == YAML_TAG + "timestamp":
        node.tag = YAML_TAG + "str"
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                raise ToolkitError(f"{path} has a key that is not a string, on line {line}")
            if key_node.tag == YAML_TAG + "merge":  # a block's keys are merged into this one
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    yield from _yaml_positions(source, key, path)
                continue
            key_node.tag = YAML_TAG + "str"
            yield KeyPosition(
                key=prefix + key_node.value,
                line=key_node.start_mark.line + 1,
                key_span=(key_node.start_mark.index, key_node.end_mark.index),
                value_span=(value_node.start_mark.index, _yaml_end(value_node)),
                in_braces=bool(node.flow_style),
                repeated=key_node.value in names,
                dotted=not key and "." in key_node.value,
            )
            names.add(key_node.value)
            yield from _yaml_positions(value_node, prefix + key_node.value, path)


def _yaml_end(node: yaml.Node) -> int:
    """Return where a value's text ends; the end mark of a block is after the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _json_positions(text: str) -> Iterator[KeyPosition]:
    """Yield the position of each key of a text that the decoder has accepted, so that every brace has its partner."""
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def after_space(at: int) -> int:
        found = _SPACE.match(text, at)
        return found.end() if found else at

    def value(start: int, key: str) -> Generator[KeyPosition, None, int]:
        """Yield the positions in the value that begins at an offset, and return where it ends."""
        if text[start] not in "{[":
            return _DECODER.raw_decode(text, start)[1]
        prefix, index, at = f"{key}." if key else "", 0, after_space(start + 1)
        names: set[str] = set()
        while text[at] not in "}]":
            if text[start] == "[":
                end = yield from value(at, f"{prefix}{index}")
            else:
                name, key_end = _DECODER.raw_decode(text, at)
                colon = after_space(key_end)
                value_start = after_space(colon + 1)
                end = yield from value(value_start, prefix + name)
                yield KeyPosition(
                    key=prefix + name,
                    line=bisect_right(line_starts, at),
                    key_span=(at, key_end),
                    value_span=(value_start, end),
                    in_braces=True,
                    repeated=name in names,
                    dotted=not key and "." in name,
                )
                names.add(name)
            index, at = index + 1, after_space(end)
            at = after_space(at + 1) if text[at] == "," else at
        return at + 1

    yield from value(after_space(0), "")


# -- the files that a configuration names


def deepspeed_files(document: Document) -> tuple[str, str]:
    """Return the key that names the DeepSpeed JSON, and the path that it names; empty where it names none."""
    key = "deepspeed_config.deepspeed_config_file" if document.has("deepspeed_config") else "deepspeed"
    named = document.get(key)
    named = named_files.plain_path(named) if isinstance(named, str) else ""
    if named in ("", "none") or named.startswith("{") or "$" in named:
        return key, ""
    if len(named) > named_files.MAX_PATH_LENGTH or "\0" in named or documents.settings_for_path(named, document.path):
        return key, ""
    return key, named


# -- who reads Trainer arguments

OUR_PROGRAMS = ("transformers", "trl", TOOLKIT)  # whose installed or pinned versions the rules know
# What hardly any script has that does not read TrainingArguments.
TRAINER_EVIDENCE = set(LINT_TABLES["trainer_evidence"])


# -- the kind of a file

# Keys of the section that a Trainer's `fsdp_config` names.
FSDP_SECTION = {name for key in (*TRAINER_FSDP_KEYS, "sharding_strategy") for name in (key, f"fsdp_{key}")}
# Keys of other programs' formats that share key names with `TrainingArguments`.
FOREIGN_KEYS = {"base_model", "snr_results"}
# Keys of what a run, or a model, has left: nobody reads these files as arguments.
RECORD_KEYS = {"_wandb", "wandb_version", "log_history", "architectures"}
MOST_ARGUMENTS = 60  # that somebody writes; transformers and ms-swift record all of them
PROGRAM_NAMES: dict[str, Sequence[str]] = LINT_TABLES["program_names"]
AXOLOTL_ROWS = {"datasets", "pretraining_dataset", "test_datasets"}  # a file with `data_path` instead is a script's
PROGRAM_KINDS = {"axolotl": AXOLOTL, **dict.fromkeys(("trl", *FOREIGN), TRAINER)}
# Keys that several libraries have, which decide nothing unless their value has the shape of one library's.
SHARED_KEYS = set(LINT_TABLES["shared_keys"])
# Keys that a SkyPilot task has beside `run`.
SKYPILOT_KEYS = {"num_nodes", "resources", "file_mounts"}
# Keys that only one library has, each enough to decide: the first library of these.
DECISIVE_KEYS = {
    DEEPSPEED: {"zero_optimization"},
    ACCELERATE: {"distributed_type", "compute_environment", "deepspeed_config", "main_training_function"},
}

KNOWN_KEYS: dict[str, Set[str]] = {
    ACCELERATE: ACCELERATE_BLOCKS[""].keys(),
    DEEPSPEED: DEEPSPEED_BLOCKS[""].keys() | set(DEEPSPEED_REMOVED),
}
MOST_STRAY = 8  # keys that are not DeepSpeed's in a file of its own
MOST_UNKNOWN = 2  # keys of a file that its library does not have, above which a script may read it itself


def detect_kind(data: dict[str, Any]) -> str | None:
    """Return the program that reads these keys: `accelerate`, `deepspeed`, `trainer`, `skypilot`, or None for another.

    >>> detect_kind({"zero_optimization": {"stage": 2}})
    'deepspeed'
    """
    keys = set(data)
    if keys & RECORD_KEYS or len(keys & trainer_argument_names()) > MOST_ARGUMENTS:
        return None
    if isinstance(data.get("run"), str) and keys & SKYPILOT_KEYS:
        return SKYPILOT
    if len(keys & ACCELERATE_BLOCKS[""].keys()) * 2 < len(keys):
        keys -= {"deepspeed_config"}  # a script's own file may have such a block
    block, others = data.get("deepspeed_config"), {*DECISIVE_KEYS[ACCELERATE], "num_processes"} - {"deepspeed_config"}
    if isinstance(block, dict) and "zero_optimization" in block and not keys & others:
        return None  # a script's own, with DeepSpeed's configuration in it
    # Programs with more settings than DeepSpeed's beside them (GPT-NeoX, Megatron) have their own defaults and readers.
    has_more = len(keys - KNOWN_KEYS[DEEPSPEED]) > max(MOST_STRAY, len(keys) / 2)
    for kind, decisive in DECISIVE_KEYS.items():
        if keys & decisive and not keys & FOREIGN_KEYS:
            return None if kind == DEEPSPEED and has_more else kind
    if len(keys) > 2 and keys <= DEEPSPEED_BLOCKS[""].keys() and _kind_by_value(data) == DEEPSPEED:
        return DEEPSPEED
    if all(key.startswith("fsdp_") for key in keys):  # what `fsdp_config` of Trainer arguments names
        return None
    if reader_of(data) == TOOLKIT:
        return TRAINER
    program = program_of(data)
    if program is not None or keys & FOREIGN_KEYS:
        return PROGRAM_KINDS.get(str(program))
    # Where a block has the name of an argument that is a number or a word (`seed: {name: ...}`), it is another thing's.
    blocks = {key for key, value in data.items() if isinstance(value, dict) and not key.endswith(("config", "kwargs"))}
    known_keys = KNOWN_KEYS | {TRAINER: (trainer_argument_names() | set(TRAINING_ARGUMENTS_REMOVED)) - blocks}
    counts = {kind: len((keys & known) - SHARED_KEYS) for kind, known in known_keys.items()}
    best = max(counts, key=lambda kind: counts[kind])
    if counts[best]:
        if best == DEEPSPEED and any(nearest(key, DECISIVE_KEYS[DEEPSPEED], cutoff=0.9) for key in sorted(keys)[:50]):
            return DEEPSPEED
        # A script's own file has batch sizes by DeepSpeed's names too; DeepSpeed's has little else.
        share = 2 if best == DEEPSPEED else 8
        is_one = best == DEEPSPEED and len(data) == len(blocks) == 1  # a part of a configuration, which a script reads
        has_enough = counts[best] * share >= len(keys) or (best == DEEPSPEED == _kind_by_value(data))
        return best if has_enough and not is_one else None
    for kind, decisive in () if (by_value := _kind_by_value(data)) else DECISIVE_KEYS.items():
        if any(nearest(key, decisive, cutoff=0.85) for key in sorted(keys)[:50]):
            return kind
    return by_value


def _kind_by_value(data: dict[str, Any]) -> str | None:
    """Decide by the shape of a value whose key several libraries have."""
    blocks = [data[key] for key in ("bf16", "fp16", "optimizer", "scheduler") if isinstance(data.get(key), dict)]
    if any(block.keys() & {"enabled", "type", "params"} for block in blocks):
        others, has_batch = data.keys() - KNOWN_KEYS[DEEPSPEED], any("batch" in key for key in data)
        return DEEPSPEED if not others or (has_batch and len(others) * 2 <= len(data)) else None
    blocks = [data[key] for key in ("fsdp_config", "parallelism_config") if isinstance(data.get(key), dict)]
    is_hydras = bool(data.keys() & {"defaults", "_target_"})  # a part of another program's configuration
    if not is_hydras and any(key.startswith(("fsdp_", "parallelism_config_")) for block in blocks for key in block):
        return ACCELERATE
    return TRAINER if any(not isinstance(data[key], dict) for key in data.keys() & trainer_argument_names()) else None

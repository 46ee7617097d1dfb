"""Rules about the files of TRL, axolotl, LLaMA-Factory and ms-swift: settings that the program does not have."""

import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.convert.job_script import PROGRAMS, launcher_tables
from toolkit.convert.programs import ProgramSchema, program_of, program_schema
from toolkit.errors import nearest
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.document import AXOLOTL, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import names_program, project_root, scripts_named, scripts_with, source_of
from toolkit.lint.rules.settings import is_grpo, is_template, shorten
from toolkit.lint.script_options import is_refused
from toolkit.presets.removed_keys import TRAINING_ARGUMENTS_REMOVED, TRAINING_ARGUMENTS_REMOVED_IN
from toolkit.versions import version_numbers

DATASET = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")  # of TRL's DatasetConfig
OF_OTHERS = {"dataset_name": "path", "dataset": "path", "subset": "name", "config": "name", "weight": "fraction"}
KEPT_REST = "0.19.0"  # below which TRL's parser keeps what its classes lack to itself
OLDEST_SWIFT = "3.0.0"  # no version from there on had the older names
MISSPELT = 0.93  # alike above which a setting of TRL is taken for a misspelling
# Of what an unknown name stands for, and names of what is reported, not trained.
AXOLOTL_DEFAULTS = {"epochs": 1, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
AXOLOTL_DEFAULTS |= {"bnb_4bit_compute_dtype": "bfloat16"}
OF_REPORTS = ("wandb_", "project_name", "report_to", "logging_", "hub_")
MOST_STRANGE = 2  # settings without a likeness, above which a project may read a file of axolotl itself


@rule(ERROR, AXOLOTL, TRAINER, library="axolotl", fix="a value of that form")
def refused_dataset(doc: Document) -> Iterator[Match]:
    """axolotl or TRL refuses it."""
    if doc.kind == TRAINER:
        yield from _refused_by_trl(doc)
        return
    for block in ("datasets", "test_datasets"):
        entries = doc.get(block) if isinstance(doc.get(block), list) else []
        for entry in filter(lambda each: isinstance(each, dict), entries):
            for key, table in launcher_tables()["forms"]["datasets"].items():
                name, *losses = key.split()
                is_other = doc.get("rl") not in losses if losses else any(map(doc.get, table.get("unless", ())))
                if is_other or (name == "type" and doc.has_own_copy(AXOLOTL)):
                    continue
                outer, _, inner = name.partition(".")
                value = entry.get(outer)
                value = value.get(inner) if inner and isinstance(value, dict) else None if inner else value
                form = re.compile(table["form"], re.VERBOSE)
                if isinstance(value, str) and not (is_template(value) or form.fullmatch(value)):
                    yield Match(block, f"{name} {shorten(value)} {table['effect']}", table["fix"])


def _refused_by_trl(doc: Document) -> Iterator[Match]:
    """Entries that TRL's `DatasetConfig` does not take: a script of one's own may take text, and more names."""
    is_its = doc.start is not None and str(doc.start.script).startswith("trl ")
    level = None if is_its else WARNING
    entries = doc.get("datasets") if is_its or (doc.program == "trl" and is_trls_own(doc)) else []
    entries = entries if isinstance(entries, list) else []
    has_path = any(isinstance(each, dict) and "path" in each for each in entries)
    for entry in entries if is_its or has_path else ():
        names = [str(key) for key in entry if key not in DATASET] if isinstance(entry, dict) else []
        if names:
            instead = OF_OTHERS.get(names[0]) or nearest(names[0][:100], DATASET)
            fix = f"`{instead}`" if instead and instead not in entry else "remove it"
            yield Match("datasets", f"an entry has no `{shorten(names[0])}`", fix, level=level, library="trl")
        elif not isinstance(entry, dict) or "path" not in entry:
            yield Match("datasets", f"{shorten(entry)} has no `path`", "`- path: NAME`", level=level, library="trl")


def _unknown(doc: Document, program: str) -> Iterator[Match]:
    start = doc.start if program == "trl" else doc.call
    is_command = doc.program == program and start is not None and start.tool in PROGRAMS
    if program_of(doc.data) != program and not is_command:
        if program == "trl" and doc.program == "trl" and doc.call is None:
            yield from _old_names(doc)
        return
    if doc.start is not None and doc.kind == TRAINER and doc.program != program != "trl":  # a script with its words
        return
    if program == "trl" and doc.call is not None and doc.program is None and not names_program(doc.folder, "trl"):
        return
    schema = program_schema(program)
    unknown = schema.unknown(doc.data)
    strange = schema.strange(doc.data)
    # A file with settings that no version of TRL had is read by a script with dataclasses of its own.
    of_own_script = program == "trl" and not is_command
    of_own_script &= any(_is_of_a_script(schema, key) and key not in schema.scripts for key in strange)
    is_read_here = is_read_by_project(doc, program)
    is_manifest = program == "ms-swift" and bool(strange) and doc.start is None and not _is_named(doc)
    own = [key for key in unknown if program != "trl" and doc.call is None and doc.is_read(key)]
    for key in unknown:
        instead = schema.replacement(key)
        if doc.call is not None and (_is_beginning(key, schema) or glued_number(doc, key)):
            continue
        if not (program == "trl" and is_command) and doc.is_declared(key):
            continue  # a script, or the project's own copy of the program
        if program == "trl":  # the first is another rule's
            of_launcher = is_command and key.replace("_", "-") in launcher_tables()["options"]["accelerate"]
            of_script = not is_command and _is_of_a_script(schema, key)
            if of_script and key not in TRAINING_ARGUMENTS_REMOVED and _refuses(doc, key):
                is_dropped = doc.pinned_below("trl", KEPT_REST)
                effect, level = "drops it" if is_dropped else "refuses the file", WARNING if is_dropped else None
                script, level = (doc.start.script, level) if doc.start else ("the project's scripts", WARNING)
                message = f"no class of {script} has `{shorten(key)}`: TRL's parser {effect}"
                fix, since = "the script's own name for it, or remove it", None if doc.start else KEPT_REST
                yield Match(key, message, fix, level=level, since=since)
            if key in TRAINING_ARGUMENTS_REMOVED or of_launcher or of_script:
                continue
        if program == "axolotl" and doc.is_flag(key) and key not in schema.renamed:
            continue  # its command line has more
        fix = _fix_of(schema, key, instead)
        written = re.match(r"`(\w+)", fix)
        fix = f"remove it: `{written[1]}` is set" if written and doc.has(written[1]) else fix
        refusal = schema.refusal if doc.call is None else schema.refusal.replace("the file", "it")
        of_swift = OLDEST_SWIFT if program == "ms-swift" and key in schema.renamed else None
        since, library = _lost_in(schema, doc, key) or of_swift, None
        of_older = TRAINING_ARGUMENTS_REMOVED_IN.get(key) if program == "ms-swift" else None
        if of_older and doc.pinned_below("transformers", of_older):  # whose arguments ms-swift has
            since, library = of_older, "transformers"
        is_gone = program == "trl" and doc.call is None and not doc.pinned_below("trl", since)
        if is_gone and doc.pinned_below("trl", KEPT_REST):
            refusal = "the project's version drops it without a word"
        message, level = f"{schema.named} has no `{shorten(key)}`, and {refusal}", None
        is_guess = program == "trl" and not is_command and key not in schema.renamed and key not in schema.former
        if is_guess and instead not in trainer_argument_names():
            message = f"{schema.named} has no `{shorten(key)}`: its own commands refuse it"
            level = NOTE if strange else WARNING  # where a script has settings of its own, this may be one too
        elif key in strange and program != "trl":
            message, level = f"{message}; a fork or another version may have it", NOTE if is_read_here else WARNING
            instead = TRAINING_ARGUMENTS_REMOVED.get(key)
            is_hint = program == "axolotl" and schema.similar(key)
            fix = f"`{instead}`" if instead else fix if is_hint else "remove it, or the version that has it"
        level = NOTE if is_manifest else level
        is_off = not doc.get(key) or (key.startswith("eval_table") and not doc.get("eval_table_size"))
        is_off |= bool(doc.block(key)) and not any(doc.block(key).values())
        is_off |= doc.get(key) == AXOLOTL_DEFAULTS.get(key, ...) or (instead == "num_epochs" and doc.has("max_steps"))
        is_off |= doc.get(key) in ("none", ["none"]) and not doc.get("wandb_project")
        if program == "axolotl" and key.startswith("bnb_") and doc.get("adapter") != "qlora":
            is_off, fix = True, "remove it: axolotl reads such settings with `adapter: qlora` alone"
        trains_other = schema.renamed.get(key, schema.similar(key)) in {*schema.renamed.values()} - {None}
        if program == "axolotl" and (is_off or key.startswith(OF_REPORTS) or not trains_other):
            level = NOTE if is_off or level == NOTE else WARNING  # dropped, and off, empty or what holds anyway
        if key in own:
            message, level, fix = f"{message}; your code reads it", NOTE, f"{fix}, unless it reads this file"
        if of_own_script and level is None and not (key in schema.former and _parses_all(doc)):
            message = f"{schema.named} has no `{shorten(key)}`: its own commands refuse it, and your script may not"
            level = WARNING if doc.has_trl_parser else NOTE
        level = WARNING if level is None and refusal.startswith("the project") else level
        if program == "trl" and doc.is_read_from_arguments(key):  # written for an older TRL: the file is not all
            fix = f"{fix}, and the same in your code; or an older TRL"
        name = instead if instead in schema.fields and key in schema.renamed else None  # a guess is not applied
        is_free = name is not None and not (of_own_script or doc.has(name) or doc.is_read(key))
        older = [each for each, new in schema.renamed.items() if new == instead and each in schema.former]
        if key not in older and older and doc.pinned_below(schema.distribution, schema.former[older[0]]):
            fix = fix.replace(f"`{instead}`", f"`{older[0]}`")
        yield Match(key, message, fix, rename=name if is_free else None, level=level, since=since, library=library)
    command = str(start.script if start else "").removeprefix("trl ") if is_command else ""
    others = set().union(*schema.commands.values()).difference(schema.commands.get(command, schema.fields))
    for key in [key for key in doc.data if key in others]:
        yield Match(key, f"`trl {command}` of {schema.named} has no `{key}`", "remove it", level=WARNING)


def _refuses(doc: Document, key: str) -> bool:
    """Return True for a setting of a file that TRL's parser of its command's script, or of all of them, lacks."""
    start, path = doc.start, (doc.command or doc).path
    is_own = start is not None and start.tool not in PROGRAMS and not (doc.call or doc.is_flag(key))
    scripts = scripts_named(start.script or "", path) if start and is_own else []
    if start is None and doc.has_trl_parser and key not in doc.reader_source:
        scripts = scripts_with("TrlParser(", doc.folder)
    return bool(scripts) and all("TrlParser(" in each[0] and is_refused(key, *each) for each in scripts)


def glued_number(doc: Document, name: str) -> str | None:
    """Return an option and its value where a command has no blank between the two: `num_train_epochs 3`."""
    found = re.fullmatch(r"([a-z_]+)(\d\w*)", name[:100]) if doc.call is not None else None
    is_known = found is None or name in trainer_argument_names() or doc.is_declared(name)
    return None if found is None or is_known or found[1] not in trainer_argument_names() else " ".join(found.groups())


def _parses_all(doc: Document) -> bool:
    """Return True for a command whose script gives a class of TRL to a parser that refuses what its classes lack."""
    source = source_of(doc.call.script or "", doc.path)[0] if doc.call else doc.reader_source
    has_class = re.search(r"\b(?:HfArgument|Trl)Parser\([^)]*\b[A-Z]+Config\b", source)
    return bool(has_class and re.search(r"\.parse_args_(?:into_dataclasses|and_config)\(\s*\)", source))


def _is_named(doc: Document) -> bool:
    """Return True for a file that a text of its project names, and for one without a project."""
    return project_root(doc.folder) is None or names_program(doc.folder, Path(doc.path).name)


def _lost_in(schema: ProgramSchema, doc: Document, key: str) -> str | None:
    """Return the first version without a setting: TRL's methods lost some at different times, so where the script, the
    command or the other settings say the method, that of the method's own class."""
    lost = {command: names[key] for command, names in schema.lost.items() if key in names}
    classes = re.findall(r"\b([A-Z]+)Config\b", doc.reader_source) if lost else []
    named = {*(each.lower() for each in classes), *(doc.start.script or "" if doc.start else "").split()[1:]}
    methods = lost.keys() & named or lost.keys() & {"grpo" if is_grpo(doc) else ""}
    likely = schema.commands_of(doc.data) if lost and not (methods or classes) else []
    methods = methods or (lost.keys() & likely if len(likely) < len(schema.commands) else set())
    return max((lost[each] for each in methods), key=version_numbers, default=schema.former.get(key))


def _is_beginning(key: str, schema: ProgramSchema) -> bool:
    """Return True for the beginning of one option's name, which argparse takes for it. The parser of transformers has
    every name with dashes too, so a beginning without an underscore is of two."""
    return "_" in key and sum(each.startswith(key) for each in schema.fields) == 1


def _fix_of(schema: ProgramSchema, key: str, instead: str | None) -> str:
    """Return the present name. One with a word more may be another setting: `use_fast`, `tokenizer_use_fast`."""
    if key in schema.renamed:
        return "remove it" if instead is None else f"`{instead}`" if instead.isidentifier() else instead
    if instead is None and key in schema.former:
        return f"remove it, or {schema.tool} below {schema.former[key]}"
    close = instead or schema.similar(key)
    if close is None or close.startswith("is_"):  # what a program notes for itself
        return "remove it"
    is_longer = close.count("_") > key.count("_") and close.replace("_", "") != key.replace("_", "")
    return f"`{close}` if you mean that, or remove it" if is_longer else f"`{close}`"


def is_read_by_project(doc: Document, program: str) -> bool:
    """Return True for a file with settings of no version of the program, one of which the project's own code reads."""
    strange = program_schema(program).strange(doc.data) if doc.call is None else []
    return len(strange) > (MOST_STRANGE if program == "axolotl" else 0) and any(map(doc.is_read, strange))


def _old_names(doc: Document) -> Iterator[Match]:
    """Old names in a file without a model, which its command may name, where nothing else is of a script."""
    schema = program_schema("trl")
    unknown = schema.unknown(doc.data)
    if not {"model", "model_name", "model_id"} & doc.data.keys() and all(key in schema.known for key in unknown):
        for key in [key for key in unknown if key in schema.renamed and not doc.is_declared(key)]:
            instead = schema.replacement(key)
            message = f"{schema.named} has no `{shorten(key)}`: its own commands refuse it, and your script may not"
            fix = f"`{instead}`" if instead else "remove it"
            yield Match(key, message, fix, level=WARNING, since=_lost_in(schema, doc, key))


def is_trls_own(doc: Document) -> bool:
    """Return True for a file that TRL's own parser reads: it has no setting that no version of TRL had, and no script
    that is known to train with TRL."""
    schema = program_schema("trl")
    unknown = schema.unknown(doc.data) if program_of(doc.data) == "trl" else ["of another program"]
    others = [key for key in unknown if key not in TRAINING_ARGUMENTS_REMOVED and key not in schema.scripts]
    return not any(_is_of_a_script(schema, key) for key in others)


def _is_of_a_script(schema: ProgramSchema, key: str) -> bool:
    """Return True for a setting that no version of TRL has had: a script may have a dataclass with it. Only a letter or
    two of a longer name are a misspelling: `use_lora` is not `use_rslora`."""
    is_old = key in schema.former or key in schema.renamed
    return key in schema.scripts or not (is_old or nearest(key[:100], schema.fields, cutoff=MISSPELT))


@rule(ERROR, TRAINER, library="trl", fix="the present name, or nothing")
def unknown_trl_setting(doc: Document) -> Iterator[Match]:
    """TRL refuses a file with such a setting ("Unknown arguments from config file"): it is misspelt, or of an older
    version.
    """
    return _unknown(doc, "trl")


@rule(ERROR, AXOLOTL, library="axolotl", fix="the present name, or nothing")
def unknown_axolotl_setting(doc: Document) -> Iterator[Match]:
    """axolotl silently drops a setting that its schema lacks, unless a plugin of your own reads it."""
    plugins = doc.get("plugins") or []
    own = [each for each in plugins if not str(each).startswith("axolotl.")] if isinstance(plugins, list) else [plugins]
    return iter(()) if own else _unknown(doc, "axolotl")


@rule(ERROR, TRAINER, library="llamafactory", fix="the present name, or nothing")
def unknown_llama_factory_setting(doc: Document) -> Iterator[Match]:
    """LLaMA-Factory refuses a file with a setting that none of its dataclasses has."""
    return _unknown(doc, "llama-factory")


@rule(ERROR, TRAINER, library="ms-swift", fix="the present name, or nothing")
def unknown_swift_setting(doc: Document) -> Iterator[Match]:
    """ms-swift refuses arguments that it does not have, unless `ignore_args_error` is on."""
    return iter(()) if doc.get("ignore_args_error") else _unknown(doc, "ms-swift")

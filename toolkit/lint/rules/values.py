"""Rules about values: types that a key does not take, and words that are not in its closed set."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from toolkit.convert.job_script import launcher_tables
from toolkit.convert.programs import FOREIGN, OPEN_INSTRUCT, program_schemas
from toolkit.errors import alike, nearest
from toolkit.job.trainer_schema import trainer_schema
from toolkit.lint.document import ACCELERATE, AXOLOTL, DEEPSPEED, OUR_PROGRAMS, SCRIPTS, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import LINT_TABLES, occurs
from toolkit.lint.rules import settings
from toolkit.lint.rules.programs import glued_number, is_read_by_project
from toolkit.lint.rules.settings import as_bool, as_float, as_int, engine_of, fsdp_key, is_grpo, is_template, shorten
from toolkit.presets import known_keys
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, BLOCK, DEEPSPEED_BLOCKS, NOTHING, RESHARD, STAGE, Types

# Arguments with a closed set of words; every version has the first three, and every program those of schedules.
CLOSED_ARGUMENTS: tuple[str, ...] = (*LINT_TABLES["closed_arguments"],)
OF_EVERY_PROGRAM = (*CLOSED_ARGUMENTS[:3], "lr_scheduler_type")
READ_AT_ONCE = ("stage", "finetuning_type", "mix_strategy", "pref_loss", "flash_attn")  # of LLaMA-Factory's words
# Settings whose words code of one's own adds to, and those of ms-swift that name such code.
REGISTERED, PLUGINS = ("template", "model_type", "reward_funcs"), ("external_plugins", "custom_register_path")
MISSPELT_WORD = 0.8  # alike above which a word of a trainer is a misspelling, and below which one of another version
OF_OTHERS = {None: WARNING, OPEN_INSTRUCT: NOTE}  # the levels where a script may have words and types of its own
# How the keys of blocks of accelerate's YAML begin, where the block's own name need not be said.
PREFIXED_BLOCKS = ("fsdp_config", "fp8_config", "dynamo_config", "megatron_lm_config")
PREFIXES = {block: block.removesuffix("config") for block in PREFIXED_BLOCKS}
# accelerate puts its own number in place of the first, torchrun counts the GPUs for the others.
AUTO_IS_READ = (("steps_per_print", "auto"), ("num_processes", "auto"), ("num_processes", -1))  # by a command's option
NO_TEXT = ("num_machines", "main_process_port")  # accelerate takes these for numbers, without reading text
MAY_BE_NULL = ("eval_delay", "save_steps", "ddp_timeout", "local_rank")  # where nothing is counted
OWN_OPTIMIZER = re.compile(r"deepspeed\.initialize\([^)]*\boptimizer[ ]*=")  # beside which that of the JSON is not made
READ_SINCE: Mapping[str, str] = LINT_TABLES["read_since"]
# How `ValueType.expected` begins where no other word is accepted; other types list the words of presets only.
READABLE_TYPES = ("true or false", "a whole number", "a number", "a list", "keys and values", "0, 1, 2")
# Blocks of a DeepSpeed JSON in which it asks for keys one by one, and passes over others.
LOOSE_BLOCKS = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")
FORMER_WORDS: Mapping[str, str] = LINT_TABLES["former_words"]
OF_FSDP1 = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params", "limit_all_gathers")
NULL_IS_ABSENT = ("bf16", "aio")  # of the blocks at the top
HELD, WORDS_OF = {"str": str, "list": list, "dict": dict}, {"str": "text", "list": "a list", "dict": "keys and values"}
FIELD_TYPES = {"int": (as_int, "a whole number"), "float": (as_float, "a number"), "bool": (as_bool, "true or false")}


@rule(ERROR, ACCELERATE, AXOLOTL, library="accelerate", fix="a value of the type that the message names")
def wrong_type(doc: Document) -> Iterator[Match]:
    """The key takes values of another type: accelerate raises, at the latest in the ranks, axolotl at once."""
    return _wrong_types(doc, ACCELERATE_BLOCKS) if doc.kind == ACCELERATE else _wrong_types_of_axolotl(doc)


def _wrong_types_of_axolotl(doc: Document) -> Iterator[Match]:
    """pydantic reads numbers and switches from text, no text from a number, and 0 and 1 for a switch."""
    level = NOTE if is_read_by_project(doc, AXOLOTL) else None
    for name, types in program_schemas()[AXOLOTL].types.items():
        value, kinds = doc.get(name), types.split(" | ")
        is_open = value is None or is_template(value) or doc.is_flag(name)
        is_read = any(kind in FIELD_TYPES and FIELD_TYPES[kind][0](value) is not None for kind in kinds)
        is_number = isinstance(value, bool) or (value in (0, 1) and "bool" in types)
        is_plain = any(isinstance(value, HELD[kind]) for kind in kinds if kind in HELD)
        if not (is_open or is_read or is_plain or (is_number and FIELD_TYPES.keys() & kinds)):
            expected = " or ".join(FIELD_TYPES[kind][1] if kind in FIELD_TYPES else WORDS_OF[kind] for kind in kinds)
            written = repr(value) if value == "" else shorten(value)
            is_word = isinstance(value, bool) and "str" in kinds
            fix = f'`"{str(value).lower()}"`, in quotes' if is_word else expected
            message = f"{written}, expected {expected}: axolotl raises"
            yield Match(name, message, fix, level=level, library=AXOLOTL)


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.15.1", fix="a value of the type that the message names")
def wrong_deepspeed_type(doc: Document) -> Iterator[Match]:
    """The key takes another type: DeepSpeed raises in every rank, or on first use."""
    yield from _wrong_types(doc, DEEPSPEED_BLOCKS)
    for block in ("optimizer.params", "scheduler.params"):
        for name, value in doc.block(block).items():
            if isinstance(value, str) and as_float(value) is not None and not _reads_exponents(doc):
                number = str(as_float(value))
                number = number if "." in number else number.replace("e", ".0e")  # as YAML takes it for a number
                fix = f"`{number}`, without quotes"
                yield Match(f"{block}.{name}", f"{shorten(value)} is text, and no number", fix)


@rule(ERROR, TRAINER, library="transformers", fix="a value of the type that it names", for_every_program=True)
def wrong_argument_type(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` keeps the value, and what first computes with it raises."""
    # argparse converts a command line and the files of TRL and ms-swift; transformers' parser converts no file.
    is_kept = doc.call is None and doc.program in ("transformers", "llama-factory", None)
    level = WARNING if doc.program == "llama-factory" or settings.keeps_text(doc) else NOTE
    for name in doc.call.arguments if doc.call else ():
        if option := glued_number(doc, name):
            message = "is refused: the number is a part of the name"
            yield Match(name, message, f"`--{option}`", level=OF_OTHERS.get(doc.program))
    warmup, older = as_float(doc.get("warmup_steps")) or 0, doc.pinned_below("transformers", "5.0.0")
    if 0 < warmup < 1 and older and doc.program in OUR_PROGRAMS + FOREIGN:
        message = f"{warmup:g} is no share in {older}, which takes it for a number of steps: no warmup"
        yield Match("warmup_steps", message, f"`warmup_ratio: {warmup:g}`", since="4.0.0")
    losses, weights = doc.get("loss_type"), doc.get("loss_weights")
    count = len(losses) if isinstance(losses, list) else 1
    if isinstance(weights, list) and len(weights) != count and doc.program == "trl":
        yield Match("loss_weights", f"{len(weights)} for {count} losses: refused", f"{count} weights", library="trl")
    for name, field in trainer_schema().fields.items():
        kind, value = field.type.removesuffix(" | None"), doc.get(name)
        reads, expected = FIELD_TYPES.get(kind, (shorten, ""))
        is_unsloths = (name, value) == ("gradient_checkpointing", "unsloth")  # what its `get_peft_model` takes
        is_text = is_kept and isinstance(value, str) and bool(expected) and not doc.is_flag(name)
        if doc.call is None and isinstance(value, list | dict) and doc.is_declared(name):
            continue  # as the project's own code has it: a space to search, a table
        is_text = is_text and not settings.converts_text(doc, name)
        is_float = kind == "float" and not doc.is_json  # whose exponents are another rule's
        is_text &= not (is_float and re.fullmatch(r"[-+\d]+[eE][-+\d]+", str(value)))
        effect = "counts as true" if kind == "bool" else "the Trainer cannot count with"
        is_counted = field.type in ("int", "float") and name not in MAY_BE_NULL
        if value is None and doc.has(name) and is_counted and is_kept and doc.program:
            yield Match(name, "null is no number, and the Trainer counts with it", "remove it", level=level)
        if value is None or is_template(value) or is_unsloths:
            continue
        words = doc.call.arguments.get(name, ("", 0))[0] if doc.call is not None else None
        words = " ".join(words) if isinstance(words, list) else words
        if isinstance(words, str) and words.startswith("{") and "dict" in field.type and '"' not in words:
            message = f"{shorten(words)}: the shell takes the quotes away, and splits it at blanks"
            yield Match(name, message, "the JSON in single quotes")
        elif _lacks_value(doc, name, field.type):
            yield Match(name, "no value follows it: the parser refuses it", f"`--{name} VALUE`")
        elif (found := reads(value)) is None:
            says = f" is text here, which {effect}" if is_text and kind == "bool" else f", expected {expected}"
            fix = "`null`" if kind != field.type and value == "None" else "remove it, or " * (value == "") + expected
            yield Match(name, f"{shorten(value) or repr(value)}{says}", fix, level=OF_OTHERS.get(doc.program))
        elif is_text and found is not True:
            fix = f"`{found if kind == 'int' else value.lower()}`, without quotes"
            yield Match(name, f"{value} is text here, which {effect}", fix, level=level)


def _lacks_value(doc: Document, name: str, kind: str) -> bool:
    """Return True for an argument that stands alone on a command line, and that the parser of transformers gives one.
    DeepSpeed's own `--deepspeed` is a switch."""
    if doc.call is None or name not in doc.call.arguments or "bool" in kind or doc.is_declared(name):
        return False
    is_switch = name == "deepspeed" and (doc.has("deepspeed_config") or "add_config_arguments" in doc.reader_source)
    return doc.call.arguments[name][0] is None and doc.get(name) is True and not is_switch


def _wrong_types(doc: Document, blocks: Mapping[str, Types]) -> Iterator[Match]:
    closed = launcher_tables()["words"][doc.kind or ""]  # of another rule
    for block, types in blocks.items():
        for name, value in doc.block(block).items() if block else doc.data.items():
            kind = types.get(name) or types.get(f"fsdp_{name}" if block == "fsdp_config" else name)
            key = f"{block}.{name}".lstrip(".")
            if kind is None or is_template(value) or key in closed or (key, value) in AUTO_IS_READ:
                continue
            if re.fullmatch(r"\d+[eE]\d+", str(value)) and _reads_exponents(doc):
                continue
            if isinstance(value, str) and re.fullmatch("[A-Z]+(?:_[A-Z]+)+", value):
                continue  # what a job replaces: `CONFIG_HOST_NUM`
            if value is None and key in NULL_IS_ABSENT:
                continue
            if doc.kind == DEEPSPEED and not block and isinstance(value, str) and kind.expected.startswith("true or"):
                if as_bool(value) is False:
                    fix = f"`{value.lower()}`, without quotes"
                    yield Match(key, f"{value} is text here, which counts as true", fix)
                continue
            is_kept = doc.kind == ACCELERATE and isinstance(value, str) and not (doc.call or doc.is_flag(name))
            if is_kept and key in NO_TEXT and as_int(value) is not None and engine_of(doc) != "NO":
                yield Match(key, f"{value} is text here: accelerate counts, and raises", f"`{value}`, without quotes")
            elif has_wrong_type(kind, value, block=block, is_deepspeed=doc.kind == DEEPSPEED):
                # A script may replace `auto`, which is the default in a block; DeepSpeed alone takes true for stage 1.
                of_auto = NOTE if block and kind is not STAGE else WARNING
                level = of_auto if value == "auto" and doc.kind == DEEPSPEED else None
                level = NOTE if key == "zero_optimization" and isinstance(value, bool) else level
                is_one = block and isinstance(value, bool) and doc.kind == DEEPSPEED and "number" in kind.expected
                level = WARNING if is_one or (kind is STAGE and isinstance(value, bool)) else level  # 1 to pydantic
                level = NOTE if block == LOOSE_BLOCKS[0] and not value else level  # as if it were absent
                message = f"{'null' if value is None else shorten(value)}, expected {kind.expected}"
                if kind is STAGE and isinstance(value, str) and value.isdigit():
                    message = f"{value} is text: DeepSpeed reads a number, accelerate and the Trainer see no stage"
                fix = _as_expected(key, value, kind.expected)
                yield Match(key, message, fix, level=level, since=READ_SINCE.get(name, READ_SINCE.get(block)))


def _reads_exponents(doc: Document) -> bool:
    """Return True for a YAML whose loader takes `5e8` for a number: that of JSON by another name, or OmegaConf's."""
    is_in_braces = re.match(r"(?:\s*#[^\n]*\n)*\s*\{", doc.text)
    return not doc.is_json and bool(is_in_braces or "${" in doc.text or occurs(settings.OMEGACONF, doc.reader_source))


def _as_expected(key: str, value: Any, expected: str) -> str:
    """Return the value as the key takes it, where it is plain what is meant."""
    if key == "fp16.min_loss_scale":
        return "`1`, or more"  # 0 is for a loss scale that stays
    if expected.startswith("true or") and (near := nearest(str(value)[:100].lower(), ("true", "false"))):
        return f"`{near}`"
    if expected.startswith("text") and type(value) is int:
        return f'`{key.rpartition(".")[2]}: "{value}"`, in quotes'
    if expected.startswith("text") and isinstance(value, list) and not key.endswith("ignored_modules"):
        return f'`{key.rpartition(".")[2]}: "{",".join(map(shorten, value))}"`'
    if key.rpartition(".")[2].startswith("offload_") and value is False:
        return "remove it: without the block nothing is offloaded"
    if key.rpartition(".")[2].startswith("offload_") and value in ("cpu", "nvme"):
        return f'`{{"device": "{value}"}}`'
    if key == "deepspeed_config" and str(value).endswith(".json"):
        return f"`deepspeed_config: {{deepspeed_config_file: {shorten(value)}}}`"
    return expected


def has_wrong_type(kind: known_keys.ValueType, value: Any, *, block: str, is_deepspeed: bool) -> bool:
    """accelerate reads `"8"` as 8 and `yes` as true, DeepSpeed only in blocks that pydantic reads, and no exponent
    there; other rules are about words that mean something else."""
    readings: tuple[Any, ...] = (value, as_bool(value), as_int(value), as_float(value))
    if is_deepspeed and isinstance(value, str):
        is_read = bool(block) and value.isdigit() and kind is not STAGE
        readings = (value, as_bool(value), *([as_int(value)] if is_read else []))
    if kind is RESHARD or any(kind.accepts(each) for each in readings if each is not None):
        return False
    if value in (None, []):  # which pydantic refuses, and a block's reader
        is_read = block not in ("", *LOOSE_BLOCKS) or kind is BLOCK
        return is_deepspeed and is_read and not kind.accepts(value)
    if isinstance(value, list | dict) or kind.expected.startswith(READABLE_TYPES):
        return kind.expected != NOTHING.expected
    # FSDP1 numbers its strategies, and an unquoted `no` is false.
    plain = (int, float, bool) if is_deepspeed else (int, float)
    return kind.expected.startswith("text") and type(value) in plain and block != "fsdp_config"


@rule(
    *(ERROR, ACCELERATE, DEEPSPEED, TRAINER, AXOLOTL, *SCRIPTS),
    library="transformers",
    fix="one of the words",
    for_every_program=True,
)
def unknown_word(doc: Document) -> Iterator[Match]:
    """The key takes other words: the library raises, or (`compute_environment`) takes the file for another kind."""
    level = OF_OTHERS.get(doc.program) if doc.kind == TRAINER else None
    yield from (replace(each, level=each.level or level) for each in _other_words(doc))
    yield from _words_of_program(doc) if doc.kind in (TRAINER, AXOLOTL) else ()
    for call in doc.script.launches:
        for option, words in launcher_tables()["words_of_launchers"].get(call.tool, {}).items():
            if (value := call.options.get(option)) not in (None, *words):
                library = "torch" if call.tool == "torchrun" else DEEPSPEED
                yield from _not_a_word(f"--{option}", value, words, line=call.line, library=library)


@rule(ERROR, TRAINER, AXOLOTL, library="axolotl", fix="a number", for_every_program=True)
def text_for_number(doc: Document) -> Iterator[Match]:
    """The parser refuses it: from a file LLaMA-Factory takes it, and cannot count with it."""
    schema = program_schemas().get(AXOLOTL if doc.kind == AXOLOTL else doc.program or "")
    is_kept = doc.program == "llama-factory" and doc.call is None
    of_trainer = trainer_schema().fields if doc.kind == TRAINER else {}  # of the rule above
    for name in sorted(schema.numbers.keys() - of_trainer.keys()) if schema else ():
        value = doc.get(name)
        is_text = isinstance(value, list) or (isinstance(value, str) and value.lower() not in ("", "none", "null"))
        if is_text and as_float(value) is None and not is_template(value):
            message, level = f"{shorten(value)} is no number", WARNING if is_kept else None
            yield Match(name, message, "its digits", level=level, library=schema.distribution if schema else None)


def _words_of_program(doc: Document) -> Iterator[Match]:
    """Words of the program's schema, which its parser refuses, and those of TRL and axolotl that a trainer refuses.

    LLaMA-Factory's parser takes any word from a file: what is read at once raises. A trainer's words may be those of
    another version, unless one is misspelt.
    """
    program = AXOLOTL if doc.kind == AXOLOTL else doc.program
    schema = program_schemas().get(program or "")
    tables = launcher_tables()["words_of_programs"]
    by_hand: dict[str, Any] = {} if program == "trl" else tables.get(program, {})
    if program in (*OUR_PROGRAMS, None) and settings.is_trl(doc):
        command = (doc.start.script or "") if doc.start else ""
        by_hand = tables.get(command, tables["grpo" if is_grpo(doc) else "trl"])
    library, instead = "trl" if schema is None else schema.distribution, launcher_tables()["instead_of_words"]
    instead = instead.get(program, {})  # of the one word, where the list is long
    of_schema = {key: {"words": words} for key, words in schema.words.items()} if schema else {}
    for key, table in (of_schema | by_hand).items():
        block, _, name = key.rpartition(".")
        place = fsdp_key(doc, name) if block == "fsdp_config" else key
        value, needs = doc.get(place), table.get("needs")
        words = [*table["words"], *(trainer_schema().fields[table["and"]].choices if "and" in table else ())]
        if key in of_schema and "True" not in words and _lacks_value(doc, key, "str"):
            yield Match(key, "no value follows it: the parser refuses it", f"`--{key} VALUE`", library=library)
        values = value if isinstance(value, list) and table.get("list") else [value]
        value = next((each for each in values if not any(fnmatchcase(str(each), word) for word in words)), None)
        is_text = isinstance(value, (str, int)) and as_bool(value) is None and value != "None"
        is_read = is_text and (needs is None or bool(as_bool(doc.get(needs))))
        if not is_read or (key in REGISTERED and (any(map(doc.has, PLUGINS)) or doc.has_own_copy(library))):
            continue
        if occurs(re.compile(rf"[\"']{re.escape(str(value))}[\"']"), doc.reader_source):
            continue  # the project has the word
        is_kept = program == "llama-factory" and doc.call is None and key not in READ_AT_ONCE
        is_far = not nearest(str(value)[:100], words, cutoff=MISSPELT_WORD)
        is_old = (key in by_hand or key in REGISTERED) and is_far
        of_fork = is_far and schema is not None and program != "trl" and bool(schema.strange(doc.data))
        effect = "it raises where it is read" if is_kept else "it raises"
        fix = _template_of_model(doc, program, key) or (instead.get(key, "one of these") if is_far else None)
        fix = f"the version that has it, or {fix}" if of_fork else fix
        level = NOTE if of_fork else WARNING if is_kept or is_old else None
        plain = [each for each in words if each[:1] != "*"]
        yield from _not_a_word(place, value, plain, effect, fix=fix, level=level, library=library)


def _template_of_model(doc: Document, program: str | None, key: str) -> str | None:
    models = launcher_tables()["instead_of_words"].get(program, {}).get("of models", {}) if key == "template" else {}
    model = str(doc.get("model_name_or_path")).rpartition("/")[2].lower()
    return next((f"`{word}`" for word, names in models.items() if re.match(names, model)), None)


def _other_words(doc: Document) -> Iterator[Match]:
    is_sagemaker = doc.get("compute_environment") == "AMAZON_SAGEMAKER"
    is_other = is_sagemaker or doc.kind not in (ACCELERATE, DEEPSPEED, TRAINER)
    for key, table in () if is_other else launcher_tables()["words"][doc.kind].items():
        block, _, name = key.rpartition(".")
        if not _is_in_effect(doc, block, name):
            continue
        place = fsdp_key(doc, name) if block == "fsdp_config" else key
        if not doc.has(place) and block in PREFIXES:
            place = f"{block}.{name.removeprefix(PREFIXES[block])}"
        value, words = doc.get(place), [str(each) for each in table["words"]]
        is_folded = table["fold"] == "upper" and not (table.get("option") == "exact" and doc.call is not None)
        fold = str.upper if is_folded else str
        is_word = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        if doc.kind == DEEPSPEED and doc.has(place) and not is_word:
            is_word, value = True, value if isinstance(value, float) else json.dumps(value)
        if value == "auto" and name == "device":
            yield Match(place, "auto is the default, none: nothing is offloaded", "`cpu` or `none`", level=NOTE)
        elif is_word and fold(str(value)) not in map(fold, words):
            near = _near_words(str(value)[:100], words)[:1] if key == "scheduler.type" else []
            takes = launcher_tables()["parameters"].get(*near, ()) if near else ()
            has_others = near and doc.block("scheduler.params").keys() - {*takes}  # which it may refuse
            with_these = f"; or `{near[0]}`, with {', '.join(takes)}" if takes else ""
            fix = f"remove it, and set `lr_scheduler_type`{with_these}" if has_others else None
            is_unread = key == "optimizer.type" and occurs(OWN_OPTIMIZER, doc.reader_source)
            level, otherwise = NOTE if is_unread else None, table.get("otherwise", "it raises")
            yield from _not_a_word(place, value, words, otherwise, fix=fix, level=level)
    if doc.kind != TRAINER:
        return
    fields, ours = trainer_schema().fields, doc.program in (*OUR_PROGRAMS, None)
    for name in CLOSED_ARGUMENTS if ours else OF_EVERY_PROGRAM if doc.program in FOREIGN else CLOSED_ARGUMENTS[:3]:
        if isinstance(doc.get(name), str) and doc.get(name) not in fields[name].choices:
            since = "5.0.0" if name == "optim" else None  # which dropped some
            yield from _not_a_word(name, doc.get(name), fields[name].choices, since=since)
    trackers = doc.get("report_to") if ours else None
    known = (*trainer_schema().trackers, "all", "none")
    for name in [trackers] if isinstance(trackers, str) else trackers if isinstance(trackers, list) else ():
        if isinstance(name, str) and name not in known and not name.startswith("["):
            is_several = "," in name and {*re.split(r"\s*,\s*", name)} <= {*known}
            yield from _not_a_word("report_to", name, known, fix=f"`[{name}]`" if is_several else None)


def _is_in_effect(doc: Document, block: str, name: str) -> bool:
    """Return False for a word of an engine that the file does not run, which nothing reads."""
    version = as_int(settings.fsdp_setting(doc, "version", 2 if doc.kind == TRAINER else 1))
    is_other = version == 1 if name == "reshard_after_forward" else version == 2 and name in OF_FSDP1
    if doc.kind == TRAINER:
        return block != "fsdp_config" or (settings.uses_fsdp(doc) and not is_other)
    if block == "dynamo_config":  # which the launcher of DeepSpeed does not pass on
        return engine_of(doc) != "DEEPSPEED"
    if block == "fp8_config":
        return str(doc.get("mixed_precision")).lower() == "fp8"
    engine = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(block)
    return engine in (None, doc.get("distributed_type", engine)) and not (name == "reshard_after_forward" and is_other)


def _not_a_word(
    key: str, value: Any, words: Sequence[str], otherwise: str = "it raises", *, fix: str | None = None, **more: Any
) -> Iterator[Match]:
    if is_template(value):
        return
    near = _near_words(str(value)[:100], words)
    close = '"no"' if near[:1] == ["no"] else near[0] if near else None  # YAML takes it for false without
    first = words if len(words) <= 8 else near[:3] or (words[:8] if [*words] != sorted(words) else ())
    more_words = f"{' and ' * bool(first)}{len(words) - len(first)} {'more' if first else 'words'}"
    listed = ", ".join(first) + more_words * (len(words) > len(first))
    message = f"{shorten(value)} is not one of {listed}: {otherwise}"
    yield Match(key, message, fix or (f"`{close}`" if close else "one of these"), **more)


def _near_words(value: str, words: Sequence[str]) -> list[str]:
    """Return the words that a value may stand for, the likeliest first: those that are spelt, or begin, like it, of
    those that have all of its parts."""
    if former := [word for word in words if word == FORMER_WORDS.get(value.upper())]:
        return former
    if value.upper() in ("NONE", "NULL", "OFF", "FALSE"):
        return [word for word in words if word.upper()[:2] == "NO"]
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", value)
    has_all = [word for word in words if len(parts) > 1 and all(each.lower() in word.lower() for each in parts)]
    known = [*reversed(has_all or words)]
    forms = {word[: max(4, len(value))].upper(): word for word in known} | {word.upper(): word for word in known}
    return list(dict.fromkeys(forms[each] for each in alike(value.upper(), forms, cutoff=0.2 if has_all else 0.6)))

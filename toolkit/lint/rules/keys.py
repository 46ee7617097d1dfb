"""Rules about keys: unknown, removed, renamed, duplicated."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from toolkit.convert.job_script import launcher_tables
from toolkit.convert.programs import FOREIGN, OPEN_INSTRUCT, is_alike, program_schemas
from toolkit.errors import nearest
from toolkit.job.trainer_schema import trainer_argument_names, trainer_schema
from toolkit.lint.document import ACCELERATE, AXOLOTL, DEEPSPEED, OUR_PROGRAMS, SCRIPTS, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import LINT_TABLES, occurs, parses_own
from toolkit.lint.rules.programs import glued_number, is_read_by_project, is_trls_own, schema_of
from toolkit.lint.rules.settings import (
    OMEGACONF,
    as_bool,
    as_float,
    as_int,
    converts_text,
    engine_of,
    fsdp_key,
    fsdp_setting,
    is_grpo,
    is_template,
    is_trl,
    keeps_text,
    shorten,
    stage_of,
    uses_fsdp,
)
from toolkit.presets import removed_keys as removed
from toolkit.presets.known_keys import (
    ACCELERATE_BLOCKS,
    BLOCK,
    DEEPSPEED_BLOCKS,
    NOTHING,
    RESHARD,
    STAGE,
    Types,
    ValueType,
)

# accelerate's `process_config` still converts these.
OLD_ACCELERATE_KEYS = {"fp16", "dynamo_backend"}
OF_KTRANSFORMERS = "kt_config"  # read by accelerate-kt, which it installs in the place of accelerate
# Read outside DeepSpeedConfig, or an old spelling that it accepts.
MORE_DEEPSPEED_KEYS = {"bfloat16", "sequence_parallel_size", "inference", "msamp"}
# Similarity above which a key counts as a misspelling. It is higher for Trainer arguments, because scripts have
# arguments of their own in the same file.
TRAINER_SIMILARITY = 0.88
SIMILARITY = 0.75
# Arguments with a closed set of words; every version has the first three, and every program those of schedules.
CLOSED_ARGUMENTS: tuple[str, ...] = (*LINT_TABLES["closed_arguments"],)
OF_EVERY_PROGRAM = (*CLOSED_ARGUMENTS[:3], "lr_scheduler_type")
READ_AT_ONCE = ("stage", "finetuning_type", "mix_strategy", "pref_loss", "flash_attn")  # of LLaMA-Factory's words
# Settings whose words code of one's own adds to, and those of ms-swift that name such code.
REGISTERED, PLUGINS = ("template", "model_type", "reward_funcs"), ("external_plugins", "custom_register_path")
MISSPELT_WORD = 0.8  # alike above which a word of a trainer is a misspelling, and below which one of another version
OF_OTHERS = {None: WARNING, OPEN_INSTRUCT: NOTE}  # the levels where a script may have words and types of its own
# What a script asks for the arguments of its own version, to pass these alone.
DROPS_UNKNOWN = re.compile(r"\b(?:signature|fields)\(\s*\w*(?:config|arguments)", re.IGNORECASE)
PARSES_WHOLE = re.compile(r"(?:HfArgument|H4Argument|Trl)Parser\(")
DROPS_EXTRA = re.compile(r"allow_extra_keys\s*=\s*True")
PASSES_ALL = re.compile(r"(?:Arguments|Config)\(\s*\*\*")
PARSED = re.compile(r"\.parse_args_(?:into_dataclasses|and_config)\(([^()]*)\)")
RETURNS_OTHERS = re.compile(r"return_remaining_strings\s*=\s*True")
# How the keys of blocks of accelerate's YAML begin, where the block's own name need not be said.
PREFIXED_BLOCKS = ("fsdp_config", "fp8_config", "dynamo_config", "megatron_lm_config")
PREFIXES = {block: block.removesuffix("config") for block in PREFIXED_BLOCKS}
COMMENT_PREFIXES = ("_", "//", "#", "$", "comment", "description")
# accelerate puts its own number in place of the first, torchrun counts the GPUs for the second.
IGNORED_SINCE = {"fsdp_backward_prefetch_policy": "1.0.0"}  # by accelerate, which took it for the other name before
AUTO_IS_READ = (("steps_per_print", "auto"), ("num_processes", "auto"), ("num_processes", -1))  # by a command's option
NO_TEXT = ("num_machines", "main_process_port")  # accelerate takes these for numbers, without reading text
MAY_BE_NULL = ("eval_delay", "save_steps", "ddp_timeout", "local_rank")  # where nothing is counted
READ_SINCE: Mapping[str, str] = LINT_TABLES["read_since"]
# How `ValueType.expected` begins where no other word is accepted; other types list the words of presets only.
READABLE_TYPES = ("true or false", "a whole number", "a number", "a list", "keys and values", "0, 1, 2")
# Blocks of a DeepSpeed JSON in which it asks for keys one by one, and passes over others.
LOOSE_BLOCKS = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")
FORMER_WORDS = {"TPU": "XLA"}  # of `distributed_type` before accelerate 0.26
NULL_IS_ABSENT = ("bf16", "aio")  # of the blocks at the top
HELD, WORDS_OF = {"str": str, "list": list, "dict": dict}, {"str": "text", "list": "a list", "dict": "keys and values"}
FIELD_TYPES = {"int": (as_int, "a whole number"), "float": (as_float, "a number"), "bool": (as_bool, "true or false")}


def _unknown(doc: Document, block: str, name: str, known: Any, what: str) -> Match:
    """Offer the block of a key, or what it may stand for; the edit writes only a key that is certain."""
    prefix = f"{block}." if block else ""
    key = f"{prefix}{name}"
    is_own = doc.kind == TRAINER or (doc.kind == DEEPSPEED and not block)
    if is_own and doc.call is None and doc.is_read(name):  # a script's own file, which passes on a part of it
        return Match(key, f"`{shorten(name)}` {what}; your script may read it", "remove it, unless it does", level=NOTE)
    meant = removed.MEANT_KEYS.get(f"{doc.kind} {block}".rstrip(), {}).get(name)
    close, is_certain = _keys_for(doc, block, name, known, meant)
    free = [each for each in close if not doc.has(f"{prefix}{each}")]
    words = _words(doc, f"{prefix}{free[0].removeprefix('fsdp_')}") if free else []
    if words and isinstance(doc.get(key), str) and doc.get(key).upper() not in words:
        return Match(key, f"`{shorten(name)}` {what}", f"remove it, or `{free[0]}` with one of {', '.join(words)}")
    words, kind = _words(doc, f"{prefix}{free[0]}.type") if free else [], doc.get(f"{key}.type")
    if words and isinstance(kind, str) and kind.upper() not in words:
        return Match(key, f"`{shorten(name)}` {what}", f"remove it: no `{free[0]}` of DeepSpeed is {shorten(kind)}")
    is_block = bool(free) and f"{prefix}{free[0]}" in {*ACCELERATE_BLOCKS, *DEEPSPEED_BLOCKS}
    rename = free[0] if free and is_certain and is_block == isinstance(doc.get(key), dict) else None
    fix = " or ".join(f"`{each}`" for each in free) or "remove it"
    fix += ", if you mean that; or remove it" if free and not is_certain and meant is None else ""
    if homes := _homes(doc, block, name):
        into = " or ".join(f"into `{each}`" if each else "to the top level" for each in homes)
        fix, rename = f"move it {into}", None
    elif meant is not None and not meant.isidentifier():
        fix = meant
    elif free and not is_block and (inner := doc.block(key).get(free[0].rpartition("_")[2])):  # as the JSON has it
        fix = f"`{free[0]}: {shorten(inner)}`"
    elif block == "deepspeed_config" and name == "zero_optimization" and doc.has(f"{key}.stage"):
        stage = shorten(doc.get(f"{key}.stage"))
        fix = f"`zero_stage: {stage}`, and accelerate's names of the others, or a JSON: `deepspeed_config_file`"
    elif not close and block == "deepspeed_config" and _is_deepspeeds(name):
        fix = "remove it; a JSON that `deepspeed_config_file` names has it, without this block and `mixed_precision`"
    return Match(key, f"`{shorten(name)}` {what}", fix, rename=rename)


def _words(doc: Document, key: str) -> list[str]:
    """Return the words that a key takes; none for one that takes other values."""
    table = launcher_tables()["words"][doc.kind or ""].get(key)
    return [str(each).upper() for each in table["words"]] if table else []


def _keys_for(doc: Document, block: str, name: str, known: Any, meant: str | None) -> tuple[list[str], bool]:
    """Return the keys that a name may stand for, and whether that is certain: a former name, no prefix, misspelt."""
    former = removed.RENAMED_KEYS.get(f"{doc.kind} {block}".rstrip(), {}).get(name)
    former = former or (f"{block}_{name}" if f"{block}_{name}" in known else None)
    told = former or meant
    if block == "fsdp_config":  # whose keys accelerate takes without their prefix, and the Trainer with one
        name = ("fsdp_" if doc.kind == ACCELERATE else "") + name.removeprefix("fsdp_")
    stem, stems = name.removesuffix("_config"), {each.removesuffix("_config"): each for each in known}
    close = [stems[each] for each in _likely_keys(stem, stems) if is_alike(stem, each)]
    close = [each for each in [told] if each.isidentifier()] if told else close
    if doc.kind == DEEPSPEED and not block:  # not for prose, or a switch in the place of a block
        value = doc.get(name)
        close = [each for each in close if not _has_wrong_type(known[each], value, block="", is_deepspeed=True)]
    return close, len(close) == 1 and (former is not None or _is_misspelt(name, close[0]))


def _homes(doc: Document, block: str, name: str) -> list[str]:
    """Return the blocks around a key's own, and in it, that could have it; none where these are more than two."""
    is_gone = name == "elastic_checkpoint" and stage_of(doc) > 2  # which stages 1 and 2 alone have
    if doc.kind == TRAINER or (block and doc.kind == ACCELERATE) or is_gone:
        return []
    blocks: Mapping[str, Types] = DEEPSPEED_BLOCKS if doc.kind == DEEPSPEED else ACCELERATE_BLOCKS
    near = [each for each in blocks if "" in (each, block) or f"{each}.".startswith(f"{block}.") or each in block]
    homes = [
        each for each in near if each != block and name in blocks[each] and not doc.has(f"{each}.{name}".lstrip("."))
    ]
    value, is_json = doc.get(f"{block}.{name}".lstrip(".")), doc.kind == DEEPSPEED
    fit = [each for each in homes if not _has_wrong_type(blocks[each][name], value, block=each, is_deepspeed=is_json)]
    is_one = len({each.partition(".")[0] for each in homes}) == 1
    return fit if len(homes) <= 2 and (is_one or any(doc.has(each) for each in fit)) else []


def _likely_keys(name: str, known: Collection[str], *, cutoff: float = SIMILARITY) -> list[str]:
    """Return the known keys that a name may stand for: two for `adam_beta`, those with its words for `size`."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=cutoff) if len(name) <= 100 else []
    longer = [each for each in known if set(name.split("_")) < set(each.split("_"))]
    if close and close[0] in longer and not close[0].startswith(f"{name}_"):
        return sorted(longer) if len(longer) <= 3 else []
    alike = [difflib.SequenceMatcher(None, each, name).ratio() for each in close]
    return sorted(each for each, ratio in zip(close, alike, strict=True) if ratio == alike[0])


def _is_misspelt(name: str, key: str) -> bool:
    """Return True where two keys have the same words but for letters, and the same digits."""
    pairs = zip(name.split("_"), key.split("_"), strict=False)
    is_same = name.count("_") == key.count("_") and all(nearest(a, [b], cutoff=SIMILARITY) for a, b in pairs)
    has_same_digits = re.sub(r"\D", "", name) == re.sub(r"\D", "", key)
    return has_same_digits and (is_same or name.replace("_", "") == key.replace("_", ""))


@rule(ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_key(doc: Document) -> Iterator[Match]:
    """`accelerate launch` refuses to start with an unknown top-level key in the YAML."""
    if doc.get("compute_environment") == "AMAZON_SAGEMAKER":
        return
    what = "is not a key of an accelerate configuration; it refuses to start"
    for name in doc.data:
        if name not in ACCELERATE_BLOCKS[""] and name not in OLD_ACCELERATE_KEYS:
            found = _unknown(doc, "", name, ACCELERATE_BLOCKS[""], what)
            yield replace(found, level=NOTE if name == OF_KTRANSFORMERS else found.level)


@rule(ERROR, ACCELERATE, library="accelerate", fix="the nearest known key, or nothing")
def unknown_nested_key(doc: Document) -> Iterator[Match]:
    """accelerate silently ignores an unknown key inside a block: the default applies."""
    options = [each.replace("-", "_") for each in launcher_tables()["options"]["accelerate"]]
    for block in {**ACCELERATE_BLOCKS, **PREFIXES}:
        prefix = PREFIXES.get(block, "")
        known: Collection[str] = ACCELERATE_BLOCKS.get(block) or {each for each in options if each.startswith(prefix)}
        for name, value in doc.block(block).items():
            full = name if name.startswith(prefix.rstrip("_")) else f"{prefix}{name}"
            is_default = _holds_anyway(name, value) and (block == "fsdp_config" or _is_deepspeeds(name))
            is_default |= block == "deepspeed_config" and _is_said_by_yaml(doc, name, value)
            if not {name, full} & {*known, *ACCELERATE_BLOCKS[""]}:  # the latter are copied, as they are
                found = _unknown(doc, block, name, known, f"in {block} has no effect: accelerate ignores it silently")
                since = IGNORED_SINCE.get(name)
                is_open = since is not None and doc.may_be_older("accelerate", since)
                if since and as_int(fsdp_setting(doc, "version")) == 2:  # which has no such setting by any name
                    found = replace(found, fix="remove it", rename=None, remove=True)
                level = NOTE if is_default and found.rename is None else WARNING if is_open else found.level
                yield replace(found, since=since, level=level)


def _holds_anyway(name: str, value: Any) -> bool:
    """Return True for a value that a library takes without the key too: what nothing reads changes nothing then."""
    return (
        value == "auto"
        or value is False
        or str(value).lower() == LINT_TABLES["defaults"].get(name.removeprefix("fsdp_"))
    )


def _is_said_by_yaml(doc: Document, name: str, value: Any) -> bool:
    """Return True for a block of DeepSpeed's JSON that says what accelerate's own keys beside it say."""
    inner = value if isinstance(value, dict) else {}
    if name == "zero_optimization":
        return inner.keys() <= {"stage"} and as_int(inner.get("stage")) == as_int(
            doc.get("deepspeed_config.zero_stage")
        )
    return name in ("bf16", "fp16") and as_bool(inner.get("enabled")) is (doc.get("mixed_precision") == name)


def _is_deepspeeds(name: str) -> bool:
    return any(name in keys for keys in DEEPSPEED_BLOCKS.values())


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="the nearest known key, or nothing")
def unknown_deepspeed_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed silently accepts an unknown top-level key, and nothing reads it."""
    known = DEEPSPEED_BLOCKS[""].keys() | MORE_DEEPSPEED_KEYS | set(removed.DEEPSPEED_REMOVED)
    for name in doc.data:
        is_dotted = name.partition(".")[0] in DEEPSPEED_BLOCKS and "." in name
        if name not in known and not is_dotted and not name.startswith(COMMENT_PREFIXES):
            found = _unknown(doc, "", name, DEEPSPEED_BLOCKS[""], "has no effect: DeepSpeed ignores it silently")
            holds = found.rename is None and _holds_anyway(name, doc.get(name))
            yield replace(found, level=NOTE, fix="remove it") if holds else found


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="the key inside its block")
def dotted_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed reads nested blocks only: a key like `zero_optimization.reduce_bucket_size` has no effect. TRL 1.16
    writes three of them.
    """
    for name in doc.data:
        block, _, key = name.partition(".")
        if key and block in DEEPSPEED_BLOCKS and block:
            message = f"`{shorten(name)}` at the top level has no effect: DeepSpeed reads {block}'s own keys"
            yield Match(name, message, f'`"{block}": {{"{shorten(key)}": ...}}`', line=doc.dotted_lines.get(name))


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
            in_quotes = (
                f'`"{str(value).lower()}"`, in quotes' if isinstance(value, bool) and "str" in kinds else expected
            )
            yield Match(
                name, f"{written}, expected {expected}: axolotl raises", in_quotes, level=level, library=AXOLOTL
            )


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.15.1", fix="a value of the type that the message names")
def wrong_deepspeed_type(doc: Document) -> Iterator[Match]:
    """The key takes another type: DeepSpeed raises in every rank, or on first use."""
    yield from _wrong_types(doc, DEEPSPEED_BLOCKS)
    for block in ("optimizer.params", "scheduler.params"):
        for name, value in doc.block(block).items():
            if isinstance(value, str) and as_float(value) is not None:
                yield Match(f"{block}.{name}", f"{shorten(value)} is text, and no number", "the number without quotes")


@rule(ERROR, TRAINER, library="transformers", fix="a value of the type that it names", for_every_program=True)
def wrong_argument_type(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` keeps the value, and what first computes with it raises."""
    # argparse converts a command line and the files of TRL and ms-swift; transformers' parser converts no file.
    is_kept = doc.call is None and doc.program in ("transformers", "llama-factory", None)
    level = WARNING if doc.program == "llama-factory" or keeps_text(doc) else NOTE
    for name in doc.call.arguments if doc.call else ():
        if option := glued_number(doc, name):
            message = "is refused: the number is a part of the name"
            yield Match(name, message, f"`--{option}`", level=OF_OTHERS.get(doc.program))
    for name, field in trainer_schema().fields.items():
        kind, value = field.type.removesuffix(" | None"), doc.get(name)
        reads, expected = FIELD_TYPES.get(kind, (shorten, ""))
        is_unsloths = (name, value) == ("gradient_checkpointing", "unsloth")  # what its `get_peft_model` takes
        is_text = is_kept and isinstance(value, str) and bool(expected) and not doc.is_flag(name)
        if doc.call is None and isinstance(value, list | dict) and doc.is_declared(name):
            continue  # as the project's own code has it: a space to search, a table
        is_text = is_text and not converts_text(doc, name)
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
            fix = "`null`" if kind != field.type and value == "None" else expected
            yield Match(name, f"{shorten(value)}{says}", fix, level=OF_OTHERS.get(doc.program))
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
                    yield Match(
                        key, f"{value} is text here, which counts as true", f"`{value.lower()}`, without quotes"
                    )
                continue
            is_kept = doc.kind == ACCELERATE and isinstance(value, str) and not (doc.call or doc.is_flag(name))
            if is_kept and key in NO_TEXT and as_int(value) is not None and engine_of(doc) != "NO":
                yield Match(key, f"{value} is text here: accelerate counts, and raises", f"`{value}`, without quotes")
            elif _has_wrong_type(kind, value, block=block, is_deepspeed=doc.kind == DEEPSPEED):
                # A script may replace `auto`, which is the default in a block; DeepSpeed alone takes true for stage 1.
                of_auto = NOTE if block and kind is not STAGE else WARNING
                level = of_auto if value == "auto" and doc.kind == DEEPSPEED else None
                level = NOTE if key == "zero_optimization" and isinstance(value, bool) else level
                is_one = block and isinstance(value, bool) and doc.kind == DEEPSPEED and "number" in kind.expected
                level = WARNING if is_one or (kind is STAGE and isinstance(value, bool)) else level  # 1 to pydantic
                message = f"{'null' if value is None else shorten(value)}, expected {kind.expected}"
                if kind is STAGE and isinstance(value, str) and value.isdigit():
                    message = f"{value} is text: DeepSpeed reads a number, accelerate and the Trainer see no stage"
                fix = _as_expected(key, value, kind.expected)
                yield Match(key, message, fix, level=level, since=READ_SINCE.get(name, READ_SINCE.get(block)))


def _reads_exponents(doc: Document) -> bool:
    """Return True for a YAML whose loader takes `5e8` for a number: that of JSON by another name, or OmegaConf's."""
    is_in_braces = doc.text.lstrip().startswith("{")
    return not doc.is_json and (is_in_braces or "${" in doc.text or occurs(OMEGACONF, doc.reader_source))


def _as_expected(key: str, value: Any, expected: str) -> str:
    """Return the value as the key takes it, where it is plain what is meant."""
    if key == "fp16.min_loss_scale":
        return "`1`, or more"  # 0 is for a loss scale that stays
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


def _has_wrong_type(kind: ValueType, value: Any, *, block: str, is_deepspeed: bool) -> bool:
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
                for found in _not_a_word(f"--{option}", value, words, "it raises"):
                    yield replace(found, line=call.line, library="torch" if call.tool == "torchrun" else DEEPSPEED)


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
    if program in (*OUR_PROGRAMS, None) and is_trl(doc):
        command = (doc.start.script or "") if doc.start else ""
        by_hand = tables.get(command, tables["grpo" if is_grpo(doc) else "trl"])
    library = "trl" if schema is None else schema.distribution
    of_fork = schema is not None and program != "trl" and bool(schema.strange(doc.data))
    of_schema = {key: {"words": words} for key, words in schema.words.items()} if schema else {}
    for key, table in (of_schema | by_hand).items():
        block, _, name = key.rpartition(".")
        place = fsdp_key(doc, name) if block == "fsdp_config" else key
        value, needs = doc.get(place), table.get("needs")
        words = [*table["words"], *(trainer_schema().fields[table["and"]].choices if "and" in table else ())]
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
        effect = "it raises where it is read" if is_kept else "it raises"
        for found in _not_a_word(place, value, [each for each in words if each[:1] != "*"], effect):
            fix = found.fix if not is_far else f"{'the version that has it, or ' * of_fork}one of these"
            level = NOTE if of_fork and is_far else WARNING if is_kept or is_old else None
            yield replace(found, level=level, fix=fix, library=library)


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
            yield from _not_a_word(place, value, words, table.get("otherwise", "it raises"))
    if doc.kind != TRAINER:
        return
    fields, ours = trainer_schema().fields, doc.program in (*OUR_PROGRAMS, None)
    for name in CLOSED_ARGUMENTS if ours else OF_EVERY_PROGRAM if doc.program in FOREIGN else CLOSED_ARGUMENTS[:3]:
        if isinstance(doc.get(name), str) and doc.get(name) not in fields[name].choices:
            for found in _not_a_word(name, doc.get(name), fields[name].choices, "it raises"):
                yield replace(found, since="5.0.0" if name == "optim" else None)  # which has dropped some of them
    trackers = doc.get("report_to") if ours else None
    known = (*trainer_schema().trackers, "all", "none")
    for name in [trackers] if isinstance(trackers, str) else trackers if isinstance(trackers, list) else ():
        if isinstance(name, str) and name not in known and not name.startswith("["):
            fix = f"`[{name}]`" if "," in name and {*re.split(r"\s*,\s*", name)} <= {*known} else None
            for found in _not_a_word("report_to", name, known, "it raises"):
                yield replace(found, fix=fix or found.fix)


def _is_in_effect(doc: Document, block: str, name: str) -> bool:
    """Return False for a word of an engine that the file does not run, which nothing reads."""
    if doc.kind == TRAINER:
        of_fsdp1 = name == "backward_prefetch" and as_int(fsdp_setting(doc, "version", 2)) == 2
        return block != "fsdp_config" or (uses_fsdp(doc) and not of_fsdp1)
    if block == "dynamo_config":  # which the launcher of DeepSpeed does not pass on
        return engine_of(doc) != "DEEPSPEED"
    if block == "fp8_config":
        return str(doc.get("mixed_precision")).lower() == "fp8"
    engine = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}.get(block)
    return engine in (None, doc.get("distributed_type", engine))


def _not_a_word(key: str, value: Any, words: Sequence[str], otherwise: str) -> Iterator[Match]:
    if not is_template(value):
        parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", str(value)[:100])
        has_all = [word for word in words if len(parts) > 1 and all(each.lower() in word.lower() for each in parts)]
        in_capitals = {word.upper(): word for word in has_all or words}
        close = nearest(str(value)[:100].upper(), in_capitals, cutoff=0.2 if has_all else 0.6)
        is_off = str(value).upper() in ("NONE", "NULL", "OFF", "FALSE")
        close = next((word for word in words if (word.upper()[:2] == "NO" if is_off else word.upper() == close)), None)
        close = FORMER_WORDS.get(str(value), close)
        close = '"no"' if close == "no" else close  # YAML takes it for false without
        listed = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
        message = f"{shorten(value)} is not one of {listed}: {otherwise}"
        yield Match(key, message, f"`{close}`" if close else "one of these")


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.8.0", fix="the nearest known key, or nothing")
def refused_nested_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed refuses an unknown key in most blocks. It passes over one in `aio`, `checkpoint`,
    `activation_checkpointing` and a few more."""
    for block, known in DEEPSPEED_BLOCKS.items():
        for name in doc.block(block) if block else ():
            # DeepSpeed also accepts the name of its own field, without `stage3_`.
            others = (*removed.ZERO_DEPRECATED, *removed.ZERO_REMOVED)  # of other rules
            if name not in (*known, *others) and f"stage3_{name}" not in known:
                is_loose, where = block in LOOSE_BLOCKS, f"in {block.rpartition('.')[2]}"
                if is_loose and name.startswith(COMMENT_PREFIXES):
                    continue
                effect = "has no effect: DeepSpeed ignores it silently" if is_loose else "is refused by DeepSpeed"
                found = _unknown(doc, block, name, known, f"{where} {effect}")
                below = name == "cpu_offload_params" and (stage_of(doc) or 0) < 3  # where parameters stay on the GPUs
                yield replace(found, since=READ_SINCE.get(block), fix="remove it" if below else found.fix)


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.19.8", fix="nothing")
def removed_deepspeed_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed 0.19.8 removed the feature and refuses its key, even where it is disabled."""
    for name, instead in removed.DEEPSPEED_REMOVED.items():
        if doc.has(name):
            fix = f"`{instead}`" if instead else "remove it"
            is_off = as_bool(doc.get(f"{name}.enabled")) is False or not doc.get(name)
            yield Match(name, f"DeepSpeed removed `{name}` and refuses it", fix, remove=is_off)
    for name in removed.ZERO_REMOVED:
        key = f"zero_optimization.{name}"
        if doc.has(key):
            yield Match(key, f"DeepSpeed removed `{name}` and refuses it", "remove it", remove=True)


@rule(NOTE, DEEPSPEED, library="deepspeed", removed_in="0.6.5", fix="the new key")
def deprecated_zero_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed still accepts the old spelling, with a warning."""
    for name, instead in removed.ZERO_DEPRECATED.items():
        key = f"zero_optimization.{name}"
        if doc.has(key):
            rename = instead if instead in DEEPSPEED_BLOCKS["zero_optimization"] else None
            is_off = name.startswith("cpu") and as_bool(doc.get(key)) is False  # and the new block turns it on
            fix = "remove it" if is_off else f"`{instead}`"
            yield Match(key, f"`{name}` is an old spelling", fix, rename=rename, remove=is_off)


@rule(ERROR, TRAINER, library="transformers", removed_in="4.51.0", fix="the new field, or nothing")
def removed_training_argument(doc: Document) -> Iterator[Match]:
    """transformers has removed the field: `HfArgumentParser` and `TrainingArguments(...)` raise. 4.51 dropped
    `evaluation_strategy`, 5.2 `group_by_length`, 5.15 `warmup_ratio` and `logging_dir`, 5.0 most others.
    """
    if doc.program is not None and doc.program not in OUR_PROGRAMS:
        return  # which pins another version, or has a field of that name itself
    for name, instead in removed.TRAINING_ARGUMENTS_REMOVED.items():
        if not doc.has(name) or name in trainer_argument_names():
            continue
        if (doc.call is not None and doc.is_declared(name)) or parses_own(doc.reader_source, name):
            continue  # the script has an argument of that name itself
        since = removed.TRAINING_ARGUMENTS_REMOVED_IN.get(name, "5.0.0")
        is_open = doc.program is None and doc.may_be_older("transformers", since)
        raises = "and raises" + ("; older versions have it" if is_open else "")
        renamed = removed.TRAINING_ARGUMENTS_RENAMED.get(name)
        is_off = renamed is None and (doc.get(name) in (None, "") or as_bool(doc.get(name)) is False)
        is_off = (is_off or as_float(doc.get(name)) == 0) and name != "dispatch_batches"  # None there is no False
        wins = name == "warmup_ratio" and (as_float(doc.get("warmup_steps")) or 0) > 0
        wins |= renamed is not None and doc.has(renamed)
        parsed = PARSED.findall(doc.reader_source)  # also by the scripts beside the one that is started
        of_arguments = doc.is_read_from_arguments(name)  # which raises where the parser has dropped it
        is_lost = bool(parsed) and all(map(RETURNS_OTHERS.search, parsed)) and not of_arguments
        is_lost |= doc.call is None and _drops_extra(doc.reader_source)
        may_drop = doc.call is None and _may_not_reach_trainer(doc, name)
        may_be_its = doc.call is None and (may_drop or not is_trls_own(doc))
        fix = "remove it" if instead is None or is_off or wins else _instead_of(doc, name, instead)
        if of_arguments:
            fix = f"{fix}, and the same in your code, which reads it; or an older transformers"
        elif may_be_its:
            fix += "; in the script too, where it passes the argument itself"
        yield Match(
            name,
            f"transformers {since}'s `TrainingArguments` no longer has `{name}`, "
            + ("and your script drops it without a word" if is_lost else raises),
            fix,
            since=since,
            rename=None if renamed is None or doc.has(renamed) or may_be_its or of_arguments else renamed,
            remove=(instead is None or is_off) and not may_be_its and not of_arguments,
            level=NOTE if may_drop else WARNING if is_lost or (may_be_its and doc.program) else None,
        )


def _drops_extra(source: str) -> bool:
    """Return True where a project's code passes over what its dataclasses lack, and none of its parsers refuses it."""
    return DROPS_EXTRA.search(source) is not None and not re.search(r"\.parse_args_and_config\(\s*\)", source)


def _may_not_reach_trainer(doc: Document, name: str) -> bool:
    """Return True for a setting of a file that a project's scripts have themselves, drop, read and do not pass on, or
    never name where they read others one by one."""
    source = doc.reader_source
    if doc.is_declared(name) or doc.is_read_in_parts or _drops_extra(source):
        return True
    if PARSES_WHOLE.search(source):
        return False
    if DROPS_UNKNOWN.search(source):
        return True
    if name in source:
        return doc.is_read(name) and not re.search(rf"\b{name}\s*=(?!=)", source)
    return not PASSES_ALL.search(source) and sum(map(doc.is_read, doc.data)) > 1


def _instead_of(doc: Document, name: str, instead: str) -> str:
    ratio = as_float(doc.get(name)) if name == "warmup_ratio" else None
    if ratio is not None and ratio < 1:
        return f"`warmup_steps: {ratio:g}`, a fraction of all steps"
    return f"`{instead}` in the environment" if name == "logging_dir" else f"`{instead}`"


@rule(NOTE, TRAINER, library="transformers", fix="the new field")
def deprecated_training_argument(doc: Document) -> Iterator[Match]:
    """transformers 5 still accepts the old name, with a FutureWarning; version 6 will not."""
    is_newest = doc.program in OUR_PROGRAMS and not doc.may_be_older("transformers", "5.0.0")
    for name, instead in removed.TRAINING_ARGUMENTS_DEPRECATED.items() if is_newest else ():
        if doc.has(name) and instead in trainer_argument_names():
            message = f"`{name}` is removed in transformers 6"
            yield Match(name, message, f"`{instead}`, which older versions do not have")


@rule(WARNING, TRAINER, library="transformers", fix="the nearest field")
def misspelt_training_argument(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` has a very similar field: the parser raises, unless the script has this argument itself."""
    fields = trainer_argument_names()
    for name in () if schema_of(doc) is not None else doc.data:
        if name in {*fields, *removed.TRAINING_ARGUMENTS_REMOVED} or len(name) > 100 or name[0:1] in COMMENT_PREFIXES:
            continue
        free = [each for each in _likely_keys(name, fields, cutoff=TRAINER_SIMILARITY) if not doc.has(each)]
        if free and not (doc.is_declared(name) or doc.is_read(name) or glued_number(doc, name)):
            level = None if doc.program in OUR_PROGRAMS else NOTE
            fix = " or ".join(f"`{each}`" for each in free) + f", unless the script has a `{name}` itself"
            yield Match(name, f"`{name}` is not a field of TrainingArguments", fix, level=level)


@rule(ERROR, TRAINER, library="transformers", fix="the nearest known key, or nothing")
def unknown_fsdp_config_key(doc: Document) -> Iterator[Match]:
    """The Trainer silently drops an unknown key of `fsdp_config`: the default applies."""
    for name in doc.block("fsdp_config"):
        if name.removeprefix("fsdp_") not in removed.TRAINER_FSDP_KEYS:
            found = _unknown(doc, "fsdp_config", name, removed.TRAINER_FSDP_KEYS, "in fsdp_config has no effect")
            holds = str(doc.get(f"fsdp_config.{name}")).upper() in ("FALSE", "NONE", "FULL_SHARD")  # as it is anyway
            yield replace(found, level=NOTE, fix="remove it") if holds and found.rename is None else found


@rule(WARNING, ACCELERATE, DEEPSPEED, TRAINER, AXOLOTL, library="pyyaml", fix="one of the two")
def duplicate_key(doc: Document) -> Iterator[Match]:
    """A key appears twice in one block: the last one silently wins. DeepSpeed refuses a JSON that it opens itself."""
    refusal = ", and DeepSpeed refuses the file where it opens it itself" if doc.kind == DEEPSPEED else ""
    for duplicate in doc.repeated[:20]:
        yield Match(duplicate.key, f"`{shorten(duplicate.key)}` appears twice; the last wins{refusal}", "remove one")

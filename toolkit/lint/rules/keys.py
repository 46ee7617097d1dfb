"""Rules about keys: unknown, misplaced, removed, renamed, duplicated."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.convert.job_script import launcher_tables
from toolkit.convert.programs import is_alike, program_of, program_schemas
from toolkit.errors import nearest
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.lint.document import ACCELERATE, AXOLOTL, DEEPSPEED, OUR_PROGRAMS, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import LINT_TABLES, occurs, parses_own
from toolkit.lint.rules import settings
from toolkit.lint.rules.deepspeed import DEFAULTS, OWNED_BY_TRAINER
from toolkit.lint.rules.programs import glued_number, is_trls_own
from toolkit.lint.rules.settings import as_bool, as_float, as_int, fsdp_setting, shorten, stage_of
from toolkit.lint.rules.values import LOOSE_BLOCKS, PREFIXES, READ_SINCE, has_wrong_type
from toolkit.presets import removed_keys as removed
from toolkit.presets.known_keys import ACCELERATE_BLOCKS, DEEPSPEED_BLOCKS, Types

# accelerate's `process_config` still converts these.
OLD_ACCELERATE_KEYS = {"fp16", "dynamo_backend"}
OF_KTRANSFORMERS = "kt_config"  # read by accelerate-kt, which it installs in the place of accelerate
# Read outside DeepSpeedConfig, or an old spelling that it accepts.
MORE_DEEPSPEED_KEYS = {"bfloat16", "sequence_parallel_size", "inference", "msamp"}
# Similarity above which a key counts as a misspelling. It is higher for Trainer arguments, because scripts have
# arguments of their own in the same file.
TRAINER_SIMILARITY = 0.88
SIMILARITY = 0.75
# What a script asks for the arguments of its own version, to pass these alone.
DROPS_UNKNOWN = re.compile(r"\b(?:signature|fields)\(\s*\w*(?:config|arguments)", re.IGNORECASE)
PARSES_WHOLE = re.compile(r"(?:HfArgument|H4Argument|Trl)Parser\(")
DROPS_EXTRA = re.compile(r"allow_extra_keys\s*=\s*True")
PASSES_ALL = re.compile(r"(?:Arguments|Config)\(\s*\*\*")
PARSED = re.compile(r"\.parse_args_(?:into_dataclasses|and_config)\(([^()]*)\)")
RETURNS_OTHERS = re.compile(r"return_remaining_strings\s*=\s*True")
RECOMPUTES = re.compile(r"gradient_checkpointing(?:\s*=\s*True|_enable\()")
A_TRAINER = re.compile(r"\b[A-Z]\w*Trainer\(")
COMPUTES_IN = re.compile(r"Accelerator\([^()]*mixed_precision\s*=")
COMMENT_PREFIXES = ("_", "//", "#", "$", "comment", "description")
IGNORED_SINCE = {"fsdp_backward_prefetch_policy": "1.0.0"}  # by accelerate, which took it for the other name before


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
    elif block == "deepspeed_config" and name in ("bf16", "fp16"):
        fix = "remove it: `mixed_precision` decides" if doc.has("mixed_precision") else f"`mixed_precision: {name}`"
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
        close = [each for each in close if not has_wrong_type(known[each], value, block="", is_deepspeed=True)]
        keys = value.keys() if isinstance(value, dict) else ()
        close = [each for each in close if not keys or {*keys} & {*DEEPSPEED_BLOCKS.get(each, keys)}]
    return close, len(close) == 1 and (former is not None or _is_misspelt(name, close[0]))


def _homes(doc: Document, block: str, name: str) -> list[str]:
    """Return the blocks around a key's own, and in it, that could have it; none where these are more than two."""
    is_gone = name == "elastic_checkpoint" and stage_of(doc) > 2  # which stages 1 and 2 alone have
    if doc.kind == TRAINER or (block and doc.kind == ACCELERATE) or is_gone:
        return []
    blocks: Mapping[str, Types] = DEEPSPEED_BLOCKS if doc.kind == DEEPSPEED else ACCELERATE_BLOCKS
    near = [each for each in blocks if "" in (each, block) or f"{each}.".startswith(f"{block}.") or each in block]
    homes = [each for each in near if each != block and name in blocks[each]]
    homes = [each for each in homes if not doc.has(f"{each}.{name}".lstrip("."))]
    value, is_json = doc.get(f"{block}.{name}".lstrip(".")), doc.kind == DEEPSPEED
    fit = [each for each in homes if not has_wrong_type(blocks[each][name], value, block=each, is_deepspeed=is_json)]
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
            if not {name, full} & {*known, *ACCELERATE_BLOCKS[""]}:  # the latter are copied, as they are
                found = _unknown(doc, block, name, known, f"in {block} has no effect: accelerate ignores it silently")
                since = IGNORED_SINCE.get(name)
                if since and as_int(fsdp_setting(doc, "version")) == 2:  # which has no such setting by any name
                    found = replace(found, fix="remove it", rename=None, remove=True)
                yield _at_level(doc, replace(found, since=since), name, value)


def _at_level(doc: Document, found: Match, name: str, value: Any) -> Match:
    """Give a key that nothing reads its level: a note where the value holds anyway, an error where another problem is
    trained than it asks for, and a warning where it may cost memory or time, or no library knows the name."""
    if found.level is not None:
        return found
    meant = found.rename or found.fix.strip("`")
    field, namer = OWNED_BY_TRAINER.get(meant), doc.named_by
    if field and namer is not None and namer.kind == TRAINER and namer.has(field):
        found = replace(found, fix=f"remove it: `{field}` decides", rename=None)
    if _is_chosen_anyway(doc, meant if meant.isidentifier() else name, value):
        return replace(found, level=NOTE)
    if _holds_anyway(doc, name, value):
        return replace(found, level=NOTE, fix="remove it" if found.rename is None else found.fix)
    is_alone = isinstance(value, dict) and value.keys() == {"type"}
    decides = {name, meant} & {*LINT_TABLES["decides_training"]} and not is_alone
    return found if decides else replace(found, level=WARNING)


def _holds_anyway(doc: Document, name: str, value: Any) -> bool:
    """Return True for a value that the run has without the key too: what nothing reads changes nothing then."""
    default = LINT_TABLES["defaults"].get(name.removeprefix("fsdp_"))
    is_default = str(value).lower() == default or (as_float(value) is not None and as_float(value) == as_float(default))
    is_of_other_stage = name.startswith("stage3_") and stage_of(doc) < 3
    is_overlapped = name == "overlap_comm" and value is True and stage_of(doc) == 3  # which turns it on
    is_one = name.endswith("parallel_size") and as_int(value) in (1, as_int(doc.get("num_processes")))
    recomputes = name == "gradient_checkpointing" and occurs(RECOMPUTES, doc.reader_source)
    is_unread = name == "thread_count" and "nvme" not in doc.text  # the whole block
    holds = is_default or is_of_other_stage or is_overlapped or is_one or recomputes or is_unread
    holds |= str(value).lower() in ("auto", "false", "none") or name in LINT_TABLES["only_logs"]
    holds |= doc.block("zero_optimization").get(name) == value  # where it is read
    holds |= name == "mixed_precision" and as_bool(doc.get(f"{value}.enabled", False)) is not False
    return holds or (doc.kind == ACCELERATE and _is_said_by_yaml(doc, name, value))


def _is_chosen_anyway(doc: Document, name: str, value: Any) -> bool:
    """Return True for what a Trainer's argument, or its default, says."""
    field, reader, source = OWNED_BY_TRAINER.get(name), settings.trainer_of(doc), doc.reader_source
    reader = reader or (doc.named_by if doc.named_by is not None and doc.named_by.kind == TRAINER else None)
    is_known = field and (reader is not None or (occurs(A_TRAINER, source) and field not in source))
    said = (reader or doc).get(field, DEFAULTS.get(name)) if is_known else None
    return as_float(value) is not None and as_float(value) == as_float(said) and not settings.is_without_trainer(doc)


def _is_said_by_yaml(doc: Document, name: str, value: Any) -> bool:
    """Return True for a key of DeepSpeed's JSON that says what accelerate's own keys, or the script, say."""
    inner = value if isinstance(value, dict) else {}
    if name == "stage3_gather_16bit_weights_on_model_save":
        return as_bool(value) is as_bool(doc.get("deepspeed_config.zero3_save_16bit_model"))
    if name == "zero_optimization":
        stage = as_int(doc.get("deepspeed_config.zero_stage"))
        return inner.keys() <= {"stage"} and as_int(inner.get("stage")) == stage
    if name in ("offload_optimizer", "offload_param"):
        return bool(inner.get("device") == doc.get(f"deepspeed_config.{name}_device", "none"))
    is_scripts = not doc.has("mixed_precision") and occurs(COMPUTES_IN, doc.reader_source)
    is_same = as_bool(inner.get("enabled")) is (doc.get("mixed_precision") == name)
    return name in ("bf16", "fp16") and (is_same or is_scripts)


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
            yield _at_level(doc, found, name, doc.get(name))


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
                found = replace(found, since=READ_SINCE.get(block), fix="remove it" if below else found.fix)
                yield _at_level(doc, found, name, doc.get(f"{block}.{name}")) if is_loose else found


@rule(ERROR, DEEPSPEED, library="deepspeed", removed_in="0.19.8", fix="nothing")
def removed_deepspeed_key(doc: Document) -> Iterator[Match]:
    """DeepSpeed 0.19.8 removed the feature and refuses its key, even where it is disabled."""
    of_zero = {f"zero_optimization.{name}": None for name in removed.ZERO_REMOVED}
    for key, instead in (removed.DEEPSPEED_REMOVED | of_zero).items():
        if doc.has(key):
            is_off = key in of_zero or as_bool(doc.get(f"{key}.enabled")) is False or not doc.get(key)
            message = f"DeepSpeed removed `{key.rpartition('.')[2]}` and refuses it"
            yield Match(key, message, f"`{instead}`" if instead else "remove it", remove=is_off)


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
        passes = occurs(re.compile(rf"\b{name}[ ]*=[^=\n]*[\"'.]{name}\b"), doc.reader_source)
        passes &= not doc.may_be_older("transformers", since)
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
            level=NOTE if may_drop else WARNING if is_lost or (may_be_its and doc.program and not passes) else None,
        )


def _drops_extra(source: str) -> bool:
    """Return True where a project's code passes over what its dataclasses lack, and none of its parsers refuses it."""
    return occurs(DROPS_EXTRA, source) and not occurs(re.compile(r"\.parse_args_and_config\(\s*\)"), source)


def _may_not_reach_trainer(doc: Document, name: str) -> bool:
    """Return True for a setting of a file that a project's scripts have themselves, drop, read and do not pass on, or
    never name where they read others one by one."""
    source = doc.reader_source
    if doc.is_declared(name) or doc.is_read_in_parts or _drops_extra(source):
        return True
    if occurs(PARSES_WHOLE, source):
        return False
    if occurs(DROPS_UNKNOWN, source):
        return True
    if name in source:
        return doc.is_read(name) and not occurs(re.compile(rf"\b{name}\s*=(?!=)"), source)
    return not occurs(PASSES_ALL, source) and sum(map(doc.is_read, doc.data)) > 1


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
    for name in () if program_of(doc.data) in program_schemas() else doc.data:
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
            yield _at_level(doc, found, name, doc.get(f"fsdp_config.{name}"))


@rule(WARNING, ACCELERATE, DEEPSPEED, TRAINER, AXOLOTL, library="pyyaml", fix="one of the two")
def duplicate_key(doc: Document) -> Iterator[Match]:
    """A key appears twice in one block: the last one silently wins. DeepSpeed refuses a JSON that it opens itself."""
    refusal = ", and DeepSpeed refuses the file where it opens it itself" if doc.kind == DEEPSPEED else ""
    for duplicate in doc.repeated[:20]:
        yield Match(duplicate.key, f"`{shorten(duplicate.key)}` appears twice; the last wins{refusal}", "remove one")

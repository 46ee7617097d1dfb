"""Rules about a DeepSpeed JSON, and about the YAML that names it: what conflicts, is ignored, or fails later."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.convert.job_script import launcher_tables, processes_of_call
from toolkit.errors import ToolkitError, nearest
from toolkit.files.documents import read_table
from toolkit.files.paths import is_file
from toolkit.lint import document, named_files
from toolkit.lint.document import ACCELERATE, AXOLOTL, DEEPSPEED, SCRIPTS, SUFFIXES, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import (
    declares,
    files_by_name,
    find_named,
    imported_source,
    names_program,
    project_root,
    scripts_named,
)
from toolkit.lint.rules import settings
from toolkit.lint.rules.settings import as_bool, as_float, as_int, is_without_trainer, names_json, shorten, trainer_of
from toolkit.lint.rules.trainer import processes_of

_TABLE = read_table(__file__)
OWNED_BY_TRAINER, DEFAULTS, SAME_AS = _TABLE["owned_by_trainer"], _TABLE["defaults"], _TABLE["same_as"]
OWNED_BY_JSON, NUMBERS_OF_TRAINER = _TABLE["owned_by_json"], _TABLE["numbers_of_trainer"]
STEPS = "scheduler.params.total_num_steps"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OF_AXOLOTL = {"per_device_train_batch_size": "micro_batch_size"}
FIRST_SCHEDULES = "0.1.0"  # no version of DeepSpeed had parameters that its schedules lack now
PREPARED = re.compile(r"accelerator\.prepare\(([^()]*)\)")  # of a loop, which may have others for DeepSpeed
UNSAID = ("none", "false", "auto")  # what says as much as no key


# -- against the Trainer


@rule(WARNING, DEEPSPEED, library="transformers", fix='"auto"')
def not_auto(doc: Document) -> Iterator[Match]:
    """Under the Trainer any value but that of `TrainingArguments` raises in every rank; it owns this setting."""
    for key, field in () if is_without_trainer(doc) else OWNED_BY_TRAINER.items():
        value = doc.get(key, "auto")
        is_off = key.endswith(".enabled") and as_bool(value) is False
        if value not in ("auto", None) and not is_off and not _is_said_by_reader(doc, key, value):
            message, fix = f"{shorten(value)} must equal {field}, or the Trainer raises", '`"auto"`'
            level = None if _differs_for_reader(doc, key, value) or (key == STEPS and as_int(value) == 0) else NOTE
            if key.endswith(".enabled") and isinstance(value, str):
                message = f"{shorten(value)} is text, which equals no switch: the Trainer raises"
                fix += ", or no quotes"
                level = ERROR if trainer_of(doc) else settings.level_for_trainer(doc)
            yield Match(key, message, fix, level=level)


def _differs_for_reader(doc: Document, key: str, value: object) -> bool:
    """Return True where the file that names a JSON has another value, or leaves the Trainer's default."""
    reader, field = doc.named_by, OWNED_BY_TRAINER[key]
    if reader is not None and reader.kind == AXOLOTL:
        return reader.has(OF_AXOLOTL.get(field, field))
    reader = trainer_of(doc)
    if reader is None or (field == "warmup_steps" and (as_float(reader.get(field)) or 0) < 1):
        return False
    return reader.has(field) or (key in DEFAULTS and value != DEFAULTS[key] and _has_default(reader, field))


def _has_default(reader: Document, field: str) -> bool:
    """Return True for arguments whose program leaves a field that they do not name at the Trainer's default."""
    sources = reader.reader_source, imported_source(reader.source, reader.folder)  # with a default of their own
    is_plain = reader.program in ("transformers", "llama-factory") and not reader.has("config")
    return is_plain and not any(declares(each, field) for each in sources)


def _is_said_by_reader(doc: Document, key: str, value: object) -> bool:
    """Return True where the file that names the JSON has the same value, by the name that its program gives it."""
    reader, field = doc.named_by, OWNED_BY_TRAINER[key]
    if reader is None or reader.kind == ACCELERATE:
        return False
    field = OF_AXOLOTL.get(field, field) if reader.kind == AXOLOTL else field
    here = True if reader.kind == AXOLOTL and reader.get(field) == "auto" else reader.get(field)  # on a GPU with bf16
    if " and " in field:
        both = zip(field.split(" and "), DEFAULTS[key], strict=True)
        return value == [as_float(reader.get(name, default)) for name, default in both]
    as_one = as_bool if key.endswith(".enabled") else as_float
    return as_one(here) is not None and as_one(here) == as_one(value)


@rule(WARNING, ACCELERATE, library="transformers", fix="nothing: it is `auto` then")
def yaml_not_auto(doc: Document) -> Iterator[Match]:
    """The YAML fixes a setting that `TrainingArguments` owns: under the Trainer, any value but its own raises."""
    if not settings.is_deepspeed(doc) or names_json(doc) or is_without_trainer(doc):
        return
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = f"deepspeed_config.{name}"
        reader, value = trainer_of(doc), doc.get(key, "auto")
        field = OWNED_BY_TRAINER[name]
        here = reader.get(field, 1) if reader is not None else None  # the default of both
        if value not in ("auto", None) and (here is None or as_float(here) != as_float(value)):
            message = f"{shorten(value)} must equal {field}, or a Trainer raises"
            is_certain = reader is not None and (reader.has(field) or _has_default(reader, field))
            level = NOTE if as_float(here) is None else ERROR if is_certain and as_float(value) is not None else None
            yield Match(key, message, "remove it, under a Trainer", level=level)


@rule(ERROR, DEEPSPEED, library="accelerate", fix="a value, or no key")
def auto_is_kept(doc: Document) -> Iterator[Match]:
    """accelerate fills `auto` in some keys, and raises for it in any other ("not found in kwargs")."""
    for key in () if is_without_trainer(doc) else doc.positions:
        if doc.get(key) == "auto" and key not in launcher_tables()["filled"]:
            level = None if doc.named_by is not None else WARNING
            level = NOTE if settings.names_word(doc, key.rpartition(".")[2]) else level  # the project may fill it in
            yield Match(key, "nothing fills auto in here: accelerate and the Trainer raise", "remove it", level=level)
    source = named_files.project_source(doc.folder) if is_without_trainer(doc) else ""
    for key in BATCH_KEYS if "deepspeed.initialize(" in source and "Accelerator(" not in source else ():
        if doc.get(key) == "auto" and not settings.names_word(doc, key):
            level = None if names_program(doc.folder, Path(doc.path).name) else WARNING
            yield Match(key, "only a Trainer and accelerate fill auto in: DeepSpeed raises", "a number", level=level)


@rule(ERROR, DEEPSPEED, library="deepspeed", fix='"auto" for all three')
def batch_arithmetic(doc: Document) -> Iterator[Match]:
    """DeepSpeed asserts train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes."""
    total, per_gpu, accumulation = (as_int(doc.get(key)) for key in BATCH_KEYS)
    fills = not is_without_trainer(doc)  # DeepSpeed alone takes no `auto`
    value, fix = ("auto", '`"auto"`') if fills else (None, "a positive number")
    not_positive = [key for key in BATCH_KEYS if (as_int(doc.get(key)) or 1) < 1 or as_int(doc.get(key)) == 0]
    if not_positive:
        key = not_positive[0]
        yield Match(key, f"{shorten(doc.get(key))} is refused: it must be positive", fix, value=value)
    elif total and per_gpu and total % (per_gpu * (accumulation or 1)):
        product = f"{per_gpu} x {accumulation}" if accumulation else f"{per_gpu}"
        fix = '`"auto"` for all three' if fills else "a multiple"
        yield Match(BATCH_KEYS[0], f"{total} is not a multiple of {product}", fix, value=value)


# -- offload


# -- sizes and communication


@rule(ERROR, DEEPSPEED, library="deepspeed", fix="a parameter that it has")
def unknown_parameter(doc: Document) -> Iterator[Match]:
    """The optimizer, or the schedule, raises TypeError for a parameter that it does not have."""
    for block in ("optimizer", "scheduler"):
        kind = str(doc.get(f"{block}.type"))
        known = launcher_tables()["parameters"].get(kind.lower() if block == "optimizer" else kind, ())
        for name in doc.block(f"{block}.params") if known else ():
            if name not in known:
                close = nearest(name[:100], known, cutoff=0.6)
                close = {"learning_rate": "lr", "max_grad_norm": "gradient_clipping"}.get(name, close)
                fix = f"`{close}`" if close else f"remove it; it has {', '.join(known)}"
                fix = "remove it: it is the optimizer's lr" if name == "warmup_max_lr" else fix
                fix += " at the top level" if close == "gradient_clipping" else ""
                fix += ", a fraction of the optimizer's lr" if "_ratio" in fix and "lr" in name else ""
                message = f"`{shorten(name)}` is no parameter of {kind}: DeepSpeed raises"
                since = FIRST_SCHEDULES if block == "scheduler" else None
                yield Match(f"{block}.params.{name}", message, fix, since=since)
        for name in {"WarmupDecayLR": ["total_num_steps"], "WarmupCosineLR": ["total_num_steps"]}.get(kind, ()):
            if name not in doc.block(f"{block}.params"):
                message = f"{kind} raises without `{name}`"
                yield Match(f"{block}.type", message, '`"auto"` with the Trainer, or a number')


@rule(WARNING, DEEPSPEED, *SCRIPTS, library="transformers", fix="no block: the Trainer's `optim` and scheduler")
def optimizer_of_json(doc: Document) -> Iterator[Match]:
    """The block takes precedence over the Trainer's `optim` or `lr_scheduler_type`, which are silently ignored. Beside
    those of a loop accelerate raises."""
    for call in doc.script.launches:
        told = document.launch_settings(doc, call) if call.tool == "accelerate" else None
        file = find_named(call.options.get("deepspeed-config-file") or "", doc.path)
        json = told.deepspeed_json if told and told.deepspeed_json else document.load_document(file) if file else None
        source = named_files.source_of(call.script or "", doc.path)[0] if json else ""
        prepared = "" if re.search("Dummy|DistributedType", source) else "".join(PREPARED.findall(source))
        twice = [each for each in ("optimizer", "scheduler") if json and json.has(each) and each[:5] in prepared]
        for block in twice:
            message = f"{call.script} gives prepare() its own beside that of the JSON: accelerate raises"
            yield Match(block, message, "one of the two", line=call.line, level=ERROR, library="accelerate")
    for block, field in {"optimizer": "optim", "scheduler": "lr_scheduler_type"}.items():
        if doc.block(block) and not is_without_trainer(doc):
            named, reader = shorten(doc.get(f"{block}.type")), trainer_of(doc)
            here = str(reader.get(field, "")) if reader is not None else ""
            is_same = not here or here.startswith(SAME_AS.get(named, "\0"))
            message = f"{named} replaces the Trainer's {field}" + (f", {shorten(here)}" if here else "")
            # accelerate below 0.23 refuses its stand-in for a schedule beside an optimizer of the JSON
            both = " with `optimizer`" if block == "scheduler" and doc.block("optimizer") else ""
            yield Match(block, message, f"remove it{both}, and set `{field}`", level=NOTE if is_same else None)
    namer = doc.named_by
    is_told = namer is not None and namer.kind == TRAINER and namer.has("learning_rate")
    level = ERROR if is_told else None if trainer_of(doc) else settings.level_for_trainer(doc)
    if doc.has("optimizer.type") and not (doc.has("optimizer.params.lr") or doc.has("scheduler")):
        message = "it has no lr: DeepSpeed takes its default, and not the Trainer's learning_rate"
        yield Match("optimizer.params", message, '`"lr": "auto"`', level=level)
    if doc.get("scheduler.type") == "WarmupDecayLR" and not doc.has("scheduler.params.warmup_max_lr"):
        message = "it has no warmup_max_lr: the rate rises to DeepSpeed's 0.001, and not to the Trainer's learning_rate"
        fix = '`"warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": "auto"`'
        yield Match("scheduler.params", message, fix, level=level)


# -- a YAML and its JSON: the file exists, and the two do not repeat or contradict each other


@rule(NOTE, ACCELERATE, TRAINER, *SCRIPTS, library="accelerate", fix="a path that exists where the run starts")
def deepspeed_file_missing(doc: Document) -> Iterator[Match]:
    """A relative path counts from the working directory of the run. Where no file is there, accelerate raises."""
    for call in doc.script.launches:
        named = str(call.options.get("config-file") or "") if call.tool == "accelerate" else ""
        names, file = Path(named).name, find_named(named, doc.path)  # which the script may write, or copy, itself
        written = re.findall(r">[ \t]*[\"']?\$\{?(\w+)", doc.text)  # by the name of a variable
        is_open = any(re.search(rf"\b{each}=[\"']?{re.escape(named)}", doc.text) for each in written)
        is_open |= not named.endswith(SUFFIXES) or "$" in named or doc.text.count(names) > 1
        changes = next((line <= call.line for _, line in doc.script.find(r"^cd[ \t]")), False)
        behind = named_files.changed_folders(doc.path) if changes else []
        is_there = is_open or Path(named).is_absolute() or any((each / named).exists() for each in behind)
        if file and behind and not is_there:
            fix = f"`{os.path.relpath(file, behind[0])}`"
            message = f"{shorten(named)} is not there behind `cd {behind[0].name}`: accelerate raises"
            yield Match("--config_file", message, fix, line=call.line, level=ERROR)
        elif not (is_open or file):
            near = None if named.endswith(".json") else _near_file(doc, named)  # which may be DeepSpeed's
            message = f"{shorten(named)} is not found from here"
            fix = "a path that exists" + (f": `{near}` is there" if near else "")
            yield Match("--config_file", message, fix, line=call.line, level=WARNING if near else None)
    arguments = doc.call.arguments if doc.call and doc.kind == TRAINER else {}
    named = str(arguments.get("fsdp_config", ("", 0))[0])
    places = [Path(), doc.folder, *doc.folder.parents[:8]]
    is_there = any(is_file(each / named) for each in places) or doc.text.count(Path(named).name) > 1
    if named.endswith(".json") and "$" not in named and not is_there:
        found = f", but at {doc.fsdp_json.path}" if doc.fsdp_json else ""
        yield Match("fsdp_config", f"{shorten(named)} is not found from here{found}", "a path that exists")
    key, named = document.deepspeed_files(doc)
    is_said = named == doc.get(key) and named.endswith(".json")
    if not is_said or is_file(Path(named)) or (doc.call is not None and doc.deepspeed_json is not None):
        return
    file = find_named(named, doc.path)
    start = file and next((each for each in file.parents if is_file(each / named)), None)
    root = project_root(doc.folder)
    message = f"{shorten(named)} is not found from here" + (f", but from {start}" if start else "")
    fix, level = "start the run where the path is right" if start else "a path that exists", None
    if file and root and not start:  # one of the same name, beside the file; an absolute path is another machine's
        fix, level = f"`{os.path.relpath(file, root)}`", None if Path(named).is_absolute() else ERROR
    elif not file and (near := _near_file(doc, named)):
        fix, level = f"{fix}: `{near}` is there", WARNING
    yield Match(key, message, fix, level=level)


@rule(WARNING, *SCRIPTS, library="torch", fix="a path that exists")
def script_missing(doc: Document) -> Iterator[Match]:
    """The project has no script of this name, and one of a similar name."""
    for call in doc.script.launches:
        script, is_module = call.script or "", {"m", "module"} & call.options.keys()
        is_plain = re.fullmatch(r"[\w./-]+\.py", script) and not is_module and doc.text.count(Path(script).name) == 1
        is_lost = is_plain and not scripts_named(script, doc.path)
        if near := _near_file(doc, script) if is_lost else None:
            message, fix = f"{script} is not in the project", f"a path that exists: `{near}` is there"
            yield Match("script", message, fix, line=call.line)


def _near_file(doc: Document, named: str) -> Path | None:
    """Return the file of this name elsewhere in the project, or else one of a similar name, and kind, where a path
    says, or beside a script."""
    root = None if Path(named).is_absolute() else project_root(doc.folder)  # or another machine's
    same = {Path(named).name, *([f"{Path(named).stem}.yml"] if named.endswith(".yaml") else [])}
    if found := [each for name in same for each in (files_by_name(root) if root else {}).get(name, ())]:
        closest = min(found, key=lambda each: os.path.relpath(each, doc.folder).count(os.sep))
        return closest.relative_to(root or "")
    places = (Path.cwd(), doc.folder, *doc.folder.parents[:8]) if "/" in named else (doc.folder,)
    suffixes = (".py",) if named.endswith(".py") else SUFFIXES if "/" in named else ()
    folder = next((each for place in places if (each := place / Path(named).parent).is_dir()), None)
    names = [each.name for each in folder.iterdir() if each.suffix in suffixes] if folder else []
    words = {*re.split("[_.]", Path(named).name)}
    longer = [each for each in names if words <= {*re.split("[_.]", each)}]  # a word less is another script
    likeness = 0.9 if named.endswith(".py") and not longer else 0.6
    close = nearest(Path(named).name, longer or names, cutoff=likeness)
    return Path(named).parent / close if close else None


@rule(ERROR, TRAINER, AXOLOTL, *SCRIPTS, library="transformers", fix="a JSON of DeepSpeed", for_every_program=True)
def deepspeed_file_no_json(doc: Document) -> Iterator[Match]:
    """The Trainer reads the file of `deepspeed` as JSON: YAML is for `accelerate launch`, which refuses that JSON."""
    for call in doc.script.launches:
        config = document.accelerate_file(doc, call)
        if call.tool == "accelerate" and config is not None and config.kind == DEEPSPEED:
            message = f"{shorten(call.options['config-file'])} is DeepSpeed's, and no configuration of accelerate"
            fix = "`--use_deepspeed --deepspeed_config_file` with it"
            yield Match("--config_file", message, fix, line=call.line, library="accelerate")
    named = document.deepspeed_files(doc)[1]
    if named.endswith((".yaml", ".yml")) and not doc.is_read("deepspeed"):
        file = find_named(named, doc.path)
        is_accelerates = file is not None and re.search(rb"^distributed_type\s*:", file.read_bytes(), re.M)
        fix = "remove it, and `accelerate launch --config_file` with it" if is_accelerates else "DeepSpeed's JSON"
        yield Match("deepspeed", f"{shorten(named)} is no JSON: the Trainer raises", fix)


@rule(ERROR, DEEPSPEED, library="accelerate", fix="UTF-8 without a byte order mark")
def byte_order_mark(doc: Document) -> Iterator[Match]:
    """accelerate and the Trainer refuse a JSON that begins with a byte order mark; DeepSpeed alone takes it."""
    file = Path(doc.path)
    if doc.is_json and is_file(file) and file.read_bytes()[:3] == b"\xef\xbb\xbf":
        level = NOTE if doc.named_by is None else settings.level_for_trainer(doc)  # DeepSpeed alone may read it
        message = "the file begins with a byte order mark: accelerate and the Trainer refuse it"
        yield Match("", message, "save it as UTF-8 without the mark", line=1, level=level)


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def key_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses a YAML that repeats the JSON's setting, even if equal."""
    if not names_json(doc) or not settings.is_deepspeed(doc):
        return
    for name, there in OWNED_BY_JSON.items():
        key = f"deepspeed_config.{name}"
        if doc.has(key) and not doc.is_flag(key):  # it looks at its file alone
            json, value = doc.deepspeed_json, str(doc.get(key)).lower()
            in_json = str(json.get(there, "none")).lower() if json is not None else None
            is_same = in_json == value or (value in UNSAID and in_json in (*UNSAID, "auto"))
            message = f"accelerate refuses {name} together with deepspeed_config_file"
            fix = "remove it" if is_same else f"remove it; the JSON's {there}, or a Trainer's argument, says it"
            yield Match(key, message, fix, remove=is_same)


@rule(ERROR, ACCELERATE, library="accelerate", fix="nothing: the JSON has it")
def precision_owned_by_json(doc: Document) -> Iterator[Match]:
    """With a `deepspeed_config_file`, accelerate refuses `mixed_precision` in the YAML, even if the two agree."""
    precision = doc.get("mixed_precision")
    if precision is None or not (names_json(doc) and settings.is_deepspeed(doc)) or doc.is_flag("mixed_precision"):
        return
    json = doc.deepspeed_json
    in_json = next((name for name in ("bf16", "fp16") if json and as_bool(json.get(f"{name}.enabled"))), None)
    contradiction = f"; the JSON has {in_json}" if in_json and in_json != precision else ""
    message = f"accelerate refuses it together with deepspeed_config_file{contradiction}"
    says = "" if precision == "fp8" else f", a Trainer's `{precision}` or the JSON"  # none of which has fp8
    is_said = in_json == precision or as_bool(precision) is False
    fix = "remove it" if is_said else f"remove it: `--mixed_precision {shorten(precision)}`{says} says it"
    fix = f"remove it, or {in_json} from the JSON" if contradiction and not is_said else fix
    yield Match("mixed_precision", message, fix, remove=in_json == precision)


@rule(ERROR, ACCELERATE, TRAINER, *SCRIPTS, library="deepspeed", fix='"auto" in the JSON')
def batch_arithmetic_of_pair(doc: Document) -> Iterator[Match]:
    """DeepSpeed asserts train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes."""
    if doc.kind not in SCRIPTS:
        processes = as_int(doc.get("num_processes")) or processes_of(doc)
        key, fix = "num_processes" if doc.kind == ACCELERATE else "deepspeed", '`"auto"` for all three in the JSON'
        in_parts = any(each.has("parallelism_config") for each in (doc, doc.launch_config) if each)
        is_on = doc.kind != ACCELERATE or settings.engine_of(doc) == "DEEPSPEED"
        if doc.deepspeed_json and is_on and not in_parts:
            yield from (Match(key, message, fix) for message in _unequal(doc.deepspeed_json, processes))
    for call in doc.script.launches:  # of a loop of its own, which deepspeed.initialize(args) reads it for
        named, line = call.arguments.get("deepspeed_config", ("", 0))
        file = find_named(str(named), doc.path)
        words = " ".join((call.script or "", *call.arguments, *named_files.source_of(call.script or "", doc.path)))
        if file and not any(each in words.lower() for each in ("parallel", "pipe", "mpu")):
            with contextlib.suppress(ToolkitError):  # it may be no configuration
                for message in _unequal(document.load_document(file), processes_of_call(call)):
                    yield Match("--deepspeed_config", message, "a multiple, or another number of processes", line=line)


def _unequal(json: Document, processes: int | None) -> Iterator[str]:
    total, per_gpu, accumulation = (as_int(json.get(key)) for key in BATCH_KEYS)
    if not (total and processes) or json.has("sequence_parallel_size") or json.has("tensor_parallel"):
        return  # the last two make fewer batches than processes
    product = (per_gpu or 1) * (accumulation or 1) * processes
    if total != product if per_gpu and accumulation else total % product:
        factors = " x ".join(str(each) for each in (per_gpu, accumulation, processes) if each)
        yield f"{total} is not {factors}" + ("" if per_gpu and accumulation else ", nor a multiple of it")


@rule(ERROR, TRAINER, library="transformers", fix='"auto" in the JSON', for_every_program=True)
def differs_from_json(doc: Document) -> Iterator[Match]:
    """The Trainer compares its arguments with the JSON, and raises in every rank where they differ."""
    json = doc.deepspeed_json
    if json is None:
        return
    fix = '`"auto"` in the JSON'
    for key in NUMBERS_OF_TRAINER:
        field = OWNED_BY_TRAINER[key]
        here, there = doc.get(field), json.get(key)
        if field == "warmup_steps" and (as_float(here) or 0) < 1:
            continue  # a share of steps that are not known, and 0 is 1 in newer versions
        if as_float(here) is not None and as_float(there) is not None and as_float(here) != as_float(there):
            yield Match(field, f"{shorten(here)} here, {shorten(there)} in {key}", fix)
    counts = [as_int(doc.get(name)) for name in (OWNED_BY_TRAINER[BATCH_KEYS[1]], BATCH_KEYS[2])]
    counts, total = [*counts, processes_of(doc)], as_int(json.get(BATCH_KEYS[0]))
    product = math.prod(each or 0 for each in counts)
    if total and product and product != total and not as_int(json.get(BATCH_KEYS[1])):  # else the pair's rule
        factors = " x ".join(map(str, counts))
        yield Match("per_device_train_batch_size", f"{factors} here, {total} in {BATCH_KEYS[0]}", fix)
    for name in ("bf16", "fp16"):
        is_known = doc.program == "transformers" and doc.is_complete and not doc.has(f"{name}_full_eval")
        flag, json_flag = as_bool(doc.get(name, False if is_known else None)), as_bool(json.get(f"{name}.enabled"))
        if flag is not None and json_flag is not None and flag != json_flag:
            yield Match(name, f"{flag} here, {json_flag} in {name}.enabled", fix)

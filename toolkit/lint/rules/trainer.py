"""Rules about Trainer arguments that transformers refuses together, or that mean something else than they say."""

import json
import math
import re
from collections.abc import Iterable, Iterator

from toolkit.convert.job_script import processes_of_call, with_exports
from toolkit.errors import nearest
from toolkit.job.trainer_schema import trainer_schema
from toolkit.lint.document import OUR_PROGRAMS, TRAINER, Document
from toolkit.lint.findings import ERROR, NOTE, WARNING, Match, rule
from toolkit.lint.named_files import imported_source, occurs, source_of
from toolkit.lint.rules import settings
from toolkit.lint.rules.settings import CONVERTS_TEXT, as_bool, as_float, as_int, fsdp_setting, is_template, shorten
from toolkit.presets.removed_keys import TRAINER_FSDP_KEYS

STRATEGIES = {"logging": "steps", "eval": "no", "save": "steps"}
FSDP_WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
FSDP2_SINCE = "5.10.0"  # the Trainer's default version of FSDP
CHECKPOINTING_KWARGS = {"use_reentrant", "preserve_rng_state", "determinism_check", "context_fn", "debug", "early_stop"}
ACCUMULATION_KWARGS = {"num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch"}
GENERATION_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
UNSLOTH = re.compile(r"^\s*(?:from|import) unsloth\b", re.MULTILINE)


@rule(ERROR, TRAINER, library="transformers", fix="what the message names", for_every_program=True)
def refused_by_trainer(doc: Document) -> Iterator[Match]:
    """`TrainingArguments` raises for these values, or for these arguments together."""
    strategies = {name: str(doc.get(f"{name}_strategy", default)) for name, default in STRATEGIES.items()}
    steps = {
        name: as_float(doc.get(f"{name}_steps", 500 if name != "eval" else doc.get("logging_steps", 500)))
        for name in STRATEGIES
    }
    for name, strategy in strategies.items():
        count = steps[name]
        if strategy == "steps" and count is not None and doc.has(f"{name}_steps"):
            if count > 1 and count != int(count):
                yield Match(f"{name}_steps", f"{count} is refused: above 1 it is a whole number", "a whole number")
            if count == 0 and (name == "logging" or (name == "eval" and steps["logging"] == 0)):
                fix = f'a number above 0, or `{name}_strategy: "no"`'
                yield Match(f"{name}_steps", "0 is refused where the strategy is steps", fix)
    is_known = doc.is_complete and not any(map(is_template, strategies.values()))
    is_known &= doc.program != "ms-swift" or doc.has("eval_strategy")  # it evaluates as often as it saves
    evaluation = str(doc.get("evaluation_strategy", strategies["eval"]))
    if any(map(doc.is_read, ("load_best_model_at_end", "lr_scheduler_type"))):  # by name: others may be its own
        missing = {"eval", "save"} - {key[:4] for key in doc.data if key.endswith("_strategy")}
        is_known &= not any(settings.passes(doc, rf"{each}(?:uation)?_strategy") for each in missing)
    if as_bool(doc.get("load_best_model_at_end")) and strategies["save"] != "best" and is_known:
        every, saved = steps["eval"], steps["save"]
        if doc.program is None and not (doc.has("eval_steps") and doc.has("save_steps")):
            every = None  # a script may compute it
        if evaluation in ("False", "no", "steps", "epoch") and evaluation != strategies["save"]:
            fix = f"`eval_strategy: {strategies['save']}`, or `load_best_model_at_end: false`"
            yield Match("load_best_model_at_end", f"evaluation is {evaluation}, saving {strategies['save']}", fix)
        elif evaluation == "steps" and every and saved and (every < 1) != (saved < 1):
            yield Match("save_steps", f"{saved:g} and eval_steps {every:g} mix a share with a number", "two numbers")
        elif evaluation == "steps" and every and saved and round(saved * 1e6) % max(1, round(every * 1e6)):
            message = f"save_steps {saved:g} is not a multiple of eval_steps {every:g}, as load_best_model_at_end needs"
            fix = f"`save_steps`: a multiple of {every:g}"
            yield Match("save_steps" if doc.has("save_steps") else "eval_steps", message, fix)
    schedule = str(doc.get("lr_scheduler_type"))
    if schedule in ("reduce_lr_on_plateau", "greedy") and evaluation == "no" and is_known:
        yield Match("lr_scheduler_type", f"{schedule} needs an evaluation", "`eval_strategy: epoch`")
    words = doc.get("fsdp").split() if isinstance(doc.get("fsdp"), str) and as_bool(doc.get("fsdp")) is None else []
    version = as_int(fsdp_setting(doc, "version", 2))
    for word in words if doc.program in OUR_PROGRAMS else ():
        name = word.lower() if version == 1 and word.lower() in FSDP_WORDS[:5] else word  # version 1 folds case
        if name not in FSDP_WORDS and not is_template(word):
            yield Match("fsdp", f"{shorten(word)} is no option of fsdp", "`fsdp: true`")
        elif name in ("hybrid_shard", "hybrid_shard_zero2", "no_shard") and version == 2:
            fix = "no fsdp" if name == "no_shard" else "`full_shard`, or `version: 1` in fsdp_config"
            yield Match("fsdp", f"{word} is refused under FSDP2, the default", fix, since=FSDP2_SINCE)


@rule(ERROR, TRAINER, library="trl", fix="what the message names", for_every_program=True)
def refused_by_grpo(doc: Document) -> Iterator[Match]:
    """TRL's GRPO and RLOO raise for these values: a batch holds complete groups of `num_generations` completions, at
    least 2 for GRPO.
    """
    of_swift = doc.program == "ms-swift" and doc.get("rlhf_type") == "grpo" and doc.has("gradient_accumulation_steps")
    of_unsloth = occurs(UNSLOTH, doc.reader_source)  # which makes the batch as large as a group
    if of_unsloth or not (settings.is_grpo(doc) or of_swift):
        return
    group = as_int(doc.get("num_generations", 8))
    defaults = GENERATION_BATCH | ({"per_device_train_batch_size": 1} if of_swift else {})
    per_gpu, accumulation = (as_int(doc.get(name, default)) for name, default in defaults.items())
    batch, every = as_int(doc.get("generation_batch_size")), as_int(doc.get("steps_per_generation"))
    if group is not None and group < 2 and not of_swift:
        message, fix = f"{group} is refused: an advantage compares at least 2 completions", "2, and a batch of 2"
        yield Match("num_generations", message, fix)
    elif group and per_gpu and accumulation and doc.is_complete and batch is None:
        each = per_gpu * (every or accumulation)
        needs = group // math.gcd(each, group)
        processes = processes_of(doc)
        if needs > 1 and (processes is None or processes % needs):
            start = f"{per_gpu} x {every or accumulation} completions on a process are not full groups of {group}"
            count = f"{processes} processes are refused" if processes else f"it needs {needs} processes, or a multiple"
            fix = f"a multiple of {needs} processes, or a batch and accumulation of {needs} times as much"
            of_trl = processes and not re.search(r"class \w*GRPO\w*\((?:\w+\.)?Trainer\)", doc.reader_source)
            yield Match("num_generations", f"{start}: {count}", fix, level=None if of_trl else NOTE, since="0.15.0")
    elif batch and group and batch % group:
        message = f"{batch} is not a multiple of num_generations {group}"
        yield Match("generation_batch_size", message, f"a multiple of {group}")
    low, high = (as_float(doc.get(f"vllm_importance_sampling_clip_{end}")) for end in ("min", "max"))
    if low is not None and high is not None and low >= high:
        message = f"{low:g} is not below clip_max {high:g}"
        yield Match("vllm_importance_sampling_clip_min", message, "a smaller number", since="1.6.0")


def processes_of(doc: Document) -> int | None:
    """Return the number of processes that a launcher starts, where its options or its YAML say it."""
    in_yaml = doc.launch_config.get("num_processes") if doc.launch_config else None
    call = doc.start
    if call is not None and call.tool == "trl":  # which passes it on to accelerate
        return as_int(doc.get("num_processes"))
    if call is None or call.tool not in ("swift", "llamafactory-cli", "deepspeed"):
        return processes_of_call(call, in_yaml) if call else None
    return processes_of_call(with_exports(call, (doc.command or doc).text))


@rule(WARNING, TRAINER, library="pyyaml", fix="a number with a dot: 1.0e-4")
def number_as_text(doc: Document) -> Iterator[Match]:
    """YAML 1.1 reads `1e-4`, without a dot, as text, and transformers' parser converts nothing: the optimizer raises.
    TRL, LLaMA-Factory and axolotl convert it.
    """
    for name, field in trainer_schema().fields.items():
        value = doc.get(name)
        is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value)
        is_its = is_number and "float" in field.type and doc.program in ("transformers", None)
        is_in_yaml = doc.call is None and not (doc.is_json or doc.is_flag(name))
        is_passed = is_number and is_in_yaml and _is_passed_on(doc, name)
        if is_passed or (is_its and is_in_yaml and not settings.converts_text(doc, name)):
            number, level = re.sub("[eE]", ".0e", str(value)), None if is_passed or settings.keeps_text(doc) else NOTE
            effect, library = ("the optimizer raises", "torch") if is_passed else ("parse_yaml_file keeps it", None)
            message = f"{value} is text to PyYAML: {effect}"
            yield Match(name, message, f"`{number}`", value=number, level=level, library=library)


def _is_passed_on(doc: Document, name: str) -> bool:
    """Return True where the script that a command starts passes a setting of its YAML to an optimizer as it is."""
    script = source_of(doc.start.script or "", (doc.command or doc).path)[0] if doc.start else ""
    sources = script + imported_source(script, doc.folder)
    is_passed = re.search(rf"\b(?:lr|eps|weight_decay)=\w+\[[\"']{name}[\"']\]\s*[,)]", script)
    return bool(is_passed) and "yaml.safe_load(" in sources and not re.search(CONVERTS_TEXT, sources)


def _nested_arguments(of_schedule: Iterable[str]) -> dict[str, set[str]]:
    kwargs = dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), CHECKPOINTING_KWARGS)
    own = set(trainer_schema().accelerator_config)
    return {**kwargs, "lr_scheduler_kwargs": set(of_schedule), "accelerator_config": own}


@rule(ERROR, TRAINER, library="transformers", fix="a key of the block, as JSON", for_every_program=True)
def refused_nested_argument(doc: Document) -> Iterator[Match]:
    """The Trainer refuses other keys in its nested arguments. A word that begins with `{` is read as JSON."""
    schedule = str(doc.get("lr_scheduler_type"))
    known = _nested_arguments(() if "constant" in schedule else trainer_schema().schedules.get(schedule) or ())
    known["accelerator_config.gradient_accumulation_kwargs"] = ACCUMULATION_KWARGS
    if isinstance(doc.get("parallelism_config"), dict | str):
        fix = "`parallelism_config` in accelerate's YAML, or a `ParallelismConfig` in the script"
        yield Match("parallelism_config", "no file and no command can say it: the Trainer takes an object", fix)
    for name, keys in known.items():
        values = doc.get(name)
        is_path = name == "accelerator_config" and str(values)[:1] != "{"
        if isinstance(values, str) and values and not (is_path or is_template(values)):
            try:
                values = json.loads(values)
            except ValueError:
                fix = "`{...}` with double quotes around its words, in single ones of the shell"
                yield Match(name, f"{shorten(values)} is no JSON, and is refused", fix)
        for key in values if isinstance(values, dict) and keys else ():
            if key not in keys:
                close, place = nearest(str(key)[:100], keys), name if doc.call else f"{name}.{key}"
                fix = f"`{close}`" if close else f"one of {', '.join(sorted(keys))}"
                yield Match(place, f"`{shorten(key)}` is refused in {name.rpartition('.')[2]}", fix)


@rule(ERROR, TRAINER, library="pyyaml", fix="the keys indented under their block", for_every_program=True)
def not_indented(doc: Document) -> Iterator[Match]:
    """A block is empty, and its keys follow at the same indentation: they are arguments that nothing has."""
    schema = trainer_schema()
    inner = _nested_arguments(key for keys in schema.schedules.values() for key in keys or ())
    inner["fsdp_config"] = {name for key in TRAINER_FSDP_KEYS for name in (key, f"fsdp_{key}")}
    for name, keys in inner.items():
        line = doc.line(name) if doc.has(name) and doc.get(name) is None else None
        for key in keys & doc.data.keys() if line is not None else ():
            if key not in schema.fields and (doc.line(key) or 0) > (line or 0):
                yield Match(key, f"stands beside {name}, which is empty", f"indent it under {name}")


@rule(NOTE, TRAINER, library="transformers", removed_in=FSDP2_SINCE, fix="fsdp: true, and the rest in fsdp_config")
def fsdp_as_words(doc: Document) -> Iterator[Match]:
    """Words in `fsdp` are deprecated. They mean FSDP2, which refuses the hybrid ones. In version 1 accelerate ignores
    the word.
    """
    value = doc.get("fsdp") if doc.program != "ms-swift" else None  # which has words of its own
    if isinstance(value, list) or (isinstance(value, str) and value and as_bool(value) is None):
        version, named = as_int(fsdp_setting(doc, "version", 2)), str(value).lower()
        reshard = "false" if "shard_grad_op" in named else "true"
        fix = f"`fsdp: true`, `fsdp_config: {{version: 2, reshard_after_forward: {reshard}}}`"
        if version == 1 and re.search("shard_grad_op|no_shard|hybrid", named):
            yield Match("fsdp", f"{shorten(value)} runs FULL_SHARD in version 1", fix, level=WARNING)
        else:
            yield Match("fsdp", f"{shorten(value)} is the deprecated form", fix)

"""`toolkit plan --config FILE`: the model and the options of a file of axolotl, TRL or LLaMA-Factory, or of ours.

A setting that decides memory or speed is used, or listed as not used; one that could change the verdict is an error
that names the option to give (convert/tables/plan.yaml).
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.convert.commands import MS_SWIFT, OF_THE_LAUNCH
from toolkit.convert.conversion import MODEL_NAMES, TOOLS, convert_settings, read_settings
from toolkit.convert.draft import PRESET, Conversion, block_of, load_dialect, plan_table, typed
from toolkit.convert.programs import program_of, program_schema
from toolkit.convert.sources import preset_of_deepspeed
from toolkit.errors import ToolkitError, shown
from toolkit.files.documents import parse_yaml, read_configuration
from toolkit.files.paths import is_file
from toolkit.job.argument_aliases import ALIASES, canonical_values
from toolkit.job.argument_reading import CONFIG_SUFFIXES, argument_types
from toolkit.job.argument_values import Range, check_range, check_type, check_word, is_true
from toolkit.job.job import Job
from toolkit.models.optimizers import OF_SCRIPTS
from toolkit.plan.methods import METHODS, SFT, Method
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PLANNED_ARGUMENTS, PlannedJob
from toolkit.plan.programs import PROGRAMS
from toolkit.versions import version_numbers

# Settings of methods other than SFT, by the names of the options; a command has them as text.
METHOD_SETTINGS: dict[str, tuple[str, Callable[[Any], object]]] = {
    **dict.fromkeys(("beta", "vllm_gpu_memory_utilization"), ("float", float)),
    **dict.fromkeys(("num_generations", "max_completion_length"), ("int", int)),
    **dict.fromkeys(("precompute_ref_log_probs", "vllm_enable_sleep_mode"), ("bool", is_true)),
}
CHOSEN = ("accumulate", "activation_checkpointing", "use_liger_kernel")  # by `PlannedJob.of`
SWIFT_KEYS = (
    *("tuner_type", "train_type", "lora_rank", "quant_bits", "quant_method", "deepspeed", "rlhf_type", "adapter"),
)
SWIFT_WORDS = {"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2"}  # of attn_impl
CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
# Where a file says the method, and the words that are another one here; TRL's is the command's.
METHOD_KEYS = {"axolotl": ("rl", "reward_model"), "llama-factory": ("stage",), "trl": ("method",)}
METHOD_WORDS = {"ipo": "dpo", "rm": "reward", "True": "reward", "pt": SFT}
MOST_MISSPELT = 2  # settings of a file that we do not have, above which it is not ours
OF_TRAINING = ("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "do_train")
COMPLETION_TOKENS, PROMPT_TOKENS = 256, 512  # TRL's default; TRL limits no prompt, and had this limit until 1.0
# ms-swift's GRPO (4.5.2, arguments/rlhf_args.py and rlhf_trainers/args_mixin.py); its `max_length` is the prompt's.
SWIFT_GENERATION = {"beta": 0.04, "max_completion_length": 512, "vllm_gpu_memory_utilization": 0.9}
# Settings of a vLLM on GPUs of its own; `vllm_device` is of TRL below 0.18, whose next version is pinned by Open-R1.
COLOCATES_SINCE = (1, 0)  # TRL, without `vllm_mode` (huggingface/trl#5255)
VLLM_ELSEWHERE = ("vllm_device", "vllm_server_host", "vllm_server_base_url", "pinned_trl")
# Fields of peft's LoraConfig with which other weights are trained than adapters of one rank.
MORE_THAN_ADAPTERS = (
    *("modules_to_save", "target_parameters", "layer_replication", "rank_pattern", "layers_to_transform"),
    "trainable_token_indices",
)
# What to type after an option, where it is no number.
EXAMPLES = {
    **{"attn_implementation": " sdpa", "load_in_4bit": "", "fp8": "", "lora_target_modules": " NAME", "method": " sft"},
    **{"load_in_8bit": "", "optim": " adamw_torch_fused", "preset": " zero3"},
    **{"activation_checkpointing": "", "cp": " N --preset cp --no-packing --attn-implementation sdpa"},
}
# Where a file says what is trained, and the rank of its adapters; `v1` is LLaMA-Factory's format under examples/v1.
ADAPTERS = {
    "axolotl": ("adapter", "lora_r"),
    "llama-factory": ("finetuning_type", "lora_rank"),
    "v1": ("peft_config", "r"),
}
PLANNED_ADAPTERS = ("lora", "qlora", "full", "None")
ON_IMAGES = "on images"  # how a dialect's `refused` names settings of models with images, which are planned


class ConfiguredPlan(NamedTuple):
    """What to plan, and lines about where it comes from and what is not used."""

    model: str
    options: PlanOptions
    described: str


class _Source(NamedTuple):
    """The settings of a file, and in our words; `program` and `conversion` are None for a file of ours."""

    program: str | None
    values: Mapping[str, Any]
    conversion: Conversion | None
    method: str
    options: Mapping[str, Any] = {}
    """What a file of ms-swift says in options of `toolkit plan`; its values are then our training arguments."""
    unused: Collection[str] = ()
    method_values: Mapping[str, Any] = {}
    """The settings of ms-swift in TRL's words."""


def configured_plan(file: Path, model: str | None, options: PlanOptions, *, given: Collection[str]) -> ConfiguredPlan:
    """Return the options of a file, below those that are `given` on the command line, by the names of the fields.

    A TRL command has its method; for a TRL YAML that several have, `--method` is to be given. Raises ToolkitError for a
    file that cannot be read, that trains something else than text, that names no model where the command line names
    none, and for a setting that decides the plan and is not planned.
    """
    check_word("--method", options.method, list(METHODS))
    source = _read(file, model, options, given)
    program, values, conversion, method, theirs, *_ = source
    job = Job.from_values(values if conversion is None else conversion.arguments)
    optim = options.optim if "optim" in given else str(values.get("optimizer")) if program == "axolotl" else ""
    job = job.with_values(optim=optim) if "optim" in given or optim in OF_SCRIPTS else job
    presets = options.preset if "preset" in given else () if conversion is None else (conversion.preset,)
    numerics = _numerics(source, job, presets)
    not_used = [*source.unused, *_checked(file, source, job, numerics, given)]
    planned = PlannedJob.of(job)
    loss, note = _loss(source, job, planned)
    names = {each.name for each in fields(options)}
    found = {name: getattr(planned, name) for name in (*PLANNED_ARGUMENTS, *CHOSEN) if name in names} | {"loss": loss}
    if not planned.evaluates:
        del found["per_device_eval_batch_size"]
    found |= {"num_train_epochs": job.value("num_train_epochs") or 3.0, "max_steps": job.value("max_steps")}
    data = [Path(name) for name in job.dataset if is_file(Path(name))] if isinstance(job.dataset, tuple) else []
    if method != SFT:
        found |= {"method": method, "use_liger_kernel": job.use_liger_kernel, "loss": None, "packing": False}
        found |= _method_options(source, options, given, lora=job.lora_r is not None or "lora_r" in given)
        if "max_completion_length" in found and "max_seq_length" not in given:
            prompt = (source.method_values or values).get("max_prompt_length")
            prompt = prompt or (values.get("sequence_len") if program == "axolotl" else None)
            check_type("max_prompt_length", prompt, "int | None")
            found["max_seq_length"] = int(prompt or PROMPT_TOKENS) + int(found["max_completion_length"])
            note = note if prompt else f", prompts of {PROMPT_TOKENS} tokens (`--max-seq-length` has both)"
        note += ", vLLM on GPUs of its own" if found.get("vllm") == "server" else ""
    if len(data) == 1 and not planned.packing:  # packed rows are counted only if they are asked for
        found |= {"dataset": data[0], "column": tuple("=".join(each) for each in (job.column or {}).items())}
    targets = planned.value("optim_target_modules")
    found |= {"optim_args": job.optim_args, "optim_target_modules": [targets] if isinstance(targets, str) else targets}
    found |= {"dora": True} if planned.numerics.dora else {}
    described = f"{file}: {MS_SWIFT if theirs else 'our training arguments'}{note}"
    found |= {"gradient_as_bucket_view": False, **theirs} if theirs else {}
    if conversion is not None:
        has_preset = program != "trl" or PRESET in conversion.converted.values()  # a YAML of TRL names no engine
        found |= {"preset": (conversion.preset,) if has_preset else (), "gradient_as_bucket_view": False}
        found["num_processes"] = () if conversion.num_processes is None else (conversion.num_processes,)
        found |= {"program": program, **numerics}
        named = conversion.notes.get(PRESET)
        if named is None and PRESET not in conversion.converted.values():
            named = "the file names no DeepSpeed or FSDP"
        why = "" if named is None else f" ({named})"
        preset = f"preset {conversion.preset}{why}" if has_preset else "no preset: `--preset`"
        preset = f"preset {', '.join(options.preset)} (as given)" if "preset" in given else preset
        loss = f"{options.loss if 'loss' in given else loss or PROGRAMS[str(program)].loss} loss"
        described = f"{file}: {conversion.tool}, {preset}, {loss if method == SFT else method}{note}"
    if job.global_batch_size is not None and "gradient_accumulation_steps" not in given:
        described += "; its global_batch_size is not read: `--gradient-accumulation-steps`"
    described += f"\nnot used: {', '.join(dict.fromkeys(not_used))}" if not_used else ""
    described += _refused(source)
    found = {name: value for name, value in found.items() if name not in given}
    if model is None and job.model_name_or_path is None:
        raise _no_model(file)
    return ConfiguredPlan(model or str(job.model_name_or_path), replace(options, **found), described)


def _read(file: Path, model: str | None, options: PlanOptions, given: Collection[str]) -> _Source:
    program = None
    if file.suffix in CONFIG_SUFFIXES:
        values = read_configuration(file)
        program = program_of(values)
        if program is None and model is not None:  # the file may be one of TRL's, whose script names the model
            program = program_of({"model_name_or_path": model, **values})
        if program is None and not values.keys() & {"distributed_type", "compute_environment"}:
            _check_ours(file, values)
            return _Source(None, values, None, options.method if "method" in given else str(values.get("method", SFT)))
    tool = program if program in TOOLS else None
    program, values = read_settings(file, tool, methods=[each for each in METHODS if each != SFT], others=[MS_SWIFT])
    values = _with_loading(values) if program == "trl" else values
    if program == MS_SWIFT:
        return _swift(file, values, options, given)
    method = options.method if "method" in given else _method(program, values, file)
    is_said = method == SFT and "method" not in given
    left = {key: value for key, value in values.items() if is_said or key not in METHOD_KEYS[program]}
    # What the command line says is not read: a method or a file that is not planned may be named there.
    for name in set(given) - {"lora_r"}:
        left = {key: value for key, value in left.items() if _option(key) != name}
    if not any(left.get(name) for name in ("model", "base_model", "model_name_or_path")):
        if model is None:
            raise _no_model(file)
        left["base_model" if program == "axolotl" else "model_name_or_path"] = model
    if program == "llama-factory" and not left.keys().isdisjoint(OF_TRAINING):
        left.setdefault("dataset", "unnamed")  # a plan needs none
    left = {key: value for key, value in left.items() if not key.startswith("torch_compile")}  # which may be refused
    refused = load_dialect(program).refused
    for what in (what for key, what in refused.items() if left.get(key) and ON_IMAGES not in what):
        if "method" not in given:
            raise ToolkitError(f"{file} trains {what}", hint="`--method sft` plans its text alone")
    left = {key: value for key, value in left.items() if key not in refused}
    left = _with_low_rank(_as_lora(left)) if program == "llama-factory" else left
    adapter, rank = ADAPTERS.get("v1" if "peft_config" in left else program, ("", ""))
    named = left["peft_config"].get("name") if isinstance(left.get("peft_config"), dict) else left.get(adapter)
    if "lora_r" in given and adapter:
        left |= (
            {"peft_config": {"name": "lora", "r": options.lora_r}}
            if rank == "r"
            else {adapter: "qlora" if named == "qlora" else "lora", rank: options.lora_r}
        )
    elif adapter and str(named) not in PLANNED_ADAPTERS:
        hint = "`--lora-r 16` plans LoRA adapters of that rank"
        raise ToolkitError(f"{file}: {adapter} {shown(named)} is not planned", hint=hint)
    conversion = convert_settings(program, left, file)
    values = {key: value for key, value in values.items() if program == "trl" or key not in OF_THE_LAUNCH}
    return _Source(program, values, conversion, method)


def _with_loading(values: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's settings with what its `model_init_kwargs` say: they win over its own (trl/scripts/sft.py)."""
    loading = values.get("model_init_kwargs")
    loading = parse_yaml(loading, "model_init_kwargs") if isinstance(loading, str) else loading
    if not isinstance(loading, dict):
        return values
    own = {name: loading[name] for name in ("attn_implementation", "dtype", "torch_dtype") if name in loading}
    others = {name: value for name, value in loading.items() if name not in own}
    return {**values, **own, "model_init_kwargs": others}


def _no_model(file: Path) -> ToolkitError:
    return ToolkitError(f"{file} names no model", hint=f"`toolkit plan MODEL --config {shlex.quote(str(file))}`")


def _check_ours(file: Path, values: Mapping[str, Any]) -> None:
    """Raise ToolkitError for the file of a script with settings of its own, whose meaning nothing here knows."""
    if program_of({"model_name_or_path": "a model", **values}) is not None:
        raise _no_model(file)
    others = [name for name in values if name not in argument_types() and name not in ALIASES]
    if len(others) > MOST_MISSPELT:
        model = next((str(values[name]) for name in MODEL_NAMES if isinstance(values.get(name), str)), "MODEL")
        raise ToolkitError(
            f"{file} is of no program whose files are read (TRL, axolotl, LLaMA-Factory, ms-swift): it has"
            f" {', '.join(map(shown, others[:4]))}",
            hint=f"`toolkit plan {shlex.quote(model)} --max-seq-length 2048 --per-device-train-batch-size 1`, and"
            " `--lora-r 16` where it trains adapters",
        )


def _as_lora(values: dict[str, Any]) -> dict[str, Any]:
    """Return LLaMA-Factory's OFT as adapters at the same places, whose blocks `_numerics` reads.

    A number of blocks (`oft_rank`) in the place of their size is not planned.
    """
    if values.get("finetuning_type") != "oft" or values.get("oft_rank"):
        return values
    kept = {name: value for name, value in values.items() if not name.startswith("oft_") and name != "module_dropout"}
    return kept | {"finetuning_type": "lora", "lora_rank": 1, "lora_target": values.get("oft_target", "all")}


def _with_low_rank(values: dict[str, Any]) -> dict[str, Any]:
    """Return LLaMA-Factory's own GaLore or APOLLO in transformers' words; layerwise or with LoRA they stay refused.

    Its defaults are those of hparams/finetuning_args.py, and `all` leaves out the head (model_utils/misc.py).
    """
    names = [name for name in ("galore", "apollo") if is_true(values.get(f"use_{name}") or False)]
    if len(names) != 1 or is_true(values.get(f"{names[0]}_layerwise") or False):
        return values
    if values.get("finetuning_type", "lora") not in ("full", "freeze"):  # hparams/finetuning_args.py raises
        return values
    name, optim = names[0], str(values.get("optim", "adamw"))
    own = {key.removeprefix(f"{name}_"): value for key, value in values.items() if key.startswith(f"{name}_")}
    kept = {key: value for key, value in values.items() if not key.startswith((f"{name}_", f"use_{name}"))}
    states = "adafactor" if optim == "adafactor" else "adamw_8bit" if "8bit" in optim else "adamw"
    words = {"rank": own.get("rank", 16), "proj_type": own.get("proj_type", "std")}
    words |= {"proj": own.get("proj", "random")} if name == "apollo" else {}
    target = str(own.get("target", "all"))
    return kept | {
        "optim": f"{name}_{states}",
        "optim_args": ",".join(f"{key}={value}" for key, value in words.items()),
        "optim_target_modules": "(?!lm_head).*" if target == "all" else target.split(","),
    }


def _swift(file: Path, values: Mapping[str, Any], options: PlanOptions, given: Collection[str]) -> _Source:
    """The settings of ms-swift in our words (convert/tables/plan.yaml); `tuner_type` and others have its defaults.

    Raises ToolkitError for a setting that decides the plan and has no word here, and for a file without a length.
    """
    table: dict[str, str] = plan_table()[MS_SWIFT]
    values = {"gradient_checkpointing": True, "per_device_train_batch_size": 1} | dict(values)
    tuner = str(values.get("tuner_type") or values.get("train_type") or "lora")
    bits = str(values.get("quant_bits") or "")
    ours: dict[str, Any] = {} if tuner == "full" else {"lora_r": values.get("lora_rank") or 8}
    ours |= {} if bits != "4" else {"load_in_4bit": True}
    refused = {
        "lora_r": ("tuner_type", tuner not in ("lora", "full")),
        "load_in_4bit": ("quant_bits", bits not in ("", "0", "4", "8")),
        "max_seq_length": ("max_length, which is absent: it is the model's own,", not values.get("max_length")),
    }
    for key in [key for key in values if key not in table and key not in SWIFT_KEYS]:
        if (option := _option(key)) and str(values[key]).lower() not in ("false", "1", "none", "", "[]"):
            refused[option] = f"{key} {shown(values[key])}", True
    for option, (what, is_refused) in refused.items():
        if is_refused and option not in given:
            raise ToolkitError(f"{file}: {what} is not planned", hint=_instead(option, what.rpartition(" ")[2]))
    for key, argument in table.items():
        if values.get(key) is not None and argument not in given and (key != "target_modules" or tuner != "full"):
            value = values[key]
            if "$" in str(value):
                raise ToolkitError(
                    f"{file}: {key} is {shown(value)}", hint=f"write its value, or `--{argument.replace('_', '-')} N`"
                )
            ours |= canonical_values({argument: typed(argument, SWIFT_WORDS.get(str(value), value))})
    method = options.method if "method" in given else METHOD_WORDS.get(*[str(values.get("rlhf_type") or SFT)] * 2)
    _check_method(method, file)
    named = values.get("deepspeed")
    preset = preset_of_deepspeed(named, file).preset if named else "ddp"
    numerics = {"load_in_8bit": True} if bits == "8" and "load_in_4bit" not in given else {}
    if "lora_r" in ours and not ours.get("load_in_4bit") and values.get("torch_dtype") == "float32":
        numerics["fp32_base"] = True
    unused = [key for key in values if key not in table and _is_listed(key)]
    sleeps = str(values.get("sleep_level") or 0) != "0"
    named = {"max_prompt_length": values.get("max_length"), "vllm_enable_sleep_mode": sleeps}
    in_trls_words = (SWIFT_GENERATION if METHODS[method].num_generations else {}) | values | named
    processes = {"num_processes": (values["num_processes"],)} if "num_processes" in values else {}
    found = {"program": MS_SWIFT, "preset": (preset,), **processes, **numerics}
    return _Source(None, ours, None, method, found, unused, in_trls_words)


def _method(program: str, values: Mapping[str, Any], file: Path) -> str:
    """The training method of a file. Raises ToolkitError for one that is not planned, or that the file does not say."""
    word = next((str(values[key]) for key in METHOD_KEYS[program] if values.get(key)), None)
    if word == "dpo" and values.get("pref_loss") in ("orpo", "simpo"):
        word = str(values["pref_loss"])
    if word is None and program == "trl":
        schema = program_schema(program)
        commands = ("simpo" if command == "cpo" else command for command in schema.commands_of(values))
        methods = [command for command in commands if command in METHODS]
        if SFT in methods or not methods:
            return SFT
        named = [method for method in methods if method in f"{file.parent.name}/{file.stem}".lower()]
        if len(methods) > 1 and len(named) != 1 and not METHODS[methods[0]].num_generations:
            hint = f"add {' or '.join(f'`--method {method}`' for method in methods)}"
            raise ToolkitError(f"{file} has settings of several of TRL's methods", hint=hint)
        return (named or methods)[0]
    method = METHOD_WORDS.get(word or SFT, word or SFT)
    _check_method(method, file)
    return method


def _check_method(method: str, file: Path) -> None:
    if method not in METHODS:
        hint = f"`--method {SFT}` plans that instead; or {', '.join(name for name in METHODS if name != SFT)}"
        raise ToolkitError(f"{file} trains with {shown(method)}, which is not planned", hint=hint)


def _is_among(key: str, names: Collection[str]) -> bool:
    last = key.partition("[")[0].rpartition(".")[2]
    return any(key.startswith(name[:-1]) if name[-1] == "*" else name in (key, last) for name in names)


def _is_listed(key: str) -> bool:
    return _is_among(key, plan_table()["listed"])


def _option(key: str) -> str | None:
    return next((option for option, names in plan_table()["decides"].items() if _is_among(key, names)), None)


def _checked(file: Path, source: _Source, job: Job, numerics: Collection[str], given: Collection[str]) -> Iterator[str]:
    """Yield what is not used. Raises ToolkitError for a setting that decides the plan, unless its option is given."""
    for key, option, why in (*_not_converted(source, numerics), *_not_planned(source, job)):
        if option == "optim" and job.optim == source.values.get("optimizer"):
            continue
        if option is None or option in given:
            yield key if option is None else f"{key} (--{option.replace('_', '-')} is given)"
        else:
            value = job.lora_r if option == "lora_r" else key.rpartition(" ")[2]
            raise ToolkitError(f"{file}: {key} is not planned: {why}", hint=_instead(option, value))


def _instead(option: str, value: object) -> str:
    """The hint for an option in the place of a setting; its `value` stands for N where it is a number."""
    number = str(value) if str(value).isdigit() else None
    example = EXAMPLES.get(option, " N")
    example = f" {number or 16}" if option == "lora_r" else re.sub(r" N\b", f" {number or 'N'}", example)
    return f"`--{option.replace('_', '-')}{example}` plans that instead"


def _not_converted(source: _Source, numerics: Collection[str]) -> Iterator[tuple[str, str | None, str]]:
    program, values, conversion = source[:3]
    if conversion is None or program is None:
        return
    schema = program_schema(program)
    unknown = schema.unknown(values)
    for key in unknown:
        instead, used = schema.replacement(key), key in conversion.converted
        if not used and (option := _option(instead or key)):
            yield key, option, f"{schema.named} has no such setting" + (f", but {instead}" if instead else "")
    if is_true(values.get("torch_compile") or False):
        yield "torch_compile", None, ""
    planned = {*METHOD_SETTINGS, *numerics, *(["quantization_bit"] if "load_in_8bit" in numerics else [])}
    planned |= set(FP8_SETTINGS) if "fp8" in numerics else set()
    for each in (each for each in conversion.not_converted if each.key not in planned):
        option = _option(each.key) if each.has_effect and each.key not in unknown else None
        on_by_default = each.key in load_dialect(program).on_by_default
        is_off = str(each.value).lower() in ("false", "1", "") and not on_by_default  # or one GPU
        if option == "load_in_4bit" and each.reason.startswith("nothing is quantized"):
            yield f"{each.key} ({each.reason})", None, ""
        elif option == "load_in_4bit" and program == "llama-factory" and not values.get("quantization_bit"):
            yield f"{each.key} (without quantization_bit nothing is quantized)", None, ""  # model_utils/quantization.py
        elif option is not None and not is_off:
            yield f"{each.key} {shown(each.value)}", option, each.reason
        elif each.has_effect and not is_off and _is_listed(each.key) and "CutCross" not in str(each.value):
            effect = plan_table()["effects"].get(each.key.rpartition(".")[2])
            yield each.key + (f" ({effect})" if effect else ""), None, ""


def _refused(source: _Source) -> str:
    """A line about the settings that the program at hand does not have; empty without one."""
    if source.program is None:
        return ""
    schema = program_schema(source.program)
    names = {key: schema.replacement(key) for key in schema.unknown(source.values) if key not in schema.scripts}
    listed = ", ".join(f"{key} (now {name})" if name else key for key, name in names.items())
    return f"\n{schema.named} does not have: {listed}" if listed else ""


def _not_planned(source: _Source, job: Job) -> Iterator[tuple[str, str | None, str]]:
    """Arguments that were converted and that no plan has, and the precision."""
    more = [name for name, value in (job.lora_config or {}).items() if value and name in MORE_THAN_ADAPTERS]
    converted = {} if source.conversion is None else source.conversion.converted
    if more:
        keys = [key for key, argument in converted.items() if argument == "lora_config"] or ["lora_config"]
        yield ", ".join(keys), "lora_r", f"{', '.join(more)}: more is trained or kept than LoRA's adapters"
    for name in ("train_only", "freeze"):
        if job.value(name):
            yield name, "method", "all weights are planned as trained"
    used = ["optim", "padding_free", "per_device_eval_batch_size"]
    used += ["liger_kernel_config"] if PlannedJob.of(job).use_liger_kernel else []
    for name, value in job.given_values.items():
        if value not in (None, False) and name not in used and _is_listed(name):
            keys = [key for key, ours in converted.items() if ours == name] or [name]
            yield from ((key, None, "") for key in keys if "fused_linear" not in key)  # which `_loss` reads
    precision = _precision(source, job)
    if precision is not None:
        yield precision[0], "preset" if precision[2] else None, precision[1]


def _precision(source: _Source, job: Job) -> tuple[str, str, bool] | None:
    """What computes or is held in another precision than a plan's, why, and whether it may change the verdict."""
    program, values, conversion, method = source[:4]
    if conversion is None:
        is_wide = job.given_values.get("bf16") is False and not job.value("fp16")
        return ("bf16 false", "the presets compute in bf16", True) if is_wide else None
    is_on = {key: values.get(key) in ("auto", "full") or is_true(values.get(key) or False) for key in PRECISIONS}
    # LLaMA-Factory computes in the checkpoint's dtype without a setting, but trained weights are raised to fp32.
    raised = program == "llama-factory" and "model" not in values and job.lora_r is None
    is_default = values.get("bf16") is None and not raised
    computes_half = any(is_on.values()) or is_default
    if not computes_half:
        return "bf16 (off)", "the presets compute in bf16, and this in fp32", True
    is_unknown = program == "trl" and PRESET not in conversion.converted.values()
    if job.lora_r is None and method == SFT and is_unknown and _held(source) != "float32":
        return f"dtype {_held(source)} (without fp32 masters under ddp: `--pure-bf16`)", "", False
    return None


def _held(source: _Source) -> str:
    """The dtype in which a program loads the weights."""
    values, in_half = source.values, "bfloat16"
    if source.program == "trl":  # ModelConfig.dtype (trainer/model_config.py)
        return str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if source.program == "llama-factory":  # trained weights are raised to fp32 (model/adapter.py)
        return in_half if is_true(values.get("pure_bf16") or False) else "float32"
    return in_half


def _numerics(source: _Source, job: Job, presets: Collection[str]) -> dict[str, Any]:
    """The numerics of the program that a file decides, as options of `toolkit plan`."""
    found: dict[str, Any] = {}
    values, conversion = source.values, source.conversion
    is_bnb = values.get("quantization_method", "bnb") in ("bnb", "BNB") and str(values.get("quantization_bit")) == "8"
    if (is_bnb or is_true(values.get("load_in_8bit") or False)) and conversion and "lora_r" in conversion.arguments:
        found["load_in_8bit"] = True
    quantized = bool(found) or job.load_in_4bit
    if source.program == "trl" and job.lora_r is not None and not quantized:
        found["fp32_base"] = _held(source) == "float32"
    if is_true(values.get("fp8") or False) and str(values.get("fp8_backend", "auto")) in FP8_BACKENDS:
        found["fp8"] = True
    if job.load_in_4bit and "float" in str(values.get("bnb_4bit_quant_storage")):
        found["sharded_4bit"] = True
    if job.load_in_4bit and source.program == "axolotl":
        found["experts_in_4bit"] = is_true(values.get("quantize_moe_experts") or False)
    # Its defaults (hparams/finetuning_args.py).
    if source.program == "llama-factory" and values.get("finetuning_type") == "oft" and job.lora_r == 1:
        check_type("oft_block_size", block := values.get("oft_block_size") or 32, "int")
        check_range("oft_block_size", found.setdefault("oft_block_size", int(block)), Range(lowest=2))
    if source.program == "llama-factory" and values.keys() & load_dialect(source.program).refused:
        found["freeze_vision_tower"] = is_true(values.get("freeze_vision_tower", True))
    is_known = conversion is not None and (source.program != "trl" or PRESET in conversion.converted.values())
    # DeepSpeed keeps fp32 masters, and FSDP2 raises what it shards to fp32 (accelerate, `fsdp2_prepare_model`).
    without_masters = is_known and source.method == SFT and {"ddp", "single"} & set(presets)
    if job.lora_r is None and without_masters and _held(source) != "float32":
        found["pure_bf16"] = True
    return found


FP8_BACKENDS = ("auto", "torchao", "ao")  # Transformer Engine's and MS-AMP's are not planned
FP8_SETTINGS = ("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")
PRECISIONS = ("bf16", "fp16", "bfloat16", "float16", "pure_bf16", "fp8")


def _loss(source: _Source, job: Job, planned: PlannedJob) -> tuple[str | None, str]:
    """The loss function, and words about it; None: the program's own."""
    program, values, conversion = source[:3]
    own = None if planned.loss == "chunked" and job.loss == "auto" else planned.loss
    if conversion is None:
        return own, ""
    plugins = values.get("plugins") or []
    if CUT_CROSS_ENTROPY in plugins and is_true(values.get("cut_cross_entropy", True)):
        return "fused", " (cut cross entropy, planned as Liger's)"
    config = job.liger_kernel_config
    if planned.loss == "fused" and config and not config.get("fused_linear_cross_entropy"):
        return "full", ""
    if (
        program == "trl"
        and source.method == SFT
        and (values.get("pinned_trl") or set(values) & set(program_schema(program).former))
    ):
        old = ("full", " (the default of TRL below 1.7, which the file is for)")
        return ("fused", "") if planned.loss == "fused" else old
    if program == "axolotl" and is_true(values.get("chunked_cross_entropy") or False):
        return "chunked", ""
    return own, ""


def _method_options(source: _Source, options: PlanOptions, given: Collection[str], *, lora: bool) -> dict[str, Any]:
    """The settings of a method that decide memory, as TRL's DPOConfig, GRPOConfig and others have them."""
    program, method, values = source.program, source.method, source.method_values or source.values
    if program == "axolotl":
        trl, vllm = (block_of(values, name, "the file") for name in ("trl", "vllm"))
        served = {
            "vllm_server_host": vllm.get("host"),
            "vllm_gpu_memory_utilization": vllm.get("gpu_memory_utilization"),
        }
        values = {**values, **served, **trl}
    beta = values.get("rl_beta") if program == "axolotl" else values.get("pref_beta")
    values = {**values, "beta": beta} if beta is not None else values
    values = {**values, **{name: getattr(options, name) for name in METHOD_SETTINGS if name in given}}
    former = program_schema("trl").former.items() if program == "trl" else ()
    of_before = [name for name, version in former if version_numbers(version)[:2] <= COLOCATES_SINCE and name in values]
    mode = "server" if of_before or any(values.get(name) for name in VLLM_ELSEWHERE) else "colocate"
    mode = str(values.get("vllm_mode") or mode) if is_true(values.get("use_vllm") or False) else "none"
    mode = str(options.vllm) if "vllm" in given else mode
    found: dict[str, Any] = {} if mode == "none" else {"vllm": mode}
    for name, (annotation, read) in METHOD_SETTINGS.items():
        if values.get(name) is not None and (mode == "colocate" or not name.startswith("vllm")):
            check_type(name, values[name], annotation)
            found[name] = read(values[name])
    if METHODS[method].num_generations:
        found.setdefault("max_completion_length", COMPLETION_TOKENS)
    # The reference has the dtype of the policy's weights, which two of the programs load in bf16.
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32") if program == "trl" else "bfloat16"
    found = {name: value for name, value in found.items() if name in METHODS[method].options}
    has_reference = "ref_dtype" in METHODS[method].options and Method(method=method, **found).has_reference(lora=lora)
    if dtype in ("bfloat16", "auto") and (program or source.method_values) and has_reference:
        found["ref_dtype"] = "bfloat16"
    return found

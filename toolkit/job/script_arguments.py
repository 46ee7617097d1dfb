"""The arguments of the training script, read and checked without torch.

>>> read_arguments(["--max_steps", "8"])["max_steps"]
'8'

`ModelArguments` and `DataArguments` are what the script takes beside transformers' own `TrainingArguments`. The
launcher reads them here, before any rank starts; the script parses the same words again with transformers' parser.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, nearest
from toolkit.files.reading import expand_home, user_path
from toolkit.files.secrets import hide_words, remember_secrets
from toolkit.files.value_limits import shown, unexpected
from toolkit.files.yaml_files import read_configuration
from toolkit.job.argument_aliases import ALIASES, HINTS, canonical_flags, canonical_values
from toolkit.job.argument_values import TRUE_WORDS, as_list, check_type
from toolkit.job.defaults import (
    GRADIENT_ACCUMULATION_STEPS,
    LOSS_CHUNK_TOKENS,
    MAX_SEQ_LENGTH,
    PER_DEVICE_TRAIN_BATCH_SIZE,
)
from toolkit.job.trainer_arguments import json_object
from toolkit.models.lora import ALL_LINEAR
from toolkit.parallel.layout import DEGREES
from toolkit.parallel.pipeline_schedule import SCHEDULES
from toolkit.presets.accumulation import ACCUMULATE, chosen_accumulate
from toolkit.presets.compatibility import Method
from toolkit.presets.optimizers import MUON
from toolkit.versions import training_argument_types, training_argument_words

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
# Lists that a YAML file may also give as one value.
DATASET_LISTS = ("dataset", "dataset_weights", "freeze", "train_only")
# Words on the command line, keys and values in a file.
KEYS_AND_VALUES = ("lora_config",)
# Arguments whose value is a path, or may be one.
PATHS = (
    "model_name_or_path",
    "dataset",
    "eval_dataset",
    "chat_template",
    "output_dir",
    "resume_from_checkpoint",
    "deepspeed",
    "fsdp_config",
    "accelerator_config",
)


@dataclass(kw_only=True)
class ModelArguments:
    """The model, the training method and what is measured."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "a local folder, or a hub id"})
    revision: str = field(default="main", metadata={"help": "branch, tag or commit of a hub id"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code that the model's repository ships"})
    trust_pickle: bool = field(
        default=False, metadata={"help": "resume from a checkpoint whose pickles run code; only if you wrote it"}
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "auto, sdpa_varlen (for packed rows, without a mask), sdpa, eager, flash_attention_2, ...; default:"
            " auto with --packing, otherwise the model's"
        },
    )
    lora_r: int | None = field(default=None, metadata={"help": "train LoRA adapters of this rank; default: full"})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA scale; default: twice the rank"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout before the adapters"})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "names of the modules that get an adapter"}
    )
    lora_config: list[str] | None = field(
        default=None,
        metadata={"help": "any other `LoraConfig` field as key=value: use_dora=true, ..."},
    )
    loss: str = field(
        default="auto",
        metadata={
            "help": "`chunked`: without the full logits, --loss_chunk_tokens at a time; `full`: transformers' own;"
            " default: chunked where the model allows it, or Liger's with --use_liger_kernel",
            "choices": ["auto", "chunked", "full"],
        },
    )
    loss_chunk_tokens: int = field(
        default=LOSS_CHUNK_TOKENS, metadata={"help": "tokens whose logits exist at a time with the chunked loss"}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "QLoRA: the frozen base model in 4-bit NF4 (bitsandbytes); needs --lora_r"}
    )
    freeze: list[str] | None = field(
        default=None, metadata={"help": "name patterns of parameters that are not trained: `model.embed_tokens.*`"}
    )
    train_only: list[str] | None = field(
        default=None, metadata={"help": "name patterns of the only parameters that are trained"}
    )
    lr_scaling: str | None = field(
        default=None,
        metadata={
            "help": "scale the learning rate with the global batch size: `linear` or `sqrt`; default: off",
            "choices": ["linear", "sqrt"],
        },
    )
    lr_reference_batch_size: int | None = field(
        default=None, metadata={"help": "the global batch size (sequences) for which --learning_rate was tuned"}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "sequences of every optimizer step over all GPUs: the accumulation steps follow from it, so the"
            " batch stays when the number of GPUs changes"
        },
    )
    activation_checkpointing_offload: bool = field(
        default=False, metadata={"help": "keep the checkpointed activations in host memory"}
    )
    ddp_comm_hook: str | None = field(
        default=None,
        metadata={
            "help": "compress gradients between ranks (DDP): `bf16`, `fp16`, `power_sgd`, `int8`, `top_k`; `allreduce`"
            " compresses nothing",
            "choices": ["allreduce", "bf16", "fp16", "power_sgd", "int8", "top_k"],
        },
    )
    ddp_comm_hook_top_k_fraction: float = field(
        default=0.01, metadata={"help": "fraction of the gradient's elements that `top_k` sends each step"}
    )
    ddp_comm_hook_power_sgd_rank: int = field(default=1, metadata={"help": "rank of the factors of `power_sgd`"})
    ddp_comm_hook_power_sgd_start: int = field(
        default=10, metadata={"help": "first steps that `power_sgd` does not compress; at least 2"}
    )
    pp: int | None = field(default=None, metadata={"help": "pipeline parallelism: GPUs that hold different layers"})
    pipeline_schedule: str | None = field(
        default=None,
        metadata={
            "help": "order in which the stages compute their micro-batches (--gradient_accumulation_steps of them);"
            " default: 1f1b",
            "choices": list(SCHEDULES),
        },
    )
    pipeline_chunks: int | None = field(
        default=None, metadata={"help": "stages per GPU of `interleaved_1f1b`; default: 2 there, otherwise 1"}
    )
    tp: int | None = field(default=None, metadata={"help": "tensor parallelism: GPUs that split each layer"})
    cp: int | None = field(
        default=None, metadata={"help": "context parallelism: GPUs that split each sequence (ring attention)"}
    )
    sp: int | None = field(
        default=None, metadata={"help": "sequence parallelism: GPUs that split each sequence (Ulysses)"}
    )
    ep: int | None = field(default=None, metadata={"help": "expert parallelism: GPUs that hold different experts"})
    dp_replicate: int | None = field(
        default=None, metadata={"help": "replicas of the sharded model, under `hsdp_tp`; default: 2"}
    )
    accumulate: str | None = field(
        default=None,
        metadata={
            "help": "gradients between accumulation steps: `sharded` (reduced in each of them) or `whole` (on every GPU"
            " until the last one, which sends less); default: as the preset shards them, so `sharded` under FSDP2",
            "choices": list(ACCUMULATE),
        },
    )
    profile_steps: str | None = field(
        default=None, metadata={"help": "profile optimizer steps A to B (`3:5`, inclusive); they are not timed"}
    )
    memory_snapshot: bool = field(
        default=False, metadata={"help": "record CUDA's allocations, one file per rank for pytorch.org/memory_viz"}
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "write checkpoints in the background while training continues (FSDP2, tensor and expert"
            " parallelism); takes host memory for one copy of what is saved"
        },
    )
    save_model: bool = field(default=True, metadata={"help": "save the trained model in the output folder at the end"})
    untimed_steps: int = field(
        default=2, metadata={"help": "first optimizer steps that no speed counts (compilation, allocator growth)"}
    )
    stop_when_steps_within: float | None = field(
        default=None,
        metadata={  # argparse formats help texts: a literal percent sign is written twice
            "help": "stop once the 95 %% CI of the median step time is within this fraction of it, for example 0.03"
        },
    )
    stop_after_minutes: float | None = field(
        default=None, metadata={"help": "stop early, as completed, when the steps have taken this long"}
    )


@dataclass(kw_only=True)
class DataArguments:
    """The data and its tokenization."""

    dataset: list[str] | None = field(
        default=None,
        metadata={"help": "one or more of: a JSON, JSONL, CSV or Parquet file, or a hub id (owner/name)"},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "the configuration of a hub id"})
    dataset_split: str = field(default="train", metadata={"help": "the split of a hub id"})
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "each data set's share of the rows of an epoch: `0.7 0.3`; default: every row once"},
    )
    max_seq_length: int = field(
        default=MAX_SEQ_LENGTH, metadata={"help": "longer rows are truncated to this many tokens"}
    )
    loss_on: str | None = field(
        default=None,
        metadata={
            "help": "`assistant` (or completion) tokens only, or `all`; default: assistant for chat and"
            " prompt/completion data, all for plain text",
            "choices": ["assistant", "all"],
        },
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "a Jinja file to use instead of the tokenizer's chat template"}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "system message for conversations that have none"}
    )
    packing: bool = field(
        default=False,
        metadata={"help": "pack rows into sequences of up to `max_seq_length`, without attention between rows"},
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "data for the evaluation loss: a file or a hub id, like `dataset`"}
    )
    eval_dataset_config: str | None = field(
        default=None, metadata={"help": "the configuration of `eval_dataset`, if that is a hub id"}
    )
    eval_dataset_split: str = field(
        default="validation", metadata={"help": "the split of `eval_dataset`, if that is a hub id"}
    )
    val_size: float | None = field(
        default=None,
        metadata={"help": "hold out rows for evaluation, chosen by the seed: a fraction below 1, or a number of rows"},
    )
    streaming: bool = field(
        default=False, metadata={"help": "read and tokenize the rows during training; needs --max_steps"}
    )
    streaming_buffer_size: int = field(
        default=1000, metadata={"help": "rows in the shuffle buffer of a stream; 1 keeps the file's order"}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "processes for tokenization; default: one"}
    )


@functools.cache
def argument_types() -> dict[str, str]:
    """Return the name and annotation of every argument of the training script: ours, then `TrainingArguments`'."""
    ours = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]
    if not training_argument_types():
        raise ToolkitError("transformers is not installed", hint="`make setup` in the clone installs it")
    return {field.name: str(field.type) for field in ours} | training_argument_types()


@functools.cache
def argument_words() -> dict[str, Sequence[str]]:
    """Return the words of every argument that takes one of a list: ours, then `TrainingArguments`'."""
    ours = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]
    words = {field.name: field.metadata["choices"] for field in ours if "choices" in field.metadata}
    theirs = training_argument_words()
    return words | theirs | {"optim": (*theirs.get("optim", ()), MUON)}


def read_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """Read names and values from an optional leading YAML or JSON file and from flags; flags win.

    Raises ToolkitError for an unknown name (with the nearest one), a word that belongs to no flag, a value of the
    wrong type, or a file that cannot be read.
    """
    hide_words(argv)  # remembers its secrets: an error may quote a word
    rest = list(argv)
    values = read_config_file(Path(rest.pop(0))) if has_config_file(rest) else {}
    values |= _read_flags(canonical_flags(rest))
    for name, value in values.items():
        check_type(f"--{name}", value, argument_types()[name])
    return expand_paths(values)


def expand_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with `~` expanded in every path: quoted, or in a YAML file, no shell does it.

    >>> expand_paths({"dataset": ["owner/name"], "system_prompt": "~"})
    {'dataset': ['owner/name'], 'system_prompt': '~'}
    """
    return values | {name: _expanded(values[name]) for name in PATHS if name in values}


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    return expand_home(value) if isinstance(value, str) else value


def has_config_file(argv: Sequence[str]) -> bool:
    """Return True if a configuration file stands before the flags."""
    return bool(argv) and argv[0].endswith(CONFIG_SUFFIXES) and not argv[0].startswith("--")


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a training configuration file, in which each key must be a known argument.

    Raises ToolkitError, with the file and the key, for what cannot be read, an unknown key, and a value of another
    type than the argument has.
    """
    path = user_path(path)
    given = read_configuration(path)
    remember_secrets(given)
    content = canonical_values(given, where=f"{path}: ")
    for name, value in content.items():
        _check_name(name, where=f"{path}: unknown key {shown(name)}", prefix="")
        annotation = argument_types()[name]
        if isinstance(value, dict) and "dict" not in annotation and name not in KEYS_AND_VALUES:
            raise unexpected(path, name, value, "a value without keys")
        if value is not None:
            check_type(f"{path}: {name}", value, annotation)
    return content | {name: as_list(content[name]) for name in DATASET_LISTS if content.get(name) is not None}


def dataset_names(values: dict[str, Any]) -> list[str]:
    """Return the files and hub ids of `--dataset`."""
    return [str(name) for name in as_list(values.get("dataset"))]


def dataset_weights(values: dict[str, Any]) -> list[float]:
    """Return the numbers of `--dataset_weights`; empty without it."""
    return [float(weight) for weight in as_list(values.get("dataset_weights"))]


def resumes(values: dict[str, Any]) -> bool:
    """Return True if the run resumes from a checkpoint."""
    return str(values.get("resume_from_checkpoint") or "false").lower() not in ("false", "none")


def flag(value: Any) -> bool:
    """Return a boolean given on the command line or in a YAML file; a flag without a value is true."""
    return value is True or str(value).lower() in TRUE_WORDS


def read_method(arguments: dict[str, Any]) -> Method:
    """Return the part of the training arguments that decides which presets support them."""

    def is_on(name: str) -> bool:
        return flag(arguments.get(name, False))

    return Method(
        lora=arguments.get("lora_r") is not None,
        lora_targets=tuple(map(str, as_list(arguments.get("lora_target_modules")))) or ALL_LINEAR,
        lora_config=is_given(arguments, "lora_config"),
        load_in_4bit=is_on("load_in_4bit"),
        optim=str(arguments.get("optim") or Method().optim),
        freeze=is_given(arguments, "freeze"),
        train_only=is_given(arguments, "train_only"),
        packing=is_on("packing"),
        attn_implementation=_text(arguments.get("attn_implementation")),
        activation_checkpointing=uses_activation_checkpointing(arguments),
        activation_checkpointing_offload=is_on("activation_checkpointing_offload"),
        loss=str(arguments.get("loss") or Method().loss),
        use_liger_kernel=is_on("use_liger_kernel"),
        torch_compile=compiles(arguments),
        ddp_comm_hook=_text(arguments.get("ddp_comm_hook")),
        accumulate=accumulate_argument(arguments),
        memory_snapshot=is_on("memory_snapshot"),
        auto_find_batch_size=is_on("auto_find_batch_size"),
        save_only_model=is_on("save_only_model"),
        async_save=is_on("async_save"),
        streaming=is_on("streaming"),
        fp16=is_on("fp16"),
        neftune=is_given(arguments, "neftune_noise_alpha"),
        label_smoothing=float(arguments.get("label_smoothing_factor") or 0) > 0,
        pipeline_schedule=_text(arguments.get("pipeline_schedule")),
        pipeline_chunks=None if arguments.get("pipeline_chunks") is None else int(arguments["pipeline_chunks"]),
        micro_batches=accumulation_steps(arguments),
        **{name: degrees_given(arguments).get(name) for name in DEGREES},  # type: ignore[arg-type]
    )


def degrees_given(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the degrees of parallelism that the arguments name."""
    return {name: int(arguments[name]) for name in DEGREES if arguments.get(name) is not None}


def without_degrees(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return training arguments without some degrees of parallelism; one in a YAML file is overridden by 1.

    >>> without_degrees(["--tp", "2", "--cp=2", "--max_steps", "8"], ["tp", "cp"])
    ['--max_steps', '8']
    """
    left = without_flags(words, names)
    in_file = [name for name in DEGREES if name in names and name in degrees_given(read_arguments(left))]
    return [*left, *(word for name in in_file for word in (f"--{name}", "1"))]


def without_flags(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return training arguments without some flags and the one value of each.

    >>> without_flags(["--max_steps", "8", "--seed=1"], ["max_steps"])
    ['--seed=1']
    """
    flags = {f"--{name}" for name in names}
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if before not in flags and word.partition("=")[0] not in flags]


def accumulate_argument(arguments: dict[str, Any]) -> str | None:
    """Return `--accumulate`, or the same choice made in `--accelerator_config`; None without one.

    Raises ToolkitError where the two contradict each other.
    """
    given = arguments.get("accumulate")
    return chosen_accumulate(None if given is None else str(given), json_object(arguments, "accelerator_config"))


def compiles(arguments: Mapping[str, Any]) -> bool:
    """Return True if the model is compiled: a backend or a mode alone switches it on, as in transformers."""
    named = any(arguments.get(f"torch_compile_{name}") is not None for name in ("backend", "mode"))
    return named or flag(arguments.get("torch_compile", False))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def is_given(arguments: dict[str, Any], name: str) -> bool:
    """Return True if an argument has a value other than none, false and empty."""
    return str(arguments.get(name)).lower() not in ("none", "false", "", "[]", "{}")


def uses_activation_checkpointing(arguments: dict[str, Any]) -> bool:
    """Return True if activation checkpointing is on, by its present name or its old one."""
    return any(flag(arguments.get(f"{name}_checkpointing", False)) for name in ("activation", "gradient"))


def integer(values: dict[str, Any], name: str, default: int) -> int:
    """Return an integer argument, or its default where it is absent or null."""
    return default if values.get(name) is None else int(values[name])


def micro_batch_size(values: dict[str, Any]) -> int:
    """Return `--per_device_train_batch_size`: sequences of one accumulation step on one rank."""
    return integer(values, "per_device_train_batch_size", PER_DEVICE_TRAIN_BATCH_SIZE)


def accumulation_steps(values: dict[str, Any]) -> int:
    """Return `--gradient_accumulation_steps`: accumulation steps per optimizer step."""
    return integer(values, "gradient_accumulation_steps", GRADIENT_ACCUMULATION_STEPS)


def _read_flags(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ToolkitError(
                f"unexpected word {shown(word)}; a flag starts with `--`", hint=f"did you mean `--{word[:80]}`?"
            )
        name, equals, given = word[2:].partition("=")
        name = name.replace("-", "_")
        following = [given] if equals else _take_values(words)
        if name not in argument_types() and name.startswith("no_") and _is_boolean(name[3:]):
            name, following = name[3:], ["false"]
        _check_name(name, where=f"unknown argument --{name[:80]}", prefix="--")
        values[name] = _one_value(name, following)
    return values


def _one_value(name: str, following: list[str]) -> Any:
    if len(following) == 1:
        return following[0]
    if following and "list" not in argument_types()[name]:
        raise ToolkitError(f"unexpected word {shown(following[1])} after --{name} {following[0][:80]}")
    if not following and not _is_boolean(name):
        raise ToolkitError(f"--{name} has no value", hint=f"`--{name} VALUE`")
    return following or True


def _take_values(words: list[str]) -> list[str]:
    taken: list[str] = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _is_boolean(name: str) -> bool:
    return "bool" in argument_types().get(name, "")


def _check_name(name: str, *, where: str, prefix: str) -> None:
    types = argument_types()
    if name not in types:
        close = nearest(name[:200], [*types, *ALIASES])
        ours = ALIASES[close].name if close in ALIASES else close
        guess = f"did you mean `{prefix}{ours}`?" if ours else "see `python -m toolkit.train --help`"
        raise ToolkitError(where, hint=HINTS.get(name, guess))

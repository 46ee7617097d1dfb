"""Arguments of TRL, axolotl and LLaMA-Factory, in our words.

    >>> canonical_values({"base_model": "Qwen/Qwen3-8B", "train_on_inputs": "false"})
    {'model_name_or_path': 'Qwen/Qwen3-8B', 'loss_on': 'assistant'}

An argument is renamed only if it means exactly the same; for the others, `HINTS` says what to type instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ToolkitError, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Our name for an argument of another tool."""

    name: str
    values: Mapping[str, str] | None = None
    """Value of theirs, in lower case, to ours, where the argument takes only these; None: the value is the same."""
    is_list: bool = False
    """True if the value may be several names with commas between them, which are words of their own here."""


# TRL: SFTConfig, ScriptArguments, ModelConfig (1.16). axolotl: its YAML (0.19). LLaMA-Factory: its arguments (0.9.5).
ALIASES = {
    "assistant_only_loss": Alias(name="loss_on", values={"true": "assistant"}),
    "base_model": Alias(name="model_name_or_path"),
    "dataset_name": Alias(name="dataset"),
    "dataset_num_proc": Alias(name="preprocessing_num_workers"),
    "dataset_train_split": Alias(name="dataset_split"),
    "evaluation_strategy": Alias(name="eval_strategy"),
    "flash_attention": Alias(name="attn_implementation", values={"true": "flash_attention_2"}),
    "lora_rank": Alias(name="lora_r"),
    "lora_target": Alias(name="lora_target_modules", values=None, is_list=True),
    "lr_scheduler": Alias(name="lr_scheduler_type"),
    "max_length": Alias(name="max_seq_length"),
    "micro_batch_size": Alias(name="per_device_train_batch_size"),
    "model_revision": Alias(name="revision"),
    "num_epochs": Alias(name="num_train_epochs"),
    "optimizer": Alias(name="optim"),
    "quantization_bit": Alias(name="load_in_4bit", values={"4": "true"}),
    "sample_packing": Alias(name="packing"),
    "train_on_inputs": Alias(name="loss_on", values={"true": "all", "false": "assistant"}),
    "val_set_size": Alias(name="val_size"),
    "warmup_ratio": Alias(name="warmup_steps"),  # transformers 5 reads a number below 1 as a fraction of all steps
}

# What to type for an argument that means something else here, or nothing.
HINTS = {
    "adapter": "`--lora_r 16` trains LoRA adapters; `--load_in_4bit true` with it is QLoRA",
    "completion_only_loss": "the default for prompt/completion data; `--loss_on all` computes the loss on every token",
    "config": "a YAML file of arguments goes first, without a flag: `-- config.yaml --max_steps 8`",
    "cutoff_len": "`--max_seq_length`, which cuts the end of a row; cutoff_len shortens both prompt and answer",
    "dataset_test_split": "`--eval_dataset NAME --eval_dataset_split SPLIT`",
    "dtype": "compute is bf16 with fp32 master weights under every preset; `--bf16 false` computes in fp32",
    **dict.fromkeys(("dry_run", "num_processes", "preset"), "an option of the toolkit goes before `--`"),
    "finetuning_type": "`--lora_r 16` trains LoRA adapters; without it, all weights are trained",
    "flash_attn": "`--attn_implementation flash_attention_2`, or sdpa",
    "interleave_probs": "`--dataset_weights 0.7 0.3`, one number for each data set of `--dataset`",
    "load_in_8bit": "`--load_in_4bit true` is the quantization that is supported, with `--lora_r`",
    "max_samples": "cut the data file, or name a part of a hub data set: `--dataset_split 'train[:1000]'`",
    "model": "the base model is `--model_name_or_path`",
    "num_processes": "an option of the toolkit goes before `--`: `toolkit train --num-processes 2 -- ...`",
    "output": "the run folder is `--output_dir`",
    "preset": "an option of the toolkit goes before `--`: `toolkit train --preset zero2 -- ...`",
    "sequence_len": "`--max_seq_length`, which truncates longer rows; axolotl drops them",
    "stage": "this script does supervised fine-tuning; for preference training, use a preset with TRL",
    "template": "the model's own chat template is used; `--chat_template FILE` replaces it",
    "torch_dtype": "compute is bf16 with fp32 master weights under every preset; `--bf16 false` computes in fp32",
    "use_peft": "leave it out: `--lora_r 16` alone trains LoRA adapters (TRL's default rank is 16)",
}


def canonical_values(values: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Return the keys and values of a configuration file in our words.

    Raises ToolkitError for a value without a counterpart, and for an argument given under both names.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        alias = ALIASES.get(name)
        ours = name if alias is None else alias.name
        if ours in found or (alias is not None and ours in values):
            raise ToolkitError(f"{where}{name} and {ours} are the same argument", hint=f"keep `{ours}`")
        found[ours] = value if alias is None or value is None else alias_value(name, alias, value)
    return found


def alias_value(name: str, alias: Alias, value: Any) -> Any:
    """Return the value of another tool's argument in our words. Raises ToolkitError for one without a counterpart."""
    if alias.is_list:
        names = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
        return ["all-linear" if part == "all" else part for part in names]
    ours = value if alias.values is None else alias.values.get(str(value).lower())
    if ours is None:
        raise ToolkitError(
            f"{name} {shown(value)} has no counterpart",
            hint=f"leave it out, or see `--{alias.name}` in `toolkit train -- --help`",
        )
    return ours

"""What the training script takes beside transformers' own `TrainingArguments`.

    toolkit train --preset zero2 --num-processes 2 -- --model_name_or_path M --dataset D --output_dir O

Plain dataclasses without torch, so that a light command can check names and values before any rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ModelArguments:
    """The model and what of it is trained."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "a local folder, or a hub id"})
    revision: str = field(default="main", metadata={"help": "branch, tag or commit of a hub id"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code that the model's repository ships"})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "sdpa, eager, flash_attention_2, ...; the model's default if not given"}
    )
    lora_r: int | None = field(default=None, metadata={"help": "train LoRA adapters of this rank; full if not given"})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA scale; twice the rank if not given"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout in front of the adapters"})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "module names that get an adapter"}
    )
    lora_config: list[str] | None = field(
        default=None,
        metadata={"help": "any other `LoraConfig` field as key=value: use_dora=true, ..."},
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
            "help": "scale the learning rate with the global batch: `linear` or `sqrt`; off if not given",
            "choices": ["linear", "sqrt"],
        },
    )
    lr_reference_batch_size: int | None = field(
        default=None, metadata={"help": "the global batch (sequences) that --learning_rate was found for"}
    )
    activation_checkpointing_offload: bool = field(
        default=False, metadata={"help": "keep what activation checkpointing saves in host memory"}
    )
    ddp_comm_hook: str | None = field(
        default=None,
        metadata={
            "help": "compress gradients between ranks (DDP): `bf16`, `fp16`, `power_sgd`, `int8`, `top_k`; `allreduce`"
            " only counts",
            "choices": ["allreduce", "bf16", "fp16", "power_sgd", "int8", "top_k"],
        },
    )
    ddp_comm_hook_top_k_fraction: float = field(
        default=0.01, metadata={"help": "share of the gradient's elements that `top_k` sends each step"}
    )
    ddp_comm_hook_power_sgd_rank: int = field(default=1, metadata={"help": "rank of `power_sgd`'s factors"})
    ddp_comm_hook_power_sgd_start: int = field(
        default=10, metadata={"help": "steps that `power_sgd` leaves uncompressed first; at least 2"}
    )
    profile_steps: str | None = field(
        default=None, metadata={"help": "profile optimizer steps A to B (`3:5`, both included); they are not timed"}
    )
    memory_snapshot: bool = field(
        default=False, metadata={"help": "record CUDA's allocations, one file a rank for pytorch.org/memory_viz"}
    )
    save_model: bool = field(default=True, metadata={"help": "save the trained model in the output folder at the end"})
    untimed_steps: int = field(
        default=2, metadata={"help": "first optimizer steps left out of speed (compilation, allocator growth)"}
    )
    stop_when_steps_within: float | None = field(
        default=None,
        metadata={"help": "end early when the 95 % interval of the median timed step is within this share of it: 0.03"},
    )
    stop_after_minutes: float | None = field(
        default=None, metadata={"help": "end early, as completed, when the steps have taken this long"}
    )


@dataclass(kw_only=True)
class DataArguments:
    """The rows and how they become tokens."""

    dataset: str | None = field(
        default=None, metadata={"help": "a JSON, JSONL, CSV or Parquet file, or a hub id (owner/name)"}
    )
    dataset_split: str = field(default="train", metadata={"help": "the split of a hub id"})
    max_seq_length: int = field(default=1024, metadata={"help": "longer rows are cut to this many tokens"})
    loss_on: str | None = field(
        default=None,
        metadata={
            "help": "`assistant` (or completion) tokens only, or `all`; if not given: assistant for chat and"
            " prompt/completion data, all for plain text",
            "choices": ["assistant", "all"],
        },
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "a Jinja file to use instead of the tokenizer's chat template"}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "text that opens each conversation that has no system message"}
    )
    packing: bool = field(
        default=False,
        metadata={"help": "join rows into sequences of up to `max_seq_length`, without attention between rows"},
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "rows for the evaluation loss: a file or a hub id, as `dataset`"}
    )
    eval_dataset_split: str = field(default="validation", metadata={"help": "the split of that hub id"})
    val_size: float | None = field(
        default=None,
        metadata={"help": "hold rows out for evaluation, by seed: a fraction below 1, or a number of rows"},
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "processes that tokenise; one if not given"}
    )

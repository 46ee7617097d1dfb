"""The arguments of a training job: their names, types, defaults, limits, words and help texts, each declared once.

>>> ARGUMENTS["max_seq_length"].metadata["limits"].highest
134217728

Ours come first, then those of transformers' `TrainingArguments` that the toolkit reads. `Job` (toolkit/job/job.py) has
them as fields; the command line, the checks, the planner's options and the documentation read them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.job.accumulation import ACCUMULATE
from toolkit.job.argument_values import (
    GRADIENT_ACCUMULATION_STEPS,
    LOSS_CHUNK_TOKENS,
    MAX_SEQ_LENGTH,
    PER_DEVICE_TRAIN_BATCH_SIZE,
    YEAR_MINUTES,
    Range,
)
from toolkit.models.lora import ALL_LINEAR
from toolkit.models.optimizers import DEFAULT_OPTIMIZER
from toolkit.parallel.pipeline_schedule import SCHEDULES

COMM_HOOKS = ("bf16", "fp16", "power_sgd")  # gradient compression hooks of torch (`toolkit/train/engine/comm_hooks.py`)
WORKERS_PER_RANK = 1024  # no node has as many cores for each rank

_COUNT = Range(lowest=1)
_SIZE = Range(lowest=1, highest=2**20)  # larger ones are typing errors, as in `toolkit plan`
_NOT_NEGATIVE = Range(lowest=0)
_FRACTION = Range(lowest=0, below=1)


def _argument(
    default: Any, help: str = "", *, limits: Range | None = None, choices: Sequence[str] | None = None
) -> Any:
    metadata = {"help": help, "limits": limits, "choices": choices}
    return field(default=default, metadata={key: value for key, value in metadata.items() if value})


def _mapping(help: str = "") -> Any:
    return field(default=None, hash=False, metadata={"help": help} if help else {})


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The model, the training method, the degrees of parallelism, and what is measured."""

    model_name_or_path: str | None = _argument(None, "a local folder, a hub id, or `demo`, a small model")
    revision: str = _argument("main", "branch, tag or commit of a hub id")
    trust_remote_code: bool = _argument(False, "run code that the model's repository ships")
    trust_pickle: bool = _argument(False, "resume from a checkpoint whose pickles run code; only if you wrote it")
    attn_implementation: str | None = _argument(
        None,
        "auto, sdpa_varlen (packed rows, no mask), sdpa, eager, flash_attention_2, ...; default: auto with --packing,"
        " otherwise the model's",
    )
    lora_r: int | None = _argument(
        None, "train LoRA adapters of this rank; default: full", limits=Range(lowest=1, highest=2**16)
    )
    lora_alpha: int | None = _argument(None, "LoRA scale; default: twice the rank", limits=_COUNT)
    lora_dropout: float = _argument(0.0, "dropout before the adapters", limits=_FRACTION)
    lora_target_modules: tuple[str, ...] = _argument(ALL_LINEAR, "names of the modules that get an adapter")
    lora_config: Mapping[str, Any] | None = _mapping("any other `LoraConfig` field as key=value: use_dora=true, ...")
    loss: str = _argument(
        "auto",
        "`chunked`: --loss_chunk_tokens at a time; `full`: transformers' own; default: chunked where the model allows"
        " it, or Liger's with --use_liger_kernel",
        choices=("auto", "chunked", "full"),
    )
    loss_chunk_tokens: int = _argument(
        LOSS_CHUNK_TOKENS, "tokens whose logits exist at a time", limits=Range(lowest=1, highest=2**27)
    )
    load_in_4bit: bool = _argument(False, "QLoRA: the frozen base model in 4-bit NF4 (bitsandbytes); needs --lora_r")
    freeze: tuple[str, ...] = _argument((), "name patterns of parameters that are not trained: `model.embed_tokens.*`")
    train_only: tuple[str, ...] = _argument((), "name patterns of the only parameters that are trained")
    lr_scaling: str | None = _argument(
        None,
        "scale the learning rate with the global batch size: `linear` or `sqrt`; default: off",
        choices=("linear", "sqrt"),
    )
    lr_reference_batch_size: int | None = _argument(
        None, "the global batch size (sequences) for which --learning_rate was tuned", limits=_COUNT
    )
    global_batch_size: int | None = _argument(
        None,
        "sequences per optimizer step over all GPUs: accumulation steps follow from it",
        limits=Range(lowest=1, highest=2**40),
    )
    activation_checkpointing_offload: bool = _argument(False, "keep the checkpointed activations in host memory")
    activation_checkpointing_selective: bool = _argument(False, "keep attention's outputs, and recompute only the rest")
    ddp_comm_hook: str | None = _argument(
        None, "compress gradients between ranks (DDP): bf16, fp16, power_sgd", choices=COMM_HOOKS
    )
    ddp_comm_hook_power_sgd_rank: int = _argument(1, "rank of the factors of `power_sgd`")
    ddp_comm_hook_power_sgd_start: int = _argument(10, "first steps that `power_sgd` does not compress; at least 2")
    pp: int | None = _argument(None, "pipeline parallelism: GPUs that hold different layers")
    pipeline_schedule: str | None = _argument(
        None,
        "order of the stages' micro-batches (--gradient_accumulation_steps of them); default: 1f1b",
        choices=tuple(SCHEDULES),
    )
    pipeline_chunks: int | None = _argument(None, "stages per GPU of `interleaved_1f1b`; default: 2 there, otherwise 1")
    tp: int | None = _argument(None, "tensor parallelism: GPUs that split each layer")
    cp: int | None = _argument(None, "context parallelism: GPUs that split each sequence (ring attention)")
    sp: int | None = _argument(None, "sequence parallelism: GPUs that split each sequence (Ulysses)")
    ep: int | None = _argument(None, "expert parallelism: GPUs that hold different experts")
    dp_replicate: int | None = _argument(None, "replicas of the sharded model, under `hsdp_tp`; default: 2")
    accumulate: str | None = _argument(
        None,
        "gradients between accumulation steps: `sharded`, or `whole` (sends less, takes more memory); default: the"
        " preset's, `sharded` under FSDP2",
        choices=ACCUMULATE,
    )
    profile_steps: str | None = _argument(None, "profile optimizer steps A to B (`3:5`, inclusive); they are not timed")
    memory_snapshot: bool = _argument(False, "record CUDA's allocations, one file per rank for pytorch.org/memory_viz")
    async_save: bool = _argument(
        False,
        "write checkpoints while training continues, from a copy in host memory (FSDP2, tensor and expert parallelism)",
    )
    save_model: bool = _argument(True, "save the trained model in the output folder at the end")
    overwrite_output_dir: bool = _argument(False, "replace the run that is in the output folder, if any")
    untimed_steps: int = _argument(
        2, "first optimizer steps that no speed counts (compilation, allocator growth)", limits=_NOT_NEGATIVE
    )
    stop_when_steps_within: float | None = _argument(
        None,
        "stop once the 95 % CI of the median step time is within this fraction of it, for example 0.03",
        limits=Range(above=0, below=1),
    )
    stop_after_minutes: float | None = _argument(
        None,
        "stop early, as completed, when the steps have taken this long",
        limits=Range(above=0, highest=YEAR_MINUTES),
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The data and its tokenization."""

    dataset: tuple[str, ...] = _argument(
        (), "one or more of: a JSON, JSONL, CSV or Parquet file, a hub id (owner/name), or `demo`"
    )
    dataset_config: str | None = _argument(None, "the configuration of a hub id")
    dataset_split: str = _argument("train", "the split of a hub id")
    dataset_weights: tuple[float, ...] = _argument(
        (), "each data set's share of the rows of an epoch: `0.7 0.3`; default: every row once"
    )
    column: Mapping[str, Any] | None = _mapping(
        "columns of a format's fields: instruction=question output=answer, or output=answers.text.0"
    )
    max_seq_length: int = _argument(
        MAX_SEQ_LENGTH,
        "longer rows are truncated to this many tokens",
        limits=Range(lowest=2, highest=2**27),  # a token is predicted from those before it
    )
    loss_on: str | None = _argument(
        None,
        "`assistant` (or completion) tokens, or `all`; default: assistant, for plain text all",
        choices=("assistant", "all"),
    )
    chat_template: str | None = _argument(None, "a Jinja file to use instead of the tokenizer's chat template")
    system_prompt: str | None = _argument(None, "system message for conversations that have none")
    packing: bool = _argument(
        False, "pack rows into sequences of up to `max_seq_length`, without attention between rows"
    )
    eval_dataset: str | None = _argument(None, "data for the evaluation loss: a file or a hub id, like `dataset`")
    eval_dataset_config: str | None = _argument(None, "the configuration of `eval_dataset`, if that is a hub id")
    eval_dataset_split: str = _argument("validation", "the split of `eval_dataset`, if that is a hub id")
    val_size: float | None = _argument(
        None, "hold out rows for evaluation, chosen by the seed: a fraction below 1, or a number of rows"
    )
    streaming: bool = _argument(False, "read and tokenize the rows during training; needs --max_steps")
    streaming_buffer_size: int = _argument(
        1000, "rows in the shuffle buffer of a stream; 1 keeps the file's order", limits=_COUNT
    )
    preprocessing_num_workers: int | None = _argument(
        None, "processes for tokenization; default: one", limits=Range(lowest=1, highest=WORKERS_PER_RANK)
    )

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a row at its full length."""
        return self.max_seq_length


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The arguments of transformers' `TrainingArguments` that the toolkit reads; ranges as torch's AdamW has them."""

    output_dir: str | None = _argument(None)
    per_device_train_batch_size: int = _argument(PER_DEVICE_TRAIN_BATCH_SIZE, limits=_SIZE)
    per_device_eval_batch_size: int = _argument(8, limits=_SIZE)
    gradient_accumulation_steps: int = _argument(GRADIENT_ACCUMULATION_STEPS, limits=_SIZE)
    num_train_epochs: float = _argument(3.0, limits=Range(above=0))
    max_steps: int = _argument(-1, limits=Range(lowest=1, also=-1))
    learning_rate: float = _argument(5e-5, limits=_NOT_NEGATIVE)
    lr_scheduler_type: str = _argument("linear")
    lr_scheduler_kwargs: Mapping[str, Any] | None = _mapping()
    warmup_steps: float = _argument(0, limits=_NOT_NEGATIVE)
    optim: str = _argument(DEFAULT_OPTIMIZER)
    optim_args: str | None = _argument(None)
    weight_decay: float = _argument(0.0, limits=_NOT_NEGATIVE)
    adam_beta1: float = _argument(0.9, limits=_FRACTION)
    adam_beta2: float = _argument(0.999, limits=_FRACTION)
    adam_epsilon: float = _argument(1e-8, limits=_NOT_NEGATIVE)
    max_grad_norm: float = _argument(1.0, limits=_NOT_NEGATIVE)
    label_smoothing_factor: float = _argument(0.0, limits=_FRACTION)
    neftune_noise_alpha: float | None = _argument(None, limits=_NOT_NEGATIVE)
    seed: int = _argument(42, limits=Range(lowest=0, highest=2**32 - 1))  # numpy's seeds, which `set_seed` sets
    bf16: bool = _argument(False)
    fp16: bool = _argument(False)
    bf16_full_eval: bool = _argument(False)
    fp16_full_eval: bool = _argument(False)
    tf32: bool | None = _argument(None)
    use_cpu: bool = _argument(False)
    activation_checkpointing: bool | None = _argument(None)
    activation_checkpointing_kwargs: Mapping[str, Any] | None = _mapping()
    gradient_checkpointing: bool | None = _argument(None)
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = _mapping()
    torch_compile: bool = _argument(False)
    torch_compile_backend: str | None = _argument(None)
    torch_compile_mode: str | None = _argument(None)
    use_liger_kernel: bool = _argument(False)
    liger_kernel_config: Mapping[str, Any] | None = _mapping()
    auto_find_batch_size: bool = _argument(False)
    torch_empty_cache_steps: int | None = _argument(None, limits=_COUNT)
    accelerator_config: Mapping[str, Any] | None = _mapping()
    dataloader_num_workers: int = _argument(0, limits=Range(lowest=0, highest=WORKERS_PER_RANK))
    dataloader_prefetch_factor: int | None = _argument(None, limits=_COUNT)
    dataloader_persistent_workers: bool = _argument(False)
    train_sampling_strategy: str = _argument("random")
    ignore_data_skip: bool = _argument(False)
    ddp_find_unused_parameters: bool | None = _argument(None)
    ddp_bucket_cap_mb: int | None = _argument(None, limits=_NOT_NEGATIVE)
    ddp_broadcast_buffers: bool | None = _argument(None)
    ddp_static_graph: bool | None = _argument(None)
    # examples of LLaMA-Factory have 180000000
    ddp_timeout: int = _argument(1800, limits=Range(lowest=1, highest=2**31 - 1))
    eval_strategy: str = _argument("no")
    eval_steps: float | None = _argument(None)
    eval_delay: float = _argument(0, limits=_NOT_NEGATIVE)
    eval_on_start: bool = _argument(False)
    eval_accumulation_steps: int | None = _argument(None, limits=_COUNT)
    logging_strategy: str = _argument("steps")
    logging_steps: float = _argument(500)
    disable_tqdm: bool | None = _argument(None)
    save_strategy: str = _argument("steps")
    save_steps: float = _argument(500)
    save_total_limit: int | None = _argument(None)
    save_only_model: bool = _argument(False)
    enable_jit_checkpoint: bool = _argument(False)
    load_best_model_at_end: bool = _argument(False)
    metric_for_best_model: str | None = _argument(None)
    resume_from_checkpoint: str | None = _argument(None)


OWN_ARGUMENTS: dict[str, dataclasses.Field[Any]] = {
    each.name: each for part in (ModelArguments, DataArguments) for each in dataclasses.fields(part)
}
"""The arguments that the training script takes beside transformers' own."""
ARGUMENTS: dict[str, dataclasses.Field[Any]] = OWN_ARGUMENTS | {
    each.name: each for each in dataclasses.fields(TrainerArguments)
}
"""All arguments that the toolkit reads, by name."""

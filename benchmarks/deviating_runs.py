"""Live runs that verification judges: deviations of what trains, each by the field that must show it, and honest runs.

`benchmarks/verification.py` runs all of them.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

OURS, SFT, DPO, GRPO = "toolkit train", "sft", "dpo", "grpo"


class Deviation(NamedTuple):
    """A change of what trains that one field of the attestation must show."""

    field: str
    does: str
    faults: dict[str, str]
    """Fault of `faulty_ranks` by preset."""
    ours: str | None = ""
    """More arguments of `toolkit train`; None where our script is not run."""
    trl: str | None = ""
    """More arguments of TRL's scripts; None where its trainers have no such setting, or nothing is expected of it."""
    trainers: tuple[str, ...] = (SFT,)
    ranks: int = 2


def under(fault: str, *presets: str) -> dict[str, str]:
    return dict.fromkeys(presets, fault)


ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
LORA = "--lora_r 4"
TRL_LORA = "--use_peft true --lora_r 4 --lora_target_modules all-linear"
CLIPPING = {**under("no_clipping", "ddp", "fsdp2"), "zero2": "no_clipping_zero2", "zero3": "no_clipping_zero3"}
NORM, LARGE = "gradient norm at the optimizer", "norm of a large gradient, clipped"
ACCUMULATES = "--gradient_accumulation_steps 2 --accumulate sharded"
PIPELINE = "--pp 2 --gradient_accumulation_steps 2"
DEVIATIONS = (
    Deviation("world_size", "each rank trains alone", under("each_alone", "ddp")),
    Deviation("world_size", "each rank trains alone", under("each_alone", "zero2"), trl=None),
    Deviation("engine", "nothing wraps the model", under("unwrapped", "ddp"), trainers=(SFT, DPO, GRPO)),
    Deviation("engine", "DDP runs", {"zero2": "without_deepspeed", "zero3": "without_deepspeed"}),
    Deviation("engine", "DDP runs", under("ddp_for_fsdp2", "fsdp2"), trainers=(SFT, DPO, GRPO)),
    Deviation("sharding", "stage 1 runs", under("stage_1", "zero2"), trainers=(SFT, DPO, GRPO)),
    Deviation("sharding", "stage 2 runs", under("stage_2", "zero3")),
    Deviation("sharding", "weights stay gathered", under("fsdp2_without_resharding", "fsdp2")),
    Deviation("offload_optimizer", "offloaded", under("offloaded", "zero2", "zero3")),
    Deviation("offload_optimizer", "not offloaded", under("not_offloaded", "zero2_cpu_offload", "zero3_cpu_offload")),
    Deviation("offload_optimizer", "not offloaded", under("fsdp2_not_offloaded", "fsdp2_cpu_offload")),
    Deviation("offload_param", "not offloaded", under("parameters_not_offloaded", "zero3_cpu_offload")),
    Deviation("offload_param", "not offloaded", under("fsdp2_not_offloaded", "fsdp2_cpu_offload")),
    Deviation("offload_param", "offloaded", under("parameters_offloaded", "zero3")),
    Deviation("compute_dtype", "bf16 for fp32", under("bf16_autocast", "ddp", "fsdp2"), trl=None),
    Deviation("compute_dtype", "fp32 for bf16", under("no_autocast", "ddp"), "--bf16 true"),
    Deviation("master_dtype", "bf16 weights", under("bf16_model", "ddp")),
    Deviation("master_dtype", "bf16 weights", under("bf16_model_fsdp2", "fsdp2")),
    Deviation("master_dtype", "bf16 masters", under("bf16_masters", "zero2_cpu_offload"), "--bf16 true"),
    Deviation("optimizer_dtype", "Adam's moments in bf16", under("bf16_adam", *ENGINES)),
    Deviation("optimizer_dtype", "the same", under("bf16_adam_offload", "zero2_cpu_offload")),
    Deviation("optimizer_class", "Adam for AdamW", under("adam", *ENGINES)),
    Deviation("gradient_dtype", "bf16 weights", {"ddp": "bf16_model", "fsdp2": "bf16_model_fsdp2"}),
    Deviation(
        "reduce_dtype",
        "fp32 for bf16",
        {**under("fp32_reduction", "zero2", "zero3"), "fsdp2": "fp32_reduction_fsdp2"},
        "--bf16 true",
    ),
    Deviation(
        "optimizer_class", "torch's for the offloaded one", under("torch_optimizer_under_offload", "zero2_cpu_offload")
    ),
    Deviation("optimizer_paged", "marked as bitsandbytes marks it", under("paged", "ddp", "zero2")),
    Deviation("adam_w_mode", "decay is not decoupled", under("without_decoupled_decay", "zero2_cpu_offload")),
    Deviation("dp_shard_size", "4 for 2 ranks", under("not_replicated", "fsdp2_hybrid"), trl=None, ranks=4),
    Deviation("layout", "layers are not split", under("sharded_for_split", "tp"), "--tp 2", None),
    Deviation("batch_group", "layers are not split", under("sharded_for_split", "tp"), "--tp 2", None),
    Deviation("first_rows_sha256", "other rows on rank 1", under("order_on_rank_1", "tp"), "--tp 2", None),
    Deviation("gradient_clipping", "7 in DeepSpeed", under("other_clipping", "zero2", "zero3")),
    Deviation("activation_checkpointing", "not asked for", under("checkpointing", *ENGINES), trl=None),
    Deviation("activation_checkpointing", "not done", under("no_checkpointing", *ENGINES), None),
    Deviation(
        "activation_checkpointing_offload",
        "done",
        under("checkpoint_on_host", "ddp", "zero2"),
        "--activation_checkpointing true",
        None,
    ),
    Deviation(
        "activation_checkpointing_selective",
        "attention is recomputed",
        under("recomputes_attention", "ddp", "fsdp2"),
        "--activation_checkpointing true --activation_checkpointing_selective true",
        None,
    ),
    Deviation("pipeline_schedule", "GPipe runs", under("other_schedule", "pipeline_1f1b"), PIPELINE, None),
    Deviation("accumulate", "whole gradients", under("accumulates_whole", "fsdp2"), ACCUMULATES, None),
    Deviation("seed", "another on rank 1", under("seed_on_rank_1", *ENGINES), trl=None),
    Deviation("ddp_comm_hook", "not registered", under("no_hook", "ddp"), "--ddp_comm_hook bf16", None),
    Deviation("ddp_comm_hook", "torch's fp16 hook", under("torch_hook", "ddp"), "", None),
    Deviation("torch_compile", "not compiled", under("not_compiled", "ddp", "fsdp2"), "--torch_compile true", None),
    Deviation("neftune_noise_alpha", "no noise", under("no_noise", *ENGINES), "--neftune_noise_alpha 5", None),
    Deviation("load_in_4bit", "not quantized", under("not_quantized", "ddp"), f"--load_in_4bit true {LORA}", None),
    Deviation("quantized_storage_dtype", "uint8", under("other_storage", "ddp"), f"--load_in_4bit true {LORA}", None),
    Deviation("frozen_dtype", "the other one", under("frozen_cast", *ENGINES), LORA, None),
    Deviation("num_trainable_params", "a matrix is frozen", under("one_frozen", *ENGINES), "", None),
    Deviation("num_trainable_params", "two layers share a matrix", under("tied", "ddp"), "", None),
    Deviation("loss", "from full logits", under("full_loss", "ddp"), "--loss chunked", None),
    Deviation("loss_chunk_tokens", "8", under("other_chunk", "ddp"), "--loss chunked", None),
    Deviation(
        "attn_implementation", "eager", under("eager", "ddp", "zero2", "fsdp2"), "--attn_implementation sdpa", None
    ),
    Deviation(
        "packing_mask_bytes", "a mask", under("sdpa", "ddp"), "--packing true --attn_implementation sdpa_varlen", None
    ),
    Deviation("packing", "no positions", under("without_positions", "ddp"), "--packing true", None),
    Deviation("replicas", "each rank reduces alone", under("reduces_with_nobody", "ddp"), trainers=(SFT, DPO)),
    Deviation("replicas", "`no_sync` in each backward", under("never_synced", "ddp"), trainers=(SFT, DPO)),
    Deviation("replicas", "half of the ranks reduce", under("reduces_over_half", "ddp"), ranks=4),
    Deviation("replicas", "copies do not reduce", under("copies_apart", "fsdp2_hybrid"), trl=None, ranks=4),
    Deviation("replicas", "a matrix is left out", under("left_out_of_ddp", "ddp")),
    Deviation("replicas", "twice the rate on rank 1", under("other_rate_on_rank_1", "ddp")),
    Deviation("replicas", "no step on rank 1", under("no_step_on_rank_1", "ddp")),
    Deviation("learning_rates", "twice the rate on rank 1", under("other_rate_on_rank_1", *ENGINES[1:], "zero1")),
    Deviation("optimizer_steps", "no step on rank 1", under("no_step_on_rank_1", *ENGINES[1:], "zero1")),
    Deviation("optimizer_steps", "no step on rank 1", under("no_step_on_rank_1_offload", "zero2_cpu_offload")),
    Deviation("initial_weights_sha256", "a matrix differs", under("perturbed_on_rank_1", "ddp", "zero2")),
    Deviation(NORM, "nothing is clipped", CLIPPING),
    Deviation(
        LARGE,
        "the same, below the threshold",
        {name: fault for name, fault in CLIPPING.items() if name != "zero3"},
        "--max_grad_norm 100",
        "--max_grad_norm 100",
    ),
    Deviation("parameter_bytes", "two matrices share their memory", under("one_storage", "ddp"), trl=None),
    Deviation("parameter_bytes", "all stay gathered", under("parameters_persist", "zero3")),
    Deviation("replicas", "some have no gradient, so DDP reduces none", under("detached", "ddp"), trl=None),
    Deviation("gradient_bytes", "some have no gradient", under("detached", "fsdp2"), trl=None),
    Deviation("optimizer_bytes", "a matrix is not updated", under("one_left_out", *ENGINES)),
)


class Run(NamedTuple):
    """One run; `fault` is empty for an honest one."""

    trainer: str
    preset: str
    arguments: str
    field: str = ""
    does: str = ""
    fault: str = ""
    ranks: int = 2

    @property
    def name(self) -> str:
        what = re.sub(r"[^a-z0-9]+", "_", f"{self.field} {self.fault} {self.arguments}".lower()).strip("_") or "honest"
        return f"{self.trainer.replace(' ', '_')}-{self.preset}-{what}"[:160] + "-4" * (self.ranks == 4)


def deviating_runs() -> Iterator[Run]:
    for each in DEVIATIONS:
        for preset, fault in each.faults.items():
            given = {OURS: each.ours, **dict.fromkeys(each.trainers, each.trl)}
            for trainer, arguments in given.items():
                if arguments is not None:
                    yield Run(trainer, preset, arguments, each.field, each.does, fault, each.ranks)


METHODS = ("", LORA, "--bf16 true --activation_checkpointing true --gradient_accumulation_steps 2")
PRESETS = (*ENGINES, "zero1", "fsdp2_grad_op", "zero2_cpu_offload", "zero3_cpu_offload", "fsdp2_cpu_offload")
MORE_METHODS = (
    ("ddp", "--packing true"),
    ("fsdp2", "--packing true"),
    ("ddp", f"--load_in_4bit true {LORA}"),
    ("ddp", "--freeze *embed_tokens*"),
    ("zero3", "--freeze *embed_tokens*"),
    ("fsdp2", "--freeze *embed_tokens*"),
    ("ddp", "--ddp_comm_hook bf16"),
    ("fsdp2", f"{ACCUMULATES} --loss chunked"),
    ("ddp", "--neftune_noise_alpha 5 --attn_implementation eager"),
    ("tp", "--tp 2"),
    ("pipeline_1f1b", PIPELINE),
)
PLAIN = (
    ("vision", ENGINES[:3]),
    ("own", ("ddp", "zero2", "fsdp2")),
    ("tuple", ("ddp", "zero2")),
    ("images_and_text", ("ddp", "zero2")),
)


# What several ranks hold alike, and may not: buffers, frozen parts, the weights after training; four steps with saves.
COPIED = (
    ("plain_saves", ("ddp", "zero1", "zero2", "zero2_cpu_offload")),  # its model has no `hidden_size` for ZeRO-3
    ("buffers", ("ddp",)),
    ("freezes", ("ddp",)),
    ("averages_saves", ("ddp", "zero2")),
)
ON_FOUR_RANKS = (
    ("ddp", "--optim sgd"),
    ("ddp", LORA),
    ("zero1", ""),
    ("zero2", "--bf16 true"),
    ("fsdp2_hybrid", ""),
    ("fsdp2_hybrid", LORA),
    ("fsdp2_hybrid", "--bf16 true --gradient_accumulation_steps 2"),
    ("tp", "--tp 2"),
    ("fsdp2_tp", "--tp 2"),
    ("pipeline_1f1b", PIPELINE),
)
MORE_UPDATES = (
    ("ddp", "--ddp_comm_hook power_sgd"),
    ("ddp", "--optim adafactor"),
    ("fsdp2", "--optim sgd"),
    ("zero3", "--weight_decay 0.1"),
)


def honest_runs() -> Iterator[Run]:
    yield from (Run(OURS, preset, method) for method in METHODS for preset in PRESETS)
    yield from (Run(OURS, preset, method) for preset, method in MORE_METHODS)
    for trainer in (SFT, DPO, "kto", "reward", GRPO):
        yield from (Run(trainer, preset, "") for preset in ENGINES)
    yield from (Run(trainer, preset, TRL_LORA) for trainer in (SFT, DPO) for preset in ENGINES)
    yield from (Run(f"Trainer ({mode})", preset, "") for mode, presets in PLAIN for preset in presets)
    yield from (Run(f"Copies ({mode})", preset, "") for mode, presets in COPIED for preset in presets)
    yield from (Run(OURS, preset, method, ranks=4) for preset, method in ON_FOUR_RANKS)
    yield from (Run(OURS, preset, method) for preset, method in MORE_UPDATES)

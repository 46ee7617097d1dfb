"""DeepSpeed's ZeRO: flat partitions of optimizer states, gradients and parameters, with offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.engines.engine import Engine, Sharding

SHARDING_OF_STAGE = {0: "replicate", 1: "shard_optimizer", 2: "shard_grad_op", 3: "full_shard"}
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHARDS_PARAMETERS = ("full_shard", "hybrid_shard")
PERSISTENCE_THRESHOLD = 100_000  # elements: DeepSpeed's default (`runtime/zero/config.py`)
# With its optimizer offloaded, ZeRO-2 keeps the fp32 gradients of its master weights, and ZeRO-3 a bf16 partition and
# an fp32 copy of it (`stage_1_and_2.py` line 940, `stage3.py` lines 791 and 1342).
OFFLOADED_GRADIENT_BYTES = {"shard_grad_op": 4, "full_shard": 6, "hybrid_shard": 6}


class Zero(Engine):
    """DeepSpeed with a stage of ZeRO; stage 0 replicates, as DDP does."""

    name = "deepspeed"
    shardings: Mapping[str, Sharding] = {
        "replicate": Sharding("2 P per step", "NO_SHARD", "DDP"),
        "shard_optimizer": Sharding("3 P per step", None, None),
        "shard_grad_op": Sharding(
            "2 P per accumulation step, 1 P per step", "SHARD_GRAD_OP", "close to FSDP2 without resharding"
        ),
        "full_shard": Sharding("2 to 3 P per accumulation step", "FULL_SHARD", "FSDP2"),
        # From table 1 of its paper (https://arxiv.org/abs/2306.10209).
        "hybrid_shard": Sharding(
            "0.75 P per accumulation step between nodes", "close to HYBRID_SHARD", "ZeRO++ (hpZ, qwZ, qgZ)"
        ),
    }
    # A bf16 parameter, and an fp32 master weight, momentum and variance (ZeRO paper, section 3.1,
    # https://arxiv.org/abs/1910.02054).
    state_bytes = (2, 2, 12)
    dimensions: tuple[str, ...] = ("dp_shard", "sp")
    reads_deepspeed_settings = True
    libraries = ("deepspeed", "ninja")
    needs = ("deepspeed",)
    needs_to_offload = ("a C++ compiler, for DeepSpeed's CPU Adam",)
    compiles_ops = True
    keeps_masters = True
    launcher_decides_precision = False
    is_loaded_whole = False
    keeps_empty_groups = False
    writes_universal = True
    can_be_traced = False
    replaces_offloaded_optimizer = True
    rejects_best_of_weights = True
    accelerate_uses_cpu = "false"  # with "true", accelerate turns a DeepSpeed run into DDP
    no_comm_hook = "DeepSpeed reduces gradients itself"
    no_async_save = "DeepSpeed writes its checkpoints itself"
    fixed_accumulation: Mapping[str, str] = {
        "sharded": "below ZeRO-2, gradients are reduced in the last accumulation step only",
        "whole": "ZeRO-2 and ZeRO-3 reduce and shard gradients in every accumulation step",
    }
    no_optimizer: Mapping[str, tuple[str, str]] = {
        "adafactor": (
            "DeepSpeed flattens parameters, and only matrices have rows and columns to factor",
            "`--preset ddp`, or `--optim adamw_bnb_8bit`",
        ),
        "adagrad": ("DeepSpeed 0.19.8 cannot make its states in advance", "`--optim rmsprop`, or `--preset ddp`"),
        "muon": ("DeepSpeed flattens parameters, and Muon orthogonalises matrices", "`--preset ddp` or `fsdp2`"),
        "torchao": (
            "torchao quantizes whole blocks of 256, and DeepSpeed's flat partitions seldom are",
            "`--optim adamw_bnb_8bit`",
        ),
    }

    def preset_fields(
        self, config: Mapping[str, Any], settings: Mapping[str, Any], parallel: Sequence[str]
    ) -> dict[str, Any]:
        """Return the fields, from DeepSpeed's settings."""
        zero = settings.get("zero_optimization", {})
        # ZeRO++ keeps a second copy of the parameters within groups of this many ranks; 1 means none.
        hpz = int(zero.get("zero_hpz_partition_size", 1))
        quantized = [key for key in QUANTIZED_KEYS if zero.get(key)]
        devices = {block: (zero.get(block) or {}).get("device", "none") for block in OFFLOAD_BLOCKS}
        # `auto` in a precision block leaves the value to `TrainingArguments`, but still names the precision.
        enabled = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled") in (True, "auto")]
        return super().preset_fields(config, settings, parallel) | {
            "sharding": "hybrid_shard" if hpz > 1 else SHARDING_OF_STAGE[zero.get("stage", 0)],
            "min_world_size": hpz,
            "world_size_multiple": hpz,
            "needs_gpu": f"{quantized[0]} runs CUDA kernels of DeepSpeed's" if quantized else None,
            "mixed_precision": enabled[0] if enabled else "no",
            **{block: None if device == "none" else device for block, device in devices.items()},
        }

    def offloaded_gradient_bytes(self, sharding: str) -> int:
        """Return the bytes of a gradient on the host."""
        return OFFLOADED_GRADIENT_BYTES.get(sharding, self.state_bytes[1])

    def breaks_compiled_graphs(self, sharding: str) -> str | None:
        """Return why ZeRO-3 is not compiled: docs/evidence/speed-and-memory.md has 15 graph breaks in two layers."""
        if sharding not in SHARDS_PARAMETERS:
            return None
        return "ZeRO-3 gathers weights in hooks, so that the compiler's graph ends at each linear layer"

    def upstream_bugs(self, sharding: str) -> tuple[str, ...]:
        """Return what does not work under a stage, and the upstream issue."""
        if sharding in SHARDS_PARAMETERS:
            return (
                "the Trainer's own save of LoRA adapters, which can be empty (trl#4416, peft#2892, DeepSpeed#7900)",
            )
        if sharding == "shard_grad_op":
            return ("`overlap_comm`, which can give wrong gradients (DeepSpeed#7188, #5294, #8061)",)
        return ()

    def fits_any_world_size(self, *, universal: bool, sharding: str | None, one_number_each: bool) -> bool:
        """Return True for the universal layout."""
        del sharding, one_number_each
        return universal

    def expect_no_other_ranks(self) -> None:
        """Let ZeRO-3 start in a rehearsal."""
        from toolkit.engines import zero_live

        zero_live.expect_no_other_ranks()

    def gradient_facts(
        self, *, compute_dtype: str, deepspeed_config: Mapping[str, Any] | None, splits_sequences: bool
    ) -> dict[str, str]:
        """Return the dtype of the reduction; stage and offload decide which buffer holds a gradient.

        The parts of a sequence are summed in fp32, whatever the compute dtype.
        """
        config = deepspeed_config or {}
        if splits_sequences:
            sent = config.get("seq_parallel_communication_data_type", "fp32")
        else:
            sent = config.get("communication_data_type")
        return {"reduce_dtype": DTYPES.get(str(sent).lower(), compute_dtype)}

    def persistence_threshold(self, zero_block: Mapping[str, Any], sharding: str, *, hidden_size: int | None) -> int:
        """Return the elements up to which ZeRO-3 never releases a gathered parameter.

        `auto` is 10 x the hidden size, which the libraries read from the model's configuration (transformers 5,
        `integrations/deepspeed.py`).
        """
        if sharding not in SHARDS_PARAMETERS:
            return 0
        value = zero_block.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
        return 10 * (hidden_size or 0) if value == "auto" else int(value)

    def training_arguments(
        self, config: Mapping[str, Any], deepspeed_config: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return `deepspeed`, the settings themselves."""
        del config
        return {"deepspeed": deepspeed_config}

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the variable by which accelerate knows the engine."""
        del config
        return {"ACCELERATE_USE_DEEPSPEED": "true"}

"""Cases of the GPU validation, registered before anything was measured, in a calibration half and a test half.

Constants of the planner may be fitted on the calibration half only; published errors are those of the test half. Each
architecture and its family belong to one half. The grid was registered twice: in the first one, of which nothing was
measured, Qwen 3, Gemma 2 and Mistral were in the test half, and traces of these families then shaped formulas. The
order is part of the grid: in the first pass every preset meets every architecture, so that a run that is cut short is
still balanced. Rows are full, so nothing is padded.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

Case = dict[str, Any]

SEED = 6
PASSES = 3
LLAMA = {"model_type": "llama", "max_position_embeddings": 8192, "dtype": "bfloat16"}
# Shapes of published models (their config.json) or their proportions at a size that fits, without weights: parameter
# counts from 0.36 to 3.2 billion, so that peaks spread over an 80 GB card.
CALIBRATION: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **LLAMA,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    },
    "qwen2-0.5b": {
        **LLAMA,
        "model_type": "qwen2",
        **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
        **{"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "gpt2-medium": {
        **{"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 8192},
        **{"vocab_size": 50257, "tie_word_embeddings": True, "dtype": "bfloat16"},
    },
    # The planner's formulas were shaped by traces and saved tensors of these families, so they test nothing.
    "qwen3-1.7b": {
        **LLAMA,
        "model_type": "qwen3",
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "gemma2-2b": {
        **LLAMA,
        "model_type": "gemma2",
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "tie_word_embeddings": True},
    },
    "mistral-2b": {
        **LLAMA,
        "model_type": "mistral",
        **{"hidden_size": 2560, "intermediate_size": 8960, "num_hidden_layers": 20, "num_attention_heads": 20},
        **{"num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False},
    },
    "mixtral-1b": {
        **LLAMA,
        "model_type": "mixtral",
        **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
        **{"tie_word_embeddings": False},
    },
}
# Families of which only parameter counts had been checked when the grid was registered: three with formulas, seven that
# transformers has to build.
TEST: dict[str, dict[str, Any]] = {
    "granite-2b": {
        **LLAMA,
        "model_type": "granite",
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 49155, "tie_word_embeddings": True},
    },
    "smollm3-3b": {
        **LLAMA,
        "model_type": "smollm3",
        **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "vocab_size": 128256, "tie_word_embeddings": True},
    },
    "qwen2-moe-1b": {
        **LLAMA,
        "model_type": "qwen2_moe",
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 704},
        **{"shared_expert_intermediate_size": 2816, "vocab_size": 151936, "tie_word_embeddings": False},
    },
    "starcoder2-3b": {
        **LLAMA,
        "model_type": "starcoder2",
        **{"hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24},
        **{"num_key_value_heads": 2, "vocab_size": 49152, "sliding_window": 4096, "tie_word_embeddings": True},
    },
    "falcon-1b": {
        **LLAMA,
        "model_type": "falcon",
        **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 65024},
        **{"multi_query": True, "parallel_attn": True, "alibi": False, "bias": False, "tie_word_embeddings": True},
    },
    "bloom-1b": {
        **{"model_type": "bloom", "hidden_size": 1536, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        **{"tie_word_embeddings": True, "dtype": "bfloat16"},
    },
    "deepseek-v3-2b": {
        **LLAMA,
        "model_type": "deepseek_v3",
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 16, "num_experts_per_tok": 4},
        **{"n_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 2, "n_group": 1},
        **{"topk_group": 1, "vocab_size": 129280, "tie_word_embeddings": False},
    },
    "glm4-2b": {
        **LLAMA,
        "model_type": "glm4",
        **{"hidden_size": 2048, "intermediate_size": 6848, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "vocab_size": 151552},
        **{"tie_word_embeddings": False},
    },
    "cohere2-2b": {
        **LLAMA,
        "model_type": "cohere2",
        **{"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 256000, "sliding_window": 4096},
        **{"tie_word_embeddings": True},
    },
    "olmo3-2b": {
        **LLAMA,
        "model_type": "olmo3",
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "vocab_size": 100278, "sliding_window": 4096, "tie_word_embeddings": False},
    },
}
ARCHITECTURES = CALIBRATION | TEST
WORLD_SIZES = {
    "single": (1,),
    **{name: (1, 2, 8, 64) for name in ("ddp", "zero1", "zero2", "zero3", "zero2_cpu_offload", "zero3_cpu_offload")},
    **{name: (2, 8, 64) for name in ("fsdp2", "fsdp2_grad_op", "fsdp2_cpu_offload")},
    "fsdp2_hybrid": (8, 64),
}
METHODS = ("full", "lora")
# Length and rows of a micro-batch: 4,096 to 16,384 tokens, so that jobs with short rows are not small.
BATCHES = ((512, 8), (1024, 8), (2048, 4), (4096, 2), (8192, 1), (8192, 2))
TINY = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 517, "tie_word_embeddings": True, "max_position_embeddings": 64},
}
TINY_ARCHITECTURES = {"tiny-llama": LLAMA | TINY, "tiny-qwen3": LLAMA | TINY | {"model_type": "qwen3", "head_dim": 16}}


def registered_grid() -> list[Case]:
    """Return every architecture under every preset, three times, each time with another job."""
    chance = random.Random(SEED)
    cases = []
    for _ in range(PASSES):
        once = [_case(name, preset, chance) for name in ARCHITECTURES for preset in WORLD_SIZES]
        chance.shuffle(once)
        cases += once
    return [case | {"id": f"{number:03d}"} for number, case in enumerate(cases)]


def _case(architecture: str, preset: str, chance: random.Random) -> Case:
    length, rows = chance.choice(BATCHES)
    return {
        "split": "calibration" if architecture in CALIBRATION else "test",
        "architecture": architecture,
        "preset": preset,
        "world_size": chance.choice(WORLD_SIZES[preset]),
        "rank": 0,
        "method": chance.choice(METHODS),
        "activation_checkpointing": chance.random() < 0.5,
        "max_seq_length": length,
        "per_device_train_batch_size": rows,
    }


def tiny_grid() -> list[Case]:
    """Return a few cases that a CPU rehearses in seconds, to try the script."""
    jobs = [("ddp", 2, "full", False), ("zero2", 8, "full", True), ("zero3", 64, "lora", False)]
    jobs += [("fsdp2", 8, "lora", True)]
    cases = [
        {
            "split": split,
            "architecture": architecture,
            **{"preset": preset, "world_size": world_size, "rank": 0, "method": method},
            **{"activation_checkpointing": recomputes, "max_seq_length": 32, "per_device_train_batch_size": 2},
        }
        for preset, world_size, method, recomputes in jobs
        for architecture, split in (("tiny-llama", "calibration"), ("tiny-qwen3", "test"))
    ]
    return [case | {"id": f"tiny-{number}"} for number, case in enumerate(cases)]


def digest(cases: list[Case]) -> str:
    """Return the SHA-256 of cases and architectures, by which results name their grid."""
    body = {"cases": cases, "architectures": ARCHITECTURES | TINY_ARCHITECTURES}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

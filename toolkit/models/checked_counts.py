"""Architectures and training methods whose planned tensors a test has compared with transformers, peft or bitsandbytes.

`toolkit plan` calls model states exact for these only. `tests/models/test_checked_counts.py` goes over `CHECKED`, so an
entry that is wrong fails there.

    >>> is_checked("llama", LORA), is_checked("a-new-architecture", LORA)
    (True, False)
"""

from __future__ import annotations

from collections.abc import Mapping

FULL = "full fine-tune"
LORA = "LoRA"
LORA_ON_SOME = "LoRA on named modules"
QLORA = "QLoRA"

WITH_FORMULAS = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2"),
    *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm"),
)
# transformers builds these, and peft adapts them, on the meta device (`toolkit.models.count_from_transformers`).
DENSE = (
    *("apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cwm", "diffllama", "doge", "ernie4_5"),
    *("exaone4", "falcon", "gemma4_text", "glm", "glm4", "gpt_bigcode", "gptj", "helium", "hunyuan_v1_dense"),
    *("internlm3", "lfm2", "ministral", "ministral3", "mpt", "nanochat", "nemotron", "olmo3", "olmo_hybrid"),
    *("persimmon", "qwen3_5_text", "recurrent_gemma", "seed_oss", "starcoder2", "vaultgemma", "xglm", "youtu"),
)
MIXTURES_WITH_ADAPTED_EXPERTS = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax"),
    *("minimax_m2", "olmoe", "qwen3_next", "solar_open"),
)
MIXTURES_WITH_FROZEN_EXPERTS = (
    *("axk1", "deepseek_v4", "flint", "gpt_oss", "granitemoe", "granitemoeshared", "hy_v3", "jamba", "jetmoe"),
    *("kimi_linear", "laguna", "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text", "phimoe", "qwen3_5_moe_text"),
)
# `tests/fixtures/quantized_bytes.json`: bytes that bitsandbytes held.
QUANTIZED = ("gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")

_ALL = (*WITH_FORMULAS, *DENSE, *MIXTURES_WITH_ADAPTED_EXPERTS, *MIXTURES_WITH_FROZEN_EXPERTS)
CHECKED: Mapping[str, tuple[str, ...]] = {
    model_type: (FULL, LORA, LORA_ON_SOME, *((QLORA,) if model_type in QUANTIZED else ())) for model_type in _ALL
}


def is_checked(model_type: str, method: str) -> bool:
    """Return True if a test compares the planned tensors of this architecture and method with the libraries' own."""
    return method in CHECKED.get(model_type, ())

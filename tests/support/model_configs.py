"""Configurations of tiny models: one per architecture that has formulas, with the options that change its tensors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from launching import LLAMA_8B_CONFIG
from split_runs import MODELS, SIZES

from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import llama_shape
from toolkit.models.read_model import MIXTURES_WITH_ADAPTED_EXPERTS, MIXTURES_WITH_FROZEN_EXPERTS, shape_from_counted
from toolkit.models.shape import ModelShape

LLAMA_8B_PARAMS = 8_030_261_248
# A Llama whose sizes are easy to count.
LLAMA = {
    **{"model_type": "llama", "vocab_size": 1009, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
# Embedding and head 1009 x 64 each; a layer has q and o 64 x 64, k and v 32 x 64, gate, up and down 128 x 64, 2 norms.
NUM_PARAMS = 2 * 1009 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64

TINY = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    *((name, TINY) for name in ("llama", "granite", "smollm3", "mistral", "qwen2", "qwen3", "gemma", "gemma2")),
    *((name, TINY) for name in ("gemma3_text", "phi3", "phi", "olmo", "olmo2", "gpt_neox", "stablelm")),
    ("llama", TINY | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("qwen2", TINY | {"tie_word_embeddings": True}),
    ("gemma3_text", TINY | {"tie_word_embeddings": False}),
    ("mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", TINY | EXPERTS | {"shared_expert_intermediate_size": 24}),
    ("qwen3_moe", TINY | EXPERTS | {"mlp_only_layers": [1]}),
    ("qwen3_moe", TINY | EXPERTS | {"decoder_sparse_step": 2}),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 80, "tie_word_embeddings": False}),
    ("opt", TINY | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
]
# Fields of mixtures by the names that architectures without formulas have for them: one dense layer, two with experts.
MIXTURE = EXPERTS | {
    **{"num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "n_shared_experts": 1, "moe_k": 2},
    **{"moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1},
    **{"num_dense_layers": 1, "num_layers": 3, "head_dim": 8},
}
# Wide enough for the terms of a layer to differ from each other.
WIDE = TINY | {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2}


def config_file(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    """Write the `config.json` that transformers would save for these fields, and return its path."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    return folder / "config.json"


def built(path: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent))


def counted_tensors(model: Any) -> ModelShape:
    """Return the shape as `read_model`'s child process counts it, without activations; peft changes the model."""
    from toolkit.models.count_from_transformers import describe_adapters, describe_tensors

    described = describe_tensors(model) | {"activations": [], "counted_rank": 8, "why_not_counted": None}
    return shape_from_counted(json.loads(json.dumps(described | describe_adapters(model))))


def fields_of(model_type: str) -> list[dict[str, Any]]:
    known = [fields for kind, fields in ARCHITECTURES if kind == model_type]
    mixtures = (*MIXTURES_WITH_ADAPTED_EXPERTS, *MIXTURES_WITH_FROZEN_EXPERTS, "hunyuan_v1_dense", "ministral")
    return known or [TINY | MIXTURE if model_type in mixtures else TINY]


@cache
def llama_8b() -> ModelShape:
    fields = json.loads(LLAMA_8B_CONFIG.read_text())
    return _shape("llama", fields)


def _shape(model_type: str, fields: dict[str, Any]) -> ModelShape:
    shape = llama_shape(model_type, ConfigFields(fields, "config.json"))
    assert shape is not None
    return shape


@cache
def small_shape(name: str) -> ModelShape:
    fields = {**SIZES, **MODELS[name]}
    return _shape(fields.pop("model_type"), fields)

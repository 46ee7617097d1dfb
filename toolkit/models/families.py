"""How each architecture of Llama's build differs from Llama: one line of data a family.

>>> LLAMA_LIKE["qwen3"].qk_norm
'head'
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How an architecture of Llama's build differs from Llama."""

    qkv_bias: str | bool = False
    """True, False, or the field that says so."""
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: str | None = None
    """`head`: of a head's width; `full`: of all heads together."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_parts: tuple[str, ...] = ("weight",)
    final_norm: bool = True
    head_dim: int | None = None
    """Where a configuration gives none; None: the hidden size over the heads."""
    num_kv_heads: int | None = None
    """Where a configuration gives none; None: as many as attention heads."""
    tied: bool = False
    fused: bool = False
    """Query, key and value in one tensor, gate and up in another (Phi-3)."""
    experts: str | None = None
    """`mixtral`, `qwen2_moe` or `qwen3_moe`."""
    attention: str = "sdpa"
    activation: str = "silu"
    unknown_flags: tuple[str, ...] = ()
    """Options that change the tensors, and are left to the meta device."""


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
BIAS = "attention_bias"
GELU_TANH = "gelu_pytorch_tanh"
LLAMA_LIKE = {
    "llama": Family(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias"),
    "granite": Family(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias"),
    "smollm3": Family(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias", num_kv_heads=4, tied=True),
    "mistral": Family(num_kv_heads=8),
    "qwen2": Family(qkv_bias=True, num_kv_heads=32),
    "qwen3": Family(qkv_bias=BIAS, output_bias=BIAS, qk_norm="head", head_dim=128, num_kv_heads=32),
    "gemma": Family(qkv_bias=BIAS, output_bias=BIAS, head_dim=256, num_kv_heads=16, tied=True, activation=GELU_TANH),
    "gemma2": Family(
        qkv_bias=BIAS,
        output_bias=BIAS,
        norms=GEMMA_NORMS,
        head_dim=256,
        num_kv_heads=4,
        tied=True,
        attention="eager",
        activation=GELU_TANH,
    ),
    "gemma3_text": Family(
        qkv_bias=BIAS,
        output_bias=BIAS,
        qk_norm="head",
        norms=GEMMA_NORMS,
        head_dim=256,
        num_kv_heads=4,
        tied=True,
        activation=GELU_TANH,
    ),
    "mixtral": Family(num_kv_heads=8, experts="mixtral"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", num_kv_heads=16, experts="qwen2_moe"),
    "qwen3_moe": Family(qkv_bias=BIAS, output_bias=BIAS, qk_norm="head", num_kv_heads=4, experts="qwen3_moe"),
    "phi3": Family(fused=True),
    "olmo": Family(qkv_bias=BIAS, output_bias=BIAS, norms=(), final_norm=False),
    "olmo2": Family(
        qkv_bias=BIAS,
        output_bias=BIAS,
        qk_norm="full",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "stablelm": Family(
        qkv_bias="use_qkv_bias",
        norm_parts=("weight", "bias"),
        num_kv_heads=32,
        unknown_flags=("qk_layernorm", "use_parallel_residual"),
    ),
}

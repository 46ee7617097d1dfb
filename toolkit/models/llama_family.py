"""Tensors of the architectures that follow Llama's layout: each is one line of differences in `LLAMA_FAMILY`.

    >>> LLAMA_FAMILY["qwen3"].qk_norm
    'head'
    >>> fields = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> llama_shape("llama", ConfigFields(fields | {"vocab_size": 10}, "config.json")).num_params
    1480

`tests/models/test_read_model.py` compares every architecture with transformers, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields, Dimensions
from toolkit.models.shape import ROUTER, Layer, ModelShape, Tensor, linear


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaVariant:
    """Differences between one architecture and Llama."""

    qkv_bias: str | bool = False
    """True, False, or the configuration field that decides."""
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: str | None = None
    """`head`: as wide as one head; `full`: as wide as all heads together."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_parts: tuple[str, ...] = ("weight",)
    final_norm: bool = True
    head_dim: int | None = None
    """Default where the configuration gives none; None: hidden size over heads."""
    num_kv_heads: int | None = None
    """Default where the configuration gives none; None: as many as attention heads."""
    tied: bool = False
    fused: bool = False
    """Query, key and value in one tensor, gate and up in another (Phi-3)."""
    experts: str | None = None
    """`mixtral`, `qwen2_moe` or `qwen3_moe`."""
    attention: str = "sdpa"
    activation: str = "silu"
    unsupported_flags: tuple[str, ...] = ()
    """Options that change the tensors in ways not covered here: transformers builds the model then."""


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
BIAS = "attention_bias"
GELU_TANH = "gelu_pytorch_tanh"
LLAMA_FAMILY = {
    "llama": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias"),
    "granite": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias"),
    "smollm3": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias", num_kv_heads=4, tied=True),
    "mistral": LlamaVariant(num_kv_heads=8),
    "qwen2": LlamaVariant(qkv_bias=True, num_kv_heads=32),
    "qwen3": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, qk_norm="head", head_dim=128, num_kv_heads=32),
    "gemma": LlamaVariant(
        qkv_bias=BIAS, output_bias=BIAS, head_dim=256, num_kv_heads=16, tied=True, activation=GELU_TANH
    ),
    "gemma2": LlamaVariant(
        qkv_bias=BIAS,
        output_bias=BIAS,
        norms=GEMMA_NORMS,
        head_dim=256,
        num_kv_heads=4,
        tied=True,
        attention="eager",
        activation=GELU_TANH,
    ),
    "gemma3_text": LlamaVariant(
        qkv_bias=BIAS,
        output_bias=BIAS,
        qk_norm="head",
        norms=GEMMA_NORMS,
        head_dim=256,
        num_kv_heads=4,
        tied=True,
        activation=GELU_TANH,
    ),
    "mixtral": LlamaVariant(num_kv_heads=8, experts="mixtral"),
    "qwen2_moe": LlamaVariant(qkv_bias="qkv_bias", num_kv_heads=16, experts="qwen2_moe"),
    "qwen3_moe": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, qk_norm="head", num_kv_heads=4, experts="qwen3_moe"),
    "phi3": LlamaVariant(fused=True),
    "olmo": LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, norms=(), final_norm=False),
    "olmo2": LlamaVariant(
        qkv_bias=BIAS,
        output_bias=BIAS,
        qk_norm="full",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "stablelm": LlamaVariant(
        qkv_bias="use_qkv_bias",
        norm_parts=("weight", "bias"),
        num_kv_heads=32,
        unsupported_flags=("qk_layernorm", "use_parallel_residual"),
    ),
}


def llama_shape(model_type: str, fields: ConfigFields) -> ModelShape | None:
    """Return the shape of an architecture of `LLAMA_FAMILY`; None if the configuration has an unsupported option.

    Raises ToolkitError for a field that is missing or invalid.
    """
    variant = LLAMA_FAMILY[model_type]
    if any(fields.values.get(flag) for flag in variant.unsupported_flags):
        return None
    size = _dimensions(variant, fields)
    layers, experts = _layers(variant, fields, size)
    tied = fields.flag("tie_word_embeddings", default=variant.tied)
    final_norm = tuple(Tensor(name=f"model.norm.{part}", shape=(size.hidden,)) for part in variant.norm_parts)
    window, num_sliding = sliding_window(model_type, fields, num_layers=size.layers)
    return ModelShape(
        model_type=model_type,
        num_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=experts.width if experts else size.mlp,
        num_attention_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab,
        gated_mlp=True,
        tied_embeddings=tied,
        num_experts=experts.count if experts else None,
        experts_per_token=experts.per_token if experts else None,
        layers=layers,
        outer=(
            Tensor(name="model.embed_tokens.weight", shape=(size.vocab, size.hidden)),
            *(final_norm if variant.final_norm else ()),
            *(() if tied else (Tensor(name="lm_head.weight", shape=(size.vocab, size.hidden)),)),
        ),
        attention=variant.attention,
        activation=fields.text("hidden_act", "hidden_activation", default=variant.activation),
        sliding_window=window,
        num_sliding_layers=num_sliding,
    )


def _dimensions(variant: LlamaVariant, fields: ConfigFields) -> Dimensions:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    return Dimensions(
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size("intermediate_size", default=1) if variant.experts else fields.size("intermediate_size"),
        heads=heads,
        kv_heads=fields.kv_heads(heads, default=variant.num_kv_heads),
        head_dim=fields.head_dim(hidden, heads, default=variant.head_dim),
        vocab=fields.size("vocab_size"),
    )


def _layers(variant: LlamaVariant, fields: ConfigFields, size: Dimensions) -> tuple[tuple[Layer, ...], _Experts | None]:
    attention = _attention(variant, fields, size)
    norms = tuple(
        Tensor(name=f"{name}.{part}", shape=(size.hidden,)) for name in variant.norms for part in variant.norm_parts
    )
    dense = (*attention, *_mlp(variant, fields, size), *norms)
    if variant.experts is None:
        return (dense,) * size.layers, None
    experts = _Experts.read(variant.experts, fields, size)
    sparse = (*attention, *experts.tensors(size.hidden), *norms)
    return tuple(sparse if experts.is_sparse(index) else dense for index in range(size.layers)), experts


def _has_bias(fields: ConfigFields, option: str | bool) -> bool:
    if option == "qkv_bias":  # Qwen2-MoE's default is true
        return fields.flag(option, default=True)
    return option if isinstance(option, bool) else fields.flag(option)


def _attention(variant: LlamaVariant, fields: ConfigFields, size: Dimensions) -> Layer:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    output = linear("self_attn.o_proj", size.hidden, queries, bias=_has_bias(fields, variant.output_bias))
    if variant.fused:
        return (*output, *linear("self_attn.qkv_proj", queries + 2 * keys, size.hidden))
    bias = _has_bias(fields, variant.qkv_bias)
    projections = [
        tensor
        for name, rows in (("q", queries), ("k", keys), ("v", keys))
        for tensor in linear(f"self_attn.{name}_proj", rows, size.hidden, bias=bias)
    ]
    norm_widths = {"head": (size.head_dim,) * 2, "full": (queries, keys), None: ()}[variant.qk_norm]
    norms = [
        Tensor(name=f"self_attn.{name}_norm.weight", shape=(width,))
        for name, width in zip("qk", norm_widths, strict=False)
    ]
    return (*projections, *output, *norms)


def _mlp(variant: LlamaVariant, fields: ConfigFields, size: Dimensions) -> Layer:
    bias = _has_bias(fields, variant.mlp_bias)
    down = linear("mlp.down_proj", size.hidden, size.mlp, bias=bias)
    if variant.fused:
        return (*linear("mlp.gate_up_proj", 2 * size.mlp, size.hidden), *down)
    gate = linear("mlp.gate_proj", size.mlp, size.hidden, bias=bias)
    return (*gate, *linear("mlp.up_proj", size.mlp, size.hidden, bias=bias), *down)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """A mixture of experts, whose weights transformers 5 stores as one tensor for all experts of a layer."""

    kind: str
    count: int
    per_token: int
    width: int
    shared_width: int | None
    every: int
    dense_layers: frozenset[int]

    @classmethod
    def read(cls, kind: str, fields: ConfigFields, size: Dimensions) -> _Experts:
        experts = cls(
            kind=kind,
            count=fields.size("num_experts", "num_local_experts"),
            per_token=fields.size("num_experts_per_tok"),
            width=size.mlp if kind == "mixtral" else fields.size("moe_intermediate_size"),
            shared_width=fields.size("shared_expert_intermediate_size") if kind == "qwen2_moe" else None,
            every=fields.size("decoder_sparse_step", default=1),
            dense_layers=frozenset(fields.items("mlp_only_layers", int) or ()),
        )
        if experts.per_token > experts.count:
            raise ToolkitError(
                f"{fields.source}: num_experts_per_tok is {experts.per_token}, expected at most {experts.count} experts"
            )
        return experts

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.every == 0

    def tensors(self, hidden: int) -> Layer:
        """Router, experts, and the shared expert if there is one, in transformers' order."""
        router = Tensor(name=ROUTER, shape=(self.count, hidden))
        experts = (
            Tensor(name="mlp.experts.gate_up_proj", shape=(self.count, 2 * self.width, hidden)),
            Tensor(name="mlp.experts.down_proj", shape=(self.count, hidden, self.width)),
        )
        if self.kind == "qwen3_moe":
            return (*experts, router)
        if self.shared_width is None:
            return (router, *experts)
        return (
            router,
            *experts,
            *linear("mlp.shared_expert.gate_proj", self.shared_width, hidden),
            *linear("mlp.shared_expert.up_proj", self.shared_width, hidden),
            *linear("mlp.shared_expert.down_proj", hidden, self.shared_width),
            *linear("mlp.shared_expert_gate", 1, hidden),
        )


# Sliding windows. A row as long as the window needs a mask, and SDPA with a mask repeats keys and values for each head
# and saves a bf16 copy of the mask per layer (transformers 5.23, `masking_utils.py`, `integrations/sdpa_attention.py`).
# The rules below are those of transformers' configuration classes.
DEFAULT_WINDOW = 4096
WINDOW_BY_DEFAULT = ("mistral",)  # null switches it off
WINDOW_IF_SET = ("mixtral", "phi3")
WINDOW_IF_ENABLED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")  # `use_sliding_window`
FULL_LAYER_EVERY = {"gemma2": 2, "gemma3_text": 6}


def sliding_window(model_type: str, fields: ConfigFields, *, num_layers: int) -> tuple[int | None, int]:
    """Return the sliding window in tokens, or None, and the number of layers that use it.

    >>> sliding_window("mistral", ConfigFields({}, "config.json"), num_layers=32)
    (4096, 32)
    """
    if not _has_window(model_type, fields) or fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None, 0
    window = fields.size("sliding_window", default=DEFAULT_WINDOW)
    layer_types = fields.items("layer_types", str)
    if layer_types is not None:
        sliding = layer_types[:num_layers].count("sliding_attention")
    else:
        slides = _layer_rule(model_type, fields)
        sliding = sum(slides(index) for index in range(num_layers))
    return (window, sliding) if sliding else (None, 0)


def _has_window(model_type: str, fields: ConfigFields) -> bool:
    if model_type in WINDOW_IF_ENABLED:
        return fields.flag("use_sliding_window")
    is_set = model_type in WINDOW_IF_SET and fields.values.get("sliding_window") is not None
    return is_set or model_type in WINDOW_BY_DEFAULT or model_type in FULL_LAYER_EVERY


def _layer_rule(model_type: str, fields: ConfigFields) -> Callable[[int], bool]:
    """Predicate for the layers that slide, where the configuration does not list them."""
    if model_type in FULL_LAYER_EVERY:
        every = fields.size("sliding_window_pattern", default=FULL_LAYER_EVERY[model_type])
        return lambda index: (index + 1) % every != 0
    first_full = fields.size("max_window_layers", default=28)
    rules: dict[str, Callable[[int], bool]] = {
        "qwen2": lambda index: index >= first_full,
        "qwen3": lambda index: index >= first_full,
        "qwen2_moe": lambda index: (index + 1) % 2 == 1 and index < first_full,
        "smollm3": lambda index: (index + 1) % 4 == 0,
    }
    return rules.get(model_type, lambda _: True)

"""Tensors of decoders by formula. Those that follow Llama's layout are one line of differences each in `LLAMA_FAMILY`.

    >>> LLAMA_FAMILY["qwen3"].qk_norm
    'head'
    >>> fields = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> shape_from_config(ConfigFields(fields | {"model_type": "llama", "vocab_size": 10}, "config.json")).num_params
    1480
    >>> shape_from_config(ConfigFields({"model_type": "bert"}, "config.json")) is None
    True

`tests/models/test_read_model.py` compares every architecture with transformers, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import MISSING, ConfigFields
from toolkit.models.shape import ROUTER, Layer, ModelShape, Tensor, layer_norm, linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes that every decoder has."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaVariant:
    """Differences between one architecture and Llama."""

    qkv_bias: str | bool = False
    """True, False, or the configuration field that decides, as for the next two."""
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


BIAS = "attention_bias"
LLAMA = LlamaVariant(qkv_bias=BIAS, output_bias=BIAS, mlp_bias="mlp_bias")
ATTENTION_BIASES = replace(LLAMA, mlp_bias=False)
GEMMA = replace(ATTENTION_BIASES, head_dim=256, tied=True, activation="gelu_pytorch_tanh")
GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
QWEN3 = replace(ATTENTION_BIASES, qk_norm="head")
LLAMA_FAMILY = {
    "llama": LLAMA,
    "granite": LLAMA,
    "smollm3": replace(LLAMA, num_kv_heads=4, tied=True),
    "mistral": LlamaVariant(num_kv_heads=8),
    "qwen2": LlamaVariant(qkv_bias=True, num_kv_heads=32),
    "qwen3": replace(QWEN3, head_dim=128, num_kv_heads=32),
    "gemma": replace(GEMMA, num_kv_heads=16),
    "gemma2": replace(GEMMA, num_kv_heads=4, norms=GEMMA_NORMS, attention="eager"),
    "gemma3_text": replace(GEMMA, num_kv_heads=4, norms=GEMMA_NORMS, qk_norm="head"),
    "mixtral": LlamaVariant(num_kv_heads=8, experts="mixtral"),
    "qwen2_moe": LlamaVariant(qkv_bias="qkv_bias", num_kv_heads=16, experts="qwen2_moe"),
    "qwen3_moe": replace(QWEN3, num_kv_heads=4, experts="qwen3_moe"),
    "phi3": LlamaVariant(fused=True),
    "olmo": replace(ATTENTION_BIASES, norms=(), final_norm=False),
    "olmo2": replace(ATTENTION_BIASES, qk_norm="full", norms=(GEMMA_NORMS[1], GEMMA_NORMS[3])),
    "stablelm": LlamaVariant(
        qkv_bias="use_qkv_bias",
        norm_parts=("weight", "bias"),
        num_kv_heads=32,
        unsupported_flags=("qk_layernorm", "use_parallel_residual"),
    ),
}


def shape_from_config(fields: ConfigFields) -> ModelShape | None:
    """Return the shape by formula, or None for an architecture or option that has none.

    Raises ToolkitError for a field that is missing or invalid.
    """
    model_type = str(fields.values.get("model_type"))
    if model_type in LLAMA_FAMILY:
        return llama_shape(model_type, fields)
    other = OTHER_DECODERS.get(model_type)
    return None if other is None else other(fields)


def types_with_formulas() -> list[str]:
    """Return the model types that need no counting."""
    return sorted([*LLAMA_FAMILY, *OTHER_DECODERS])


def llama_shape(model_type: str, fields: ConfigFields) -> ModelShape | None:
    """Return the shape of an architecture of `LLAMA_FAMILY`; None if the configuration has an unsupported option.

    Raises ToolkitError for a field that is missing or invalid.
    """
    variant = LLAMA_FAMILY[model_type]
    if any(fields.values.get(flag) for flag in variant.unsupported_flags):
        return None
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    size = Dimensions(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", default=1 if variant.experts else MISSING),
        num_attention_heads=heads,
        num_kv_heads=fields.kv_heads(heads, default=variant.num_kv_heads),
        head_dim=fields.head_dim(hidden, heads, default=variant.head_dim),
        vocab_size=fields.size("vocab_size"),
    )
    attention = _attention(variant, fields, size)
    norms = tuple(
        Tensor(name=f"{name}.{part}", shape=(hidden,)) for name in variant.norms for part in variant.norm_parts
    )
    dense = (*attention, *_mlp(variant, fields, size), *norms)
    layers, experts = (dense,) * size.num_layers, None
    if variant.experts is not None:
        experts = _Experts.read(variant.experts, fields, size)
        sparse = (*attention, *experts.tensors(hidden), *norms)
        layers = tuple(sparse if experts.is_sparse(index) else dense for index in range(size.num_layers))
    tied = fields.flag("tie_word_embeddings", default=variant.tied)
    final_norm = tuple(Tensor(name=f"model.norm.{part}", shape=(hidden,)) for part in variant.norm_parts)
    window, num_sliding = sliding_window(model_type, fields, num_layers=size.num_layers)
    return ModelShape(
        model_type=model_type,
        **asdict(replace(size, intermediate_size=experts.width) if experts else size),
        gated_mlp=True,
        tied_embeddings=tied,
        num_experts=experts.count if experts else None,
        experts_per_token=experts.per_token if experts else None,
        layers=layers,
        outer=(
            Tensor(name="model.embed_tokens.weight", shape=(size.vocab_size, hidden)),
            *(final_norm if variant.final_norm else ()),
            *_head("lm_head", size, tied=tied),
        ),
        attention=variant.attention,
        activation=fields.text("hidden_act", "hidden_activation", default=variant.activation),
        sliding_window=window,
        num_sliding_layers=num_sliding,
    )


def _head(name: str, size: Dimensions, *, tied: bool) -> Layer:
    return () if tied else linear(name, size.vocab_size, size.hidden_size)


def _has_bias(fields: ConfigFields, option: str | bool) -> bool:
    if option == "qkv_bias":  # Qwen2-MoE's default is true
        return fields.flag(option, default=True)
    return option if isinstance(option, bool) else fields.flag(option)


def _attention(variant: LlamaVariant, fields: ConfigFields, size: Dimensions) -> Layer:
    queries, keys = size.num_attention_heads * size.head_dim, size.num_kv_heads * size.head_dim
    output = linear("self_attn.o_proj", size.hidden_size, queries, bias=_has_bias(fields, variant.output_bias))
    if variant.fused:
        return (*output, *linear("self_attn.qkv_proj", queries + 2 * keys, size.hidden_size))
    bias = _has_bias(fields, variant.qkv_bias)
    names = (("q", queries), ("k", keys), ("v", keys))
    projections = [
        part for name, rows in names for part in linear(f"self_attn.{name}_proj", rows, size.hidden_size, bias=bias)
    ]
    widths = {"head": (size.head_dim,) * 2, "full": (queries, keys), None: ()}[variant.qk_norm]
    norms = (
        Tensor(name=f"self_attn.{name}_norm.weight", shape=(width,)) for name, width in zip("qk", widths, strict=False)
    )
    return (*projections, *output, *norms)


def _mlp(variant: LlamaVariant, fields: ConfigFields, size: Dimensions) -> Layer:
    bias = _has_bias(fields, variant.mlp_bias)
    down = linear("mlp.down_proj", size.hidden_size, size.intermediate_size, bias=bias)
    if variant.fused:
        return (*linear("mlp.gate_up_proj", 2 * size.intermediate_size, size.hidden_size), *down)
    gate = linear("mlp.gate_proj", size.intermediate_size, size.hidden_size, bias=bias)
    return (*gate, *linear("mlp.up_proj", size.intermediate_size, size.hidden_size, bias=bias), *down)


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
            width=size.intermediate_size if kind == "mixtral" else fields.size("moe_intermediate_size"),
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
            *(router, *experts),
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
    if model_type in WINDOW_IF_ENABLED:
        has_window = fields.flag("use_sliding_window")
    else:
        is_set = model_type in WINDOW_IF_SET and fields.values.get("sliding_window") is not None
        has_window = is_set or model_type in WINDOW_BY_DEFAULT or model_type in FULL_LAYER_EVERY
    if not has_window or fields.values.get("sliding_window", DEFAULT_WINDOW) is None:
        return None, 0
    window = fields.size("sliding_window", default=DEFAULT_WINDOW)
    layer_types = fields.items("layer_types", str)
    if layer_types is not None:
        sliding = layer_types[:num_layers].count("sliding_attention")
    else:
        slides = _layer_rule(model_type, fields)
        sliding = sum(slides(index) for index in range(num_layers))
    return (window, sliding) if sliding else (None, 0)


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


def _plain_shape(
    model_type: str, size: Dimensions, layer: Layer, outer: Layer, *, tied: bool, activation: str, dropout: float
) -> ModelShape:
    """Shape of a model with identical layers, no gates and no experts."""
    return ModelShape(
        model_type=model_type,
        **asdict(size),
        gated_mlp=False,
        tied_embeddings=tied,
        layers=(layer,) * size.num_layers,
        outer=outer,
        activation=activation,
        dropout=dropout > 0,
    )


def _plain_dimensions(
    fields: ConfigFields, mlp: str, *, kv: bool = False, mlp_default: int | None = None
) -> Dimensions:
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    return Dimensions(
        num_layers=fields.size("n_layer", "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.size(mlp, default=MISSING if mlp_default is None else mlp_default * hidden),
        num_attention_heads=heads,
        num_kv_heads=fields.kv_heads(heads) if kv else heads,
        head_dim=ConfigFields({}, fields.source).head_dim(hidden, heads),
        vocab_size=fields.size("vocab_size"),
    )


def _conv1d(name: str, rows: int, columns: int) -> Layer:
    """GPT-2's linear layer, stored transposed: (in, out)."""
    return (Tensor(name=f"{name}.weight", shape=(rows, columns)), Tensor(name=f"{name}.bias", shape=(columns,)))


def _gpt2(fields: ConfigFields) -> ModelShape | None:
    size = _plain_dimensions(fields, "n_inner", mlp_default=4)
    hidden = size.hidden_size
    layer = (
        *layer_norm("ln_1", hidden),
        *_conv1d("attn.c_attn", hidden, 3 * hidden),
        *_conv1d("attn.c_proj", hidden, hidden),
        *layer_norm("ln_2", hidden),
        *_conv1d("mlp.c_fc", hidden, size.intermediate_size),
        *_conv1d("mlp.c_proj", size.intermediate_size, hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("n_positions", "max_position_embeddings")
    outer = (
        Tensor(name="transformer.wte.weight", shape=(size.vocab_size, hidden)),
        Tensor(name="transformer.wpe.weight", shape=(positions, hidden)),
        *layer_norm("transformer.ln_f", hidden),
        *_head("lm_head", size, tied=tied),
    )
    activation = fields.text("activation_function", default="gelu_new")
    dropout = fields.fraction("resid_pdrop", default=0.1)
    return _plain_shape("gpt2", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _phi(fields: ConfigFields) -> ModelShape | None:
    if fields.values.get("qk_layernorm"):
        return None
    size = _plain_dimensions(fields, "intermediate_size", kv=True)
    hidden, keys = size.hidden_size, size.num_kv_heads * size.head_dim
    projections = (("q", hidden), ("k", keys), ("v", keys))
    layer = (
        *(part for name, rows in projections for part in linear(f"self_attn.{name}_proj", rows, hidden, bias=True)),
        *linear("self_attn.dense", hidden, hidden, bias=True),
        *linear("mlp.fc1", size.intermediate_size, hidden, bias=True),
        *linear("mlp.fc2", hidden, size.intermediate_size, bias=True),
        *layer_norm("input_layernorm", hidden),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="model.embed_tokens.weight", shape=(size.vocab_size, hidden))
    head = linear("lm_head", size.vocab_size, hidden, bias=True)
    outer = (embedding, *layer_norm("model.final_layernorm", hidden), *(head[1:] if tied else head))
    activation = fields.text("hidden_act", default="gelu_new")
    dropout = fields.fraction("resid_pdrop", default=0.0)
    return _plain_shape("phi", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _gpt_neox(fields: ConfigFields) -> ModelShape | None:
    size = _plain_dimensions(fields, "intermediate_size")
    hidden, bias = size.hidden_size, fields.flag("attention_bias", default=True)
    layer = (
        *layer_norm("input_layernorm", hidden),
        *layer_norm("post_attention_layernorm", hidden),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *linear("attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", size.intermediate_size, hidden, bias=True),
        *linear("mlp.dense_4h_to_h", hidden, size.intermediate_size, bias=True),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="gpt_neox.embed_in.weight", shape=(size.vocab_size, hidden))
    outer = (embedding, *layer_norm("gpt_neox.final_layer_norm", hidden), *_head("lm_head", size, tied=tied))
    activation = fields.text("hidden_act", default="gelu")
    dropout = fields.fraction("hidden_dropout", default=0.0)
    return _plain_shape("gpt_neox", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _opt(fields: ConfigFields) -> ModelShape | None:
    """The layout of 125M and of 1.3B and above: pre-norm, one width, biases; None for the others."""
    size = _plain_dimensions(fields, "ffn_dim")
    hidden, required = size.hidden_size, ("enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine")
    one_width = fields.size("word_embed_proj_dim", default=hidden) == hidden
    if not one_width or not all(fields.flag(name, default=True) for name in required):
        return None
    if fields.values.get("_remove_final_layer_norm"):
        return None
    layer = (
        *(part for name in "kvq" for part in linear(f"self_attn.{name}_proj", hidden, hidden, bias=True)),
        *linear("self_attn.out_proj", hidden, hidden, bias=True),
        *layer_norm("self_attn_layer_norm", hidden),
        *linear("fc1", size.intermediate_size, hidden, bias=True),
        *linear("fc2", hidden, size.intermediate_size, bias=True),
        *layer_norm("final_layer_norm", hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("max_position_embeddings") + OPT_POSITION_ROWS
    outer = (
        Tensor(name="model.decoder.embed_tokens.weight", shape=(size.vocab_size, hidden)),
        Tensor(name="model.decoder.embed_positions.weight", shape=(positions, hidden)),
        *layer_norm("model.decoder.final_layer_norm", hidden),
        *_head("lm_head", size, tied=tied),
    )
    activation = fields.text("activation_function", default="relu")
    dropout = fields.fraction("dropout", default=0.1)
    return _plain_shape("opt", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


OPT_POSITION_ROWS = 2  # OPT's position embedding starts after the padding index
OTHER_DECODERS = {"gpt2": _gpt2, "phi": _phi, "gpt_neox": _gpt_neox, "opt": _opt}

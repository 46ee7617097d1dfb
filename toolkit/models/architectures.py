"""The tensors of each architecture that arithmetic knows, in the order in which transformers 5 makes them.

    >>> shape_of(Fields({"model_type": "bert"}, "config.json")) is None
    True

Held against transformers on the meta device, name by name, in `tests/test_models.py`. What is not here, or has an
option that is not here, is counted on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.models.fields import Fields
from toolkit.models.shape import Layer, ModelShape, Tensor

OPT_POSITION_ROWS = 2  # OPT's position table starts at the padding index + 1


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


def shape_of(fields: Fields) -> ModelShape | None:
    """The shape, or None where arithmetic does not know the architecture.

    Raises ToolkitError for a field that is missing or makes no sense.
    """
    model_type = str(fields.values.get("model_type"))
    if model_type in LLAMA_LIKE:
        family = LLAMA_LIKE[model_type]
        if any(fields.values.get(flag) for flag in family.unknown_flags):
            return None
        return _llama_like(model_type, family, fields)
    other = OTHERS.get(model_type)
    return other(fields) if other is not None else None


def known_types() -> list[str]:
    """Model types that arithmetic knows."""
    return sorted([*LLAMA_LIKE, *OTHERS])


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """What every architecture has."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def _llama_like(model_type: str, family: Family, fields: Fields) -> ModelShape:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    widths = Widths(
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size("intermediate_size", default=1) if family.experts else fields.size("intermediate_size"),
        heads=heads,
        kv_heads=_kv_heads(fields, heads, family.num_kv_heads),
        head_dim=_head_dim(fields, hidden, heads, family.head_dim),
        vocab=fields.size("vocab_size"),
    )
    attention = _attention(family, fields, widths)
    norms = tuple(Tensor(name=f"{name}.{part}", shape=(hidden,)) for name in family.norms for part in family.norm_parts)
    dense = (*attention, *_mlp("mlp", family, fields, hidden, widths.mlp), *norms)
    layers: tuple[Layer, ...] = (dense,) * widths.layers
    experts = _Experts.of(family, fields, widths) if family.experts else None
    if experts is not None:
        sparse = (*attention, *experts.tensors(hidden), *norms)
        layers = tuple(sparse if experts.is_sparse(index) else dense for index in range(widths.layers))
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    final = tuple(Tensor(name=f"model.norm.{part}", shape=(hidden,)) for part in family.norm_parts)
    return ModelShape(
        model_type=model_type,
        num_layers=widths.layers,
        hidden_size=hidden,
        intermediate_size=experts.width if experts else widths.mlp,
        num_attention_heads=heads,
        num_kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        vocab_size=widths.vocab,
        gated_mlp=True,
        tied_embeddings=tied,
        num_experts=experts.count if experts else None,
        experts_per_token=experts.per_token if experts else None,
        layers=layers,
        outer=(
            Tensor(name="model.embed_tokens.weight", shape=(widths.vocab, hidden)),
            *(final if family.final_norm else ()),
            *(() if tied else (Tensor(name="lm_head.weight", shape=(widths.vocab, hidden)),)),
        ),
        attention=family.attention,
        activation=fields.word("hidden_act", "hidden_activation", default=family.activation),
    )


def _kv_heads(fields: Fields, heads: int, default: int | None) -> int:
    kv_heads = fields.size("num_key_value_heads", default=default or heads)
    if heads % kv_heads:
        raise ToolkitError(f"{fields.where}: num_key_value_heads is {kv_heads}, expected a divisor of {heads} heads")
    return kv_heads


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if fields.values.get("head_dim") is None and default is None and hidden % heads:
        raise ToolkitError(f"{fields.where}: hidden_size {hidden} is not a multiple of {heads} num_attention_heads")
    return fields.size("head_dim", default=default or hidden // heads)


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Layer:
    weight = Tensor(name=f"{name}.weight", shape=(rows, columns))
    return (weight, Tensor(name=f"{name}.bias", shape=(rows,))) if bias else (weight,)


def _has(fields: Fields, option: str | bool) -> bool:
    if option == "qkv_bias":  # Qwen2-MoE's default
        return fields.flag(option, default=True)
    return option if isinstance(option, bool) else fields.flag(option)


def _attention(family: Family, fields: Fields, widths: Widths) -> Layer:
    queries, keys = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    output = _linear("self_attn.o_proj", widths.hidden, queries, bias=_has(fields, family.output_bias))
    if family.fused:
        return (*output, *_linear("self_attn.qkv_proj", queries + 2 * keys, widths.hidden))
    bias = _has(fields, family.qkv_bias)
    projections = zip(("q", "k", "v"), (queries, keys, keys), strict=True)
    split = [
        part for name, rows in projections for part in _linear(f"self_attn.{name}_proj", rows, widths.hidden, bias=bias)
    ]
    norm_widths = {"head": (widths.head_dim,) * 2, "full": (queries, keys), None: ()}[family.qk_norm]
    norms = [
        Tensor(name=f"self_attn.{name}_norm.weight", shape=(width,))
        for name, width in zip("qk", norm_widths, strict=False)
    ]
    return (*split, *output, *norms)


def _mlp(name: str, family: Family, fields: Fields, hidden: int, width: int) -> Layer:
    bias = _has(fields, family.mlp_bias)
    down = _linear(f"{name}.down_proj", hidden, width, bias=bias)
    if family.fused:
        return (*_linear(f"{name}.gate_up_proj", 2 * width, hidden), *down)
    gate_and_up = [part for half in ("gate", "up") for part in _linear(f"{name}.{half}_proj", width, hidden, bias=bias)]
    return (*gate_and_up, *down)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """A mixture of experts, whose weights transformers 5 keeps as one tensor for all experts of a layer."""

    kind: str
    count: int
    per_token: int
    width: int
    shared_width: int | None
    every: int
    dense_layers: frozenset[int]

    @classmethod
    def of(cls, family: Family, fields: Fields, widths: Widths) -> _Experts:
        assert family.experts is not None
        own_width = family.experts != "mixtral"
        shared = fields.size("shared_expert_intermediate_size") if family.experts == "qwen2_moe" else None
        experts = cls(
            kind=family.experts,
            count=fields.size("num_experts", "num_local_experts"),
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size("moe_intermediate_size") if own_width else widths.mlp,
            shared_width=shared,
            every=fields.size("decoder_sparse_step", default=1),
            dense_layers=frozenset(fields.values.get("mlp_only_layers") or ()),
        )
        if experts.per_token > experts.count:
            raise ToolkitError(
                f"{fields.where}: num_experts_per_tok is {experts.per_token}, expected at most {experts.count} experts"
            )
        return experts

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer is a mixture; the others are dense."""
        return layer not in self.dense_layers and (layer + 1) % self.every == 0

    def tensors(self, hidden: int) -> Layer:
        """Router, experts, and what all tokens share."""
        router = Tensor(name="mlp.gate.weight", shape=(self.count, hidden))
        experts = (
            Tensor(name="mlp.experts.gate_up_proj", shape=(self.count, 2 * self.width, hidden)),
            Tensor(name="mlp.experts.down_proj", shape=(self.count, hidden, self.width)),
        )
        if self.kind == "qwen3_moe":
            return (*experts, router)
        if self.shared_width is None:
            return (router, *experts)
        halves = [
            part
            for half in ("gate", "up")
            for part in _linear(f"mlp.shared_expert.{half}_proj", self.shared_width, hidden)
        ]
        down = _linear("mlp.shared_expert.down_proj", hidden, self.shared_width)
        return (router, *experts, *halves, *down, *_linear("mlp.shared_expert_gate", 1, hidden))


def _norm(name: str, width: int) -> Layer:
    return (Tensor(name=f"{name}.weight", shape=(width,)), Tensor(name=f"{name}.bias", shape=(width,)))


def _plain(model_type: str, widths: Widths, layer: Layer, outer: Layer, *, tied: bool, activation: str) -> ModelShape:
    """A shape without gates, experts or other layers."""
    return ModelShape(
        model_type=model_type,
        num_layers=widths.layers,
        hidden_size=widths.hidden,
        intermediate_size=widths.mlp,
        num_attention_heads=widths.heads,
        num_kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        vocab_size=widths.vocab,
        gated_mlp=False,
        tied_embeddings=tied,
        layers=(layer,) * widths.layers,
        outer=outer,
        activation=activation,
    )


def _widths(fields: Fields, *mlp: str, kv: bool = False, mlp_default: int | None = None) -> Widths:
    hidden = fields.size("n_embd", "hidden_size")
    heads = fields.size("n_head", "num_attention_heads")
    return Widths(
        layers=fields.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size(*mlp) if mlp_default is None else fields.size(*mlp, default=mlp_default * hidden),
        heads=heads,
        kv_heads=_kv_heads(fields, heads, None) if kv else heads,
        head_dim=_head_dim(Fields({}, fields.where), hidden, heads, None),
        vocab=fields.size("vocab_size"),
    )


def _head(name: str, widths: Widths, *, tied: bool, bias: bool = False) -> Layer:
    return () if tied else _linear(name, widths.vocab, widths.hidden, bias=bias)


def _conv1d(name: str, rows: int, columns: int) -> Layer:
    """GPT-2's linear layer, stored transposed: (in, out)."""
    return (Tensor(name=f"{name}.weight", shape=(rows, columns)), Tensor(name=f"{name}.bias", shape=(columns,)))


def _gpt2(fields: Fields) -> ModelShape:
    widths = _widths(fields, "n_inner", mlp_default=4)
    hidden = widths.hidden
    layer = (
        *_norm("ln_1", hidden),
        *_conv1d("attn.c_attn", hidden, 3 * hidden),
        *_conv1d("attn.c_proj", hidden, hidden),
        *_norm("ln_2", hidden),
        *_conv1d("mlp.c_fc", hidden, widths.mlp),
        *_conv1d("mlp.c_proj", widths.mlp, hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("n_positions", "max_position_embeddings")
    outer = (
        Tensor(name="transformer.wte.weight", shape=(widths.vocab, hidden)),
        Tensor(name="transformer.wpe.weight", shape=(positions, hidden)),
        *_norm("transformer.ln_f", hidden),
        *_head("lm_head", widths, tied=tied),
    )
    activation = fields.word("activation_function", default="gelu_new")
    return _plain("gpt2", widths, layer, outer, tied=tied, activation=activation)


def _phi(fields: Fields) -> ModelShape | None:
    if fields.values.get("qk_layernorm"):
        return None
    widths = _widths(fields, "intermediate_size", kv=True)
    hidden, keys = widths.hidden, widths.kv_heads * widths.head_dim
    projections = zip(("q", "k", "v"), (hidden, keys, keys), strict=True)
    layer = (
        *(part for name, rows in projections for part in _linear(f"self_attn.{name}_proj", rows, hidden, bias=True)),
        *_linear("self_attn.dense", hidden, hidden, bias=True),
        *_linear("mlp.fc1", widths.mlp, hidden, bias=True),
        *_linear("mlp.fc2", hidden, widths.mlp, bias=True),
        *_norm("input_layernorm", hidden),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="model.embed_tokens.weight", shape=(widths.vocab, hidden))
    head = _head("lm_head", widths, tied=False, bias=True)
    outer = (embedding, *_norm("model.final_layernorm", hidden), *(head[1:] if tied else head))
    activation = fields.word("hidden_act", default="gelu_new")
    return _plain("phi", widths, layer, outer, tied=tied, activation=activation)


def _gpt_neox(fields: Fields) -> ModelShape:
    widths = _widths(fields, "intermediate_size")
    hidden, bias = widths.hidden, fields.flag("attention_bias", default=True)
    layer = (
        *_norm("input_layernorm", hidden),
        *_norm("post_attention_layernorm", hidden),
        *_linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *_linear("attention.dense", hidden, hidden, bias=bias),
        *_linear("mlp.dense_h_to_4h", widths.mlp, hidden, bias=True),
        *_linear("mlp.dense_4h_to_h", hidden, widths.mlp, bias=True),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="gpt_neox.embed_in.weight", shape=(widths.vocab, hidden))
    outer = (embedding, *_norm("gpt_neox.final_layer_norm", hidden), *_head("lm_head", widths, tied=tied))
    activation = fields.word("hidden_act", default="gelu")
    return _plain("gpt_neox", widths, layer, outer, tied=tied, activation=activation)


def _opt(fields: Fields) -> ModelShape | None:
    """Only the layout of the models from 125M, 1.3B and up: norms before, one width, biases."""
    widths = _widths(fields, "ffn_dim")
    hidden = widths.hidden
    usual = fields.size("word_embed_proj_dim", default=hidden) == hidden and fields.flag("enable_bias", default=True)
    usual = usual and fields.flag("do_layer_norm_before", default=True)
    usual = usual and fields.flag("layer_norm_elementwise_affine", default=True)
    if not usual or fields.values.get("_remove_final_layer_norm"):
        return None
    layer = (
        *(part for name in "kvq" for part in _linear(f"self_attn.{name}_proj", hidden, hidden, bias=True)),
        *_linear("self_attn.out_proj", hidden, hidden, bias=True),
        *_norm("self_attn_layer_norm", hidden),
        *_linear("fc1", widths.mlp, hidden, bias=True),
        *_linear("fc2", hidden, widths.mlp, bias=True),
        *_norm("final_layer_norm", hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("max_position_embeddings") + OPT_POSITION_ROWS
    outer = (
        Tensor(name="model.decoder.embed_tokens.weight", shape=(widths.vocab, hidden)),
        Tensor(name="model.decoder.embed_positions.weight", shape=(positions, hidden)),
        *_norm("model.decoder.final_layer_norm", hidden),
        *_head("lm_head", widths, tied=tied),
    )
    activation = fields.word("activation_function", default="relu")
    return _plain("opt", widths, layer, outer, tied=tied, activation=activation)


OTHERS: dict[str, Callable[[Fields], ModelShape | None]] = {
    "gpt2": _gpt2,
    "phi": _phi,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}

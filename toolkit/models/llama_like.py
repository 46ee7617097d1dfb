"""The tensors of an architecture of Llama's build, out of its family and its configuration.

>>> llama_like("qwen3", LLAMA_LIKE["qwen3"], Fields(config, "config.json")).num_params
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.models.families import Family
from toolkit.models.fields import Fields
from toolkit.models.pieces import Widths, head_dim_of, kv_heads_of, linear
from toolkit.models.shape import Layer, ModelShape, Tensor
from toolkit.models.windows import window_of


def llama_like(model_type: str, family: Family, fields: Fields) -> ModelShape:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    widths = Widths(
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size("intermediate_size", default=1) if family.experts else fields.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads_of(fields, heads, family.num_kv_heads),
        head_dim=head_dim_of(fields, hidden, heads, family.head_dim),
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
    window, sliding = window_of(model_type, fields, layers=widths.layers)
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
        sliding_window=window,
        num_sliding_layers=sliding,
    )


def _has(fields: Fields, option: str | bool) -> bool:
    if option == "qkv_bias":  # Qwen2-MoE's default
        return fields.flag(option, default=True)
    return option if isinstance(option, bool) else fields.flag(option)


def _attention(family: Family, fields: Fields, widths: Widths) -> Layer:
    queries, keys = widths.heads * widths.head_dim, widths.kv_heads * widths.head_dim
    output = linear("self_attn.o_proj", widths.hidden, queries, bias=_has(fields, family.output_bias))
    if family.fused:
        return (*output, *linear("self_attn.qkv_proj", queries + 2 * keys, widths.hidden))
    bias = _has(fields, family.qkv_bias)
    projections = zip(("q", "k", "v"), (queries, keys, keys), strict=True)
    split = [
        part for name, rows in projections for part in linear(f"self_attn.{name}_proj", rows, widths.hidden, bias=bias)
    ]
    norm_widths = {"head": (widths.head_dim,) * 2, "full": (queries, keys), None: ()}[family.qk_norm]
    norms = [
        Tensor(name=f"self_attn.{name}_norm.weight", shape=(width,))
        for name, width in zip("qk", norm_widths, strict=False)
    ]
    return (*split, *output, *norms)


def _mlp(name: str, family: Family, fields: Fields, hidden: int, width: int) -> Layer:
    bias = _has(fields, family.mlp_bias)
    down = linear(f"{name}.down_proj", hidden, width, bias=bias)
    if family.fused:
        return (*linear(f"{name}.gate_up_proj", 2 * width, hidden), *down)
    gate_and_up = [part for half in ("gate", "up") for part in linear(f"{name}.{half}_proj", width, hidden, bias=bias)]
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
            for part in linear(f"mlp.shared_expert.{half}_proj", self.shared_width, hidden)
        ]
        down = linear("mlp.shared_expert.down_proj", hidden, self.shared_width)
        return (router, *experts, *halves, *down, *linear("mlp.shared_expert_gate", 1, hidden))

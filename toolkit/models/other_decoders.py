"""The tensors of decoders that are not of Llama's build: GPT-2, GPT-NeoX, OPT, Phi.

>>> sorted(OTHERS)
['gpt2', 'gpt_neox', 'opt', 'phi']
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.models.fields import Fields
from toolkit.models.pieces import Widths, head_dim_of, kv_heads_of, linear, norm
from toolkit.models.shape import Layer, ModelShape, Tensor

OPT_POSITION_ROWS = 2  # OPT's position table starts at the padding index + 1


def _plain(
    model_type: str, widths: Widths, layer: Layer, outer: Layer, *, tied: bool, activation: str, dropout: bool = False
) -> ModelShape:
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
        dropout=dropout,
    )


def _widths(fields: Fields, *mlp: str, kv: bool = False, mlp_default: int | None = None) -> Widths:
    hidden = fields.size("n_embd", "hidden_size")
    heads = fields.size("n_head", "num_attention_heads")
    return Widths(
        layers=fields.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size(*mlp) if mlp_default is None else fields.size(*mlp, default=mlp_default * hidden),
        heads=heads,
        kv_heads=kv_heads_of(fields, heads, None) if kv else heads,
        head_dim=head_dim_of(Fields({}, fields.where), hidden, heads, None),
        vocab=fields.size("vocab_size"),
    )


def _head(name: str, widths: Widths, *, tied: bool, bias: bool = False) -> Layer:
    return () if tied else linear(name, widths.vocab, widths.hidden, bias=bias)


def _conv1d(name: str, rows: int, columns: int) -> Layer:
    """GPT-2's linear layer, stored transposed: (in, out)."""
    return (Tensor(name=f"{name}.weight", shape=(rows, columns)), Tensor(name=f"{name}.bias", shape=(columns,)))


def _gpt2(fields: Fields) -> ModelShape:
    widths = _widths(fields, "n_inner", mlp_default=4)
    hidden = widths.hidden
    layer = (
        *norm("ln_1", hidden),
        *_conv1d("attn.c_attn", hidden, 3 * hidden),
        *_conv1d("attn.c_proj", hidden, hidden),
        *norm("ln_2", hidden),
        *_conv1d("mlp.c_fc", hidden, widths.mlp),
        *_conv1d("mlp.c_proj", widths.mlp, hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("n_positions", "max_position_embeddings")
    outer = (
        Tensor(name="transformer.wte.weight", shape=(widths.vocab, hidden)),
        Tensor(name="transformer.wpe.weight", shape=(positions, hidden)),
        *norm("transformer.ln_f", hidden),
        *_head("lm_head", widths, tied=tied),
    )
    activation = fields.word("activation_function", default="gelu_new")
    dropout = fields.share("resid_pdrop", default=0.1) > 0
    return _plain("gpt2", widths, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _phi(fields: Fields) -> ModelShape | None:
    if fields.values.get("qk_layernorm"):
        return None
    widths = _widths(fields, "intermediate_size", kv=True)
    hidden, keys = widths.hidden, widths.kv_heads * widths.head_dim
    projections = zip(("q", "k", "v"), (hidden, keys, keys), strict=True)
    layer = (
        *(part for name, rows in projections for part in linear(f"self_attn.{name}_proj", rows, hidden, bias=True)),
        *linear("self_attn.dense", hidden, hidden, bias=True),
        *linear("mlp.fc1", widths.mlp, hidden, bias=True),
        *linear("mlp.fc2", hidden, widths.mlp, bias=True),
        *norm("input_layernorm", hidden),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="model.embed_tokens.weight", shape=(widths.vocab, hidden))
    head = _head("lm_head", widths, tied=False, bias=True)
    outer = (embedding, *norm("model.final_layernorm", hidden), *(head[1:] if tied else head))
    activation = fields.word("hidden_act", default="gelu_new")
    dropout = fields.share("resid_pdrop", default=0.0) > 0
    return _plain("phi", widths, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _gpt_neox(fields: Fields) -> ModelShape:
    widths = _widths(fields, "intermediate_size")
    hidden, bias = widths.hidden, fields.flag("attention_bias", default=True)
    layer = (
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *linear("attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", widths.mlp, hidden, bias=True),
        *linear("mlp.dense_4h_to_h", hidden, widths.mlp, bias=True),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="gpt_neox.embed_in.weight", shape=(widths.vocab, hidden))
    outer = (embedding, *norm("gpt_neox.final_layer_norm", hidden), *_head("lm_head", widths, tied=tied))
    activation = fields.word("hidden_act", default="gelu")
    dropout = fields.share("hidden_dropout", default=0.0) > 0
    return _plain("gpt_neox", widths, layer, outer, tied=tied, activation=activation, dropout=dropout)


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
        *(part for name in "kvq" for part in linear(f"self_attn.{name}_proj", hidden, hidden, bias=True)),
        *linear("self_attn.out_proj", hidden, hidden, bias=True),
        *norm("self_attn_layer_norm", hidden),
        *linear("fc1", widths.mlp, hidden, bias=True),
        *linear("fc2", hidden, widths.mlp, bias=True),
        *norm("final_layer_norm", hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("max_position_embeddings") + OPT_POSITION_ROWS
    outer = (
        Tensor(name="model.decoder.embed_tokens.weight", shape=(widths.vocab, hidden)),
        Tensor(name="model.decoder.embed_positions.weight", shape=(positions, hidden)),
        *norm("model.decoder.final_layer_norm", hidden),
        *_head("lm_head", widths, tied=tied),
    )
    activation = fields.word("activation_function", default="relu")
    dropout = fields.share("dropout", default=0.1) > 0
    return _plain("opt", widths, layer, outer, tied=tied, activation=activation, dropout=dropout)


OTHERS: dict[str, Callable[[Fields], ModelShape | None]] = {
    "gpt2": _gpt2,
    "phi": _phi,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}

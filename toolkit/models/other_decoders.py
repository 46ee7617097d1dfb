"""Tensors of decoders that do not follow Llama's layout: GPT-2, GPT-NeoX, OPT, Phi.

>>> sorted(OTHER_DECODERS)
['gpt2', 'gpt_neox', 'opt', 'phi']
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.models.config_fields import ConfigFields, Dimensions
from toolkit.models.shape import Layer, ModelShape, Tensor, layer_norm, linear

OPT_POSITION_ROWS = 2  # OPT's position embedding starts after the padding index


def _uniform_shape(
    model_type: str, size: Dimensions, layer: Layer, outer: Layer, *, tied: bool, activation: str, dropout: bool = False
) -> ModelShape:
    """Shape of a model with identical layers, no gates and no experts."""
    return ModelShape(
        model_type=model_type,
        num_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_attention_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab,
        gated_mlp=False,
        tied_embeddings=tied,
        layers=(layer,) * size.layers,
        outer=outer,
        activation=activation,
        dropout=dropout,
    )


def _dimensions(fields: ConfigFields, *mlp: str, kv: bool = False, mlp_default: int | None = None) -> Dimensions:
    hidden = fields.size("n_embd", "hidden_size")
    heads = fields.size("n_head", "num_attention_heads")
    return Dimensions(
        layers=fields.size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        mlp=fields.size(*mlp) if mlp_default is None else fields.size(*mlp, default=mlp_default * hidden),
        heads=heads,
        kv_heads=fields.kv_heads(heads) if kv else heads,
        head_dim=ConfigFields({}, fields.source).head_dim(hidden, heads),
        vocab=fields.size("vocab_size"),
    )


def _head(name: str, size: Dimensions, *, tied: bool, bias: bool = False) -> Layer:
    return () if tied else linear(name, size.vocab, size.hidden, bias=bias)


def _conv1d(name: str, rows: int, columns: int) -> Layer:
    """GPT-2's linear layer, stored transposed: (in, out)."""
    return (Tensor(name=f"{name}.weight", shape=(rows, columns)), Tensor(name=f"{name}.bias", shape=(columns,)))


def _gpt2(fields: ConfigFields) -> ModelShape:
    size = _dimensions(fields, "n_inner", mlp_default=4)
    hidden = size.hidden
    layer = (
        *layer_norm("ln_1", hidden),
        *_conv1d("attn.c_attn", hidden, 3 * hidden),
        *_conv1d("attn.c_proj", hidden, hidden),
        *layer_norm("ln_2", hidden),
        *_conv1d("mlp.c_fc", hidden, size.mlp),
        *_conv1d("mlp.c_proj", size.mlp, hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("n_positions", "max_position_embeddings")
    outer = (
        Tensor(name="transformer.wte.weight", shape=(size.vocab, hidden)),
        Tensor(name="transformer.wpe.weight", shape=(positions, hidden)),
        *layer_norm("transformer.ln_f", hidden),
        *_head("lm_head", size, tied=tied),
    )
    activation = fields.text("activation_function", default="gelu_new")
    dropout = fields.fraction("resid_pdrop", default=0.1) > 0
    return _uniform_shape("gpt2", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _phi(fields: ConfigFields) -> ModelShape | None:
    if fields.values.get("qk_layernorm"):
        return None
    size = _dimensions(fields, "intermediate_size", kv=True)
    hidden, keys = size.hidden, size.kv_heads * size.head_dim
    projections = zip(("q", "k", "v"), (hidden, keys, keys), strict=True)
    layer = (
        *(part for name, rows in projections for part in linear(f"self_attn.{name}_proj", rows, hidden, bias=True)),
        *linear("self_attn.dense", hidden, hidden, bias=True),
        *linear("mlp.fc1", size.mlp, hidden, bias=True),
        *linear("mlp.fc2", hidden, size.mlp, bias=True),
        *layer_norm("input_layernorm", hidden),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="model.embed_tokens.weight", shape=(size.vocab, hidden))
    head = _head("lm_head", size, tied=False, bias=True)
    outer = (embedding, *layer_norm("model.final_layernorm", hidden), *(head[1:] if tied else head))
    activation = fields.text("hidden_act", default="gelu_new")
    dropout = fields.fraction("resid_pdrop", default=0.0) > 0
    return _uniform_shape("phi", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _gpt_neox(fields: ConfigFields) -> ModelShape:
    size = _dimensions(fields, "intermediate_size")
    hidden, bias = size.hidden, fields.flag("attention_bias", default=True)
    layer = (
        *layer_norm("input_layernorm", hidden),
        *layer_norm("post_attention_layernorm", hidden),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *linear("attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", size.mlp, hidden, bias=True),
        *linear("mlp.dense_4h_to_h", hidden, size.mlp, bias=True),
    )
    tied = fields.flag("tie_word_embeddings")
    embedding = Tensor(name="gpt_neox.embed_in.weight", shape=(size.vocab, hidden))
    outer = (embedding, *layer_norm("gpt_neox.final_layer_norm", hidden), *_head("lm_head", size, tied=tied))
    activation = fields.text("hidden_act", default="gelu")
    dropout = fields.fraction("hidden_dropout", default=0.0) > 0
    return _uniform_shape("gpt_neox", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


def _opt(fields: ConfigFields) -> ModelShape | None:
    """The layout of 125M and of 1.3B and above: pre-norm, one width, biases; None for the others."""
    size = _dimensions(fields, "ffn_dim")
    hidden = size.hidden
    required = ("enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine")
    one_width = fields.size("word_embed_proj_dim", default=hidden) == hidden
    if not one_width or not all(fields.flag(name, default=True) for name in required):
        return None
    if fields.values.get("_remove_final_layer_norm"):
        return None
    layer = (
        *(part for name in "kvq" for part in linear(f"self_attn.{name}_proj", hidden, hidden, bias=True)),
        *linear("self_attn.out_proj", hidden, hidden, bias=True),
        *layer_norm("self_attn_layer_norm", hidden),
        *linear("fc1", size.mlp, hidden, bias=True),
        *linear("fc2", hidden, size.mlp, bias=True),
        *layer_norm("final_layer_norm", hidden),
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    positions = fields.size("max_position_embeddings") + OPT_POSITION_ROWS
    outer = (
        Tensor(name="model.decoder.embed_tokens.weight", shape=(size.vocab, hidden)),
        Tensor(name="model.decoder.embed_positions.weight", shape=(positions, hidden)),
        *layer_norm("model.decoder.final_layer_norm", hidden),
        *_head("lm_head", size, tied=tied),
    )
    activation = fields.text("activation_function", default="relu")
    dropout = fields.fraction("dropout", default=0.1) > 0
    return _uniform_shape("opt", size, layer, outer, tied=tied, activation=activation, dropout=dropout)


OTHER_DECODERS: dict[str, Callable[[ConfigFields], ModelShape | None]] = {
    "gpt2": _gpt2,
    "phi": _phi,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}

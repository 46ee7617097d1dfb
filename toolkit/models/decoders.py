"""Tensors of decoders by formula: those like Llama by their differences, others module by module (`decoders.yaml`).

`tests/models/test_read_model.py` compares every architecture with transformers, tensor by tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.documents import read_table
from toolkit.models.config_fields import MISSING, ConfigFields
from toolkit.models.families import evaluate
from toolkit.models.shape import ROUTER, Layer, ModelShape, Tensor, linear


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaVariant:
    """Differences between one architecture and Llama."""

    qkv_bias: str | bool = False  # true, False, or the configuration field that decides, as for the next two
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: str | None = None  # `head`: as wide as one head; `full`: as wide as all heads together
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm")
    norm_parts: Sequence[str] = ("weight",)
    final_norm: bool = True
    head_dim: int | None = None  # default where the configuration gives none; None: hidden size over heads
    num_kv_heads: int | None = None  # default where the configuration gives none; None: as many as attention heads
    tied: bool = False
    fused: bool = False  # query, key and value in one tensor, gate and up in another (Phi-3)
    experts: str | None = None  # `mixtral`, `qwen2_moe` or `qwen3_moe`
    attention: str = "sdpa"
    activation: str = "silu"
    unsupported_flags: Sequence[str] = ()  # change the tensors in other ways: transformers builds the model then


_TABLES: dict[str, dict[str, Any]] = read_table(__file__)
LLAMA_FAMILY = {name: LlamaVariant(**row) for name, row in _TABLES["llama_family"].items()}
OTHER_DECODERS = _TABLES["others"]
WITH_BIAS = ("norm", "conv1d", "biased", "biased_head")


def shape_from_config(fields: ConfigFields) -> ModelShape | None:
    """Return the shape by formula, or None for an architecture or option that has none.

    Raises ToolkitError for a field that is missing or invalid.
    """
    model_type = str(fields.values.get("model_type"))
    if model_type in LLAMA_FAMILY:
        return llama_shape(model_type, fields)
    return other_shape(model_type, fields) if model_type in OTHER_DECODERS else None


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
    hidden, heads, num_layers = map(fields.size, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    window, num_sliding = sliding_window(model_type, fields, num_layers=num_layers)
    shape = ModelShape(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", default=1 if variant.experts else MISSING),
        num_attention_heads=heads,
        num_kv_heads=fields.kv_heads(heads, default=variant.num_kv_heads),
        head_dim=fields.head_dim(hidden, heads, default=variant.head_dim),
        vocab_size=fields.size("vocab_size"),
        gated_mlp=True,
        tied_embeddings=fields.flag("tie_word_embeddings", default=variant.tied),
        layers=(),
        outer=(),
        attention=variant.attention,
        activation=fields.text("hidden_act", "hidden_activation", default=variant.activation),
        sliding_window=window,
        num_sliding_layers=num_sliding,
    )
    attention = _attention(variant, fields, shape)
    norms = tuple(
        Tensor(name=f"{name}.{part}", shape=(hidden,)) for name in variant.norms for part in variant.norm_parts
    )
    dense = (*attention, *_mlp(variant, fields, shape), *norms)
    layers = (dense,) * num_layers
    if variant.experts is not None:
        shape, experts = _experts(variant.experts, fields, shape)
        sparse, every = (*attention, *experts, *norms), fields.size("decoder_sparse_step", default=1)
        without = fields.items("mlp_only_layers", int) or ()
        layers = tuple(dense if index in without or (index + 1) % every else sparse for index in range(num_layers))
    final_norm = tuple(Tensor(name=f"model.norm.{part}", shape=(hidden,)) for part in variant.norm_parts)
    embedding = Tensor(name="model.embed_tokens.weight", shape=(shape.vocab_size, hidden))
    outer = (embedding, *(final_norm if variant.final_norm else ()), *_head("lm_head", shape))
    return replace(shape, layers=layers, outer=outer)


def with_next_token_layers(shape: ModelShape, fields: ConfigFields) -> ModelShape:
    """Return MiMo, a Qwen2 with layers that predict further tokens, which no forward pass of a fine-tune runs."""
    hidden, extra = shape.hidden_size, []
    for index in range(fields.size("num_nextn_predict_layers", default=1)):
        name = f"model.mtp_layers.{index}"
        norms = (f"{name}.{each}_layernorm.weight" for each in ("token", "hidden", "final"))
        extra += [
            *(Tensor(name=each, shape=(hidden,)) for each in norms),
            *linear(f"{name}.input_proj", hidden, 2 * hidden),
        ]
        extra += [replace(tensor, name=f"{name}.{tensor.name}") for tensor in shape.layers[0]]
    return replace(shape, outer=(*shape.outer, *extra))


def _head(name: str, shape: ModelShape) -> Layer:
    return () if shape.tied_embeddings else linear(name, shape.vocab_size, shape.hidden_size)


def _has_bias(fields: ConfigFields, option: str | bool) -> bool:
    if option == "qkv_bias":  # Qwen2-MoE's default is true
        return fields.flag(option, default=True)
    return option if isinstance(option, bool) else fields.flag(option)


def _attention(variant: LlamaVariant, fields: ConfigFields, size: ModelShape) -> Layer:
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


def _mlp(variant: LlamaVariant, fields: ConfigFields, size: ModelShape) -> Layer:
    bias = _has_bias(fields, variant.mlp_bias)
    down = linear("mlp.down_proj", size.hidden_size, size.intermediate_size, bias=bias)
    if variant.fused:
        return (*linear("mlp.gate_up_proj", 2 * size.intermediate_size, size.hidden_size), *down)
    gate = linear("mlp.gate_proj", size.intermediate_size, size.hidden_size, bias=bias)
    return (*gate, *linear("mlp.up_proj", size.intermediate_size, size.hidden_size, bias=bias), *down)


def _experts(kind: str, fields: ConfigFields, size: ModelShape) -> tuple[ModelShape, Layer]:
    """The sizes of a mixture, and router, experts and shared expert of a layer, in transformers' order.

    transformers 5 stores the weights of all experts of a layer as one tensor.
    """
    count, per_token = fields.size("num_experts", "num_local_experts"), fields.size("num_experts_per_tok")
    if per_token > count:
        raise ToolkitError(f"{fields.source}: num_experts_per_tok is {per_token}, expected at most {count} experts")
    hidden = size.hidden_size
    width = size.intermediate_size if kind == "mixtral" else fields.size("moe_intermediate_size")
    router = Tensor(name=ROUTER, shape=(count, hidden))
    tensors: Layer = (
        Tensor(name="mlp.experts.gate_up_proj", shape=(count, 2 * width, hidden)),
        Tensor(name="mlp.experts.down_proj", shape=(count, hidden, width)),
    )
    tensors = (*tensors, router) if kind == "qwen3_moe" else (router, *tensors)
    if kind == "qwen2_moe":
        shared = fields.size("shared_expert_intermediate_size")
        tensors += linear("mlp.shared_expert.gate_proj", shared, hidden)
        tensors += linear("mlp.shared_expert.up_proj", shared, hidden)
        tensors += linear("mlp.shared_expert.down_proj", hidden, shared)
        tensors += linear("mlp.shared_expert_gate", 1, hidden)
    return replace(size, num_experts=count, experts_per_token=per_token, intermediate_size=width), tensors


# Sliding windows. A row as long as the window needs a mask, and SDPA with a mask repeats keys and values for each head
# and saves a bf16 copy of the mask per layer (transformers 5.23, `masking_utils.py`, `integrations/sdpa_attention.py`).
# The rules below are those of transformers' configuration classes.
DEFAULT_WINDOW = 4096
WINDOW_BY_DEFAULT = ("mistral",)  # null switches it off
WINDOW_IF_SET = ("mixtral", "phi3")
WINDOW_IF_ENABLED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")  # `use_sliding_window`
FULL_LAYER_EVERY = {"gemma2": 2, "gemma3_text": 6}


def sliding_window(model_type: str, fields: ConfigFields, *, num_layers: int) -> tuple[int | None, int]:
    """Return the sliding window in tokens, or None, and the number of layers that use it."""
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
    elif model_type in FULL_LAYER_EVERY:
        sliding = num_layers - num_layers // fields.size("sliding_window_pattern", default=FULL_LAYER_EVERY[model_type])
    else:
        edge = min(fields.size("max_window_layers", default=28), num_layers)
        by_type = {"qwen2": num_layers - edge, "qwen3": num_layers - edge, "qwen2_moe": (edge + 1) // 2}
        sliding = (by_type | {"smollm3": num_layers // 4}).get(model_type, num_layers)
    return (window, sliding) if sliding else (None, 0)


def other_shape(model_type: str, fields: ConfigFields) -> ModelShape | None:
    """Return the shape of a decoder of `OTHER_DECODERS`; None if the configuration has an unsupported option.

    Raises ToolkitError for a field that is missing or invalid.
    """
    rows = OTHER_DECODERS[model_type]
    if any(fields.values.get(flag) for flag in rows.get("unsupported", ())):
        return None
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    mlp_default, (activation, dropout) = rows.get("mlp_default"), (rows["activation"], rows["dropout"])
    shape = ModelShape(
        model_type=model_type,
        num_layers=fields.size("n_layer", "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.size(rows["mlp"], default=mlp_default * hidden if mlp_default else MISSING),
        num_attention_heads=heads,
        num_kv_heads=fields.kv_heads(heads) if rows.get("kv") else heads,
        head_dim=ConfigFields({}, fields.source).head_dim(hidden, heads),
        vocab_size=fields.size("vocab_size"),
        gated_mlp=False,
        tied_embeddings=fields.flag("tie_word_embeddings", default=rows.get("tied", False)),
        layers=(),
        outer=(),
        activation=fields.text(activation[0], default=activation[1]),
        dropout=fields.fraction(dropout[0], default=dropout[1]) > 0,
    )
    is_wide = any(fields.size(name, default=hidden) != hidden for name in rows.get("one_width", ()))
    if is_wide or not all(fields.flag(name, default=True) for name in rows.get("required", ())):
        return None
    sizes = {"hidden": hidden, "mlp": shape.intermediate_size, "vocab": shape.vocab_size}
    sizes["keys"] = shape.num_kv_heads * shape.head_dim
    sizes["positions"] = fields.size(*rows["positions"]) if "positions" in rows else 0

    def tensors(part: str) -> Iterator[Tensor]:
        for kind, name, *terms in map(str.split, rows[part].splitlines()):
            widths = tuple(evaluate(term, sizes) for term in terms)
            if "head" not in kind or not shape.tied_embeddings:
                yield Tensor(name=f"{name}.weight", shape=widths)
            if kind in WITH_BIAS or (kind == "attention" and fields.flag("attention_bias", default=True)):
                yield Tensor(name=f"{name}.bias", shape=widths[1:] if kind == "conv1d" else widths[:1])

    return replace(shape, layers=(tuple(tensors("layer")),) * shape.num_layers, outer=tuple(tensors("outer")))

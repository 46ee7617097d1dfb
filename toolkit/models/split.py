"""How far a model can be split over ranks, and the part that one rank computes before FSDP2 shards it further.

The part of a rank is read from transformers' plans for the architecture (5.23, `distributed/tensor_parallel.py`,
`expert_parallel.py`). Norms and routers are whole on every rank; the input embedding is split on its vocabulary, and so
is the head, whatever the plan says (`distributed/mixin.py`, `init_parallel_plans`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from toolkit.models.shape import ModelShape, Tensor
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import PIPELINED_TYPES
from toolkit.versions import is_importable, model_plans, model_types

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What each dimension divides; ring attention divides the sequence alone.
DIVIDED = {
    "tp": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    "sp": ("num_attention_heads",),
    "ep": ("num_experts",),
    "cp": (),
    "pp": (),
}
# Styles of transformers' plans that split a parameter; the others replicate it.
SPLIT_STYLES = ("colwise", "rowwise", "embedding_rowwise", "embedding_colwise", "packed_colwise", "packed_rowwise")
Plan = Mapping[str, str]  # a style for each pattern of module or parameter names
ATTENTION_INPUT = ("self_attn.q_proj", "self_attn.qkv_proj")
MLP_OUTPUT = ("mlp.down_proj", "mlp.experts.down_proj")
VOCABULARY = re.compile(r"embed_tokens\.weight$|^lm_head\.")
WORDS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "rows of its MLP",
    "vocab_size": "rows of its vocabulary",
    "num_experts": "experts",
    "num_hidden_layers": "layers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSplit:
    """What of a model can be divided, from its `config.json` and its architecture in transformers."""

    model_type: str
    plans: Mapping[str, Mapping[str, str]]  # `tp` and `ep`, where transformers has a plan for the architecture
    sizes: Mapping[str, int]  # heads, experts and widths that are divided; a field that the model lacks is left out
    needs_whole_sequence: str | None = None  # why its attention cannot be divided along the sequence; None where it can
    not_planned: Mapping[str, str] = field(default_factory=dict)
    """Dimensions, or `lora`, for which the planner has no figures, each with the reason."""

    def why_not(self, dimension: str, degree: int) -> str | None:
        """Return why a dimension of parallelism cannot have a degree, or None where it can."""
        if dimension in ("tp", "ep") and dimension not in self.plans:
            if dimension == "ep" and "num_experts" not in self.sizes:
                return f"{self.model_type} has no experts"
            if not is_importable("transformers"):
                return f"transformers, which has the plan for {self.model_type}, is not installed"
            return f"transformers has no plan for {self.model_type}"
        if dimension == "pp" and self.model_type not in PIPELINED_TYPES:
            return f"stages were verified for {', '.join(PIPELINED_TYPES)} only"
        if dimension == "pp":
            layers = self.sizes.get("num_hidden_layers", degree)
            return f"it has {layers} layers" if degree > layers else None
        if dimension in ("cp", "sp") and self.needs_whole_sequence is not None:
            return self.needs_whole_sequence
        for name in DIVIDED[dimension]:
            size = self.sizes.get(name)
            if size is not None and size % degree:
                return f"{degree} does not divide its {size:,} {WORDS[name]}"
        heads = self.sizes.get("num_key_value_heads", 0)
        if dimension == "sp" and heads and heads % degree and degree % heads:
            return f"{degree} neither divides its {heads} key-value heads nor is a multiple of them"
        return None

    def nearest(self, dimension: str, degree: int) -> int | None:
        """Return the largest degree of 2 or more, below the given one, that works; None if there is none."""
        return next((each for each in range(degree - 1, 1, -1) if self.why_not(dimension, each) is None), None)


def read_split(config: Mapping[str, Any]) -> ModelSplit:
    """Return what of the model of a `config.json` can be divided."""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) and "num_attention_heads" not in config else config
    model_type = str(fields.get("model_type"))
    sizes = {name: fields.get(name) for name in WORDS}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    sizes["num_experts"] = next(filter(None, map(fields.get, EXPERT_FIELDS)), None)
    return ModelSplit(
        model_type=model_type,
        plans=model_plans(model_type),
        sizes={name: int(size) for name, size in sizes.items() if isinstance(size, int) and size > 0},
        needs_whole_sequence=_needs_whole_sequence(fields),
    )


def _needs_whole_sequence(fields: Mapping[str, Any]) -> str | None:
    """Ring attention and Ulysses compute causal attention without a mask, and a cap on scores is eager attention's."""
    kinds = fields.get("layer_types") or ()
    slides = fields.get("sliding_window") is not None and fields.get("use_sliding_window", True)
    if slides if not kinds else "sliding_attention" in kinds:
        return "its attention slides over a window, which needs a mask"
    if "chunked_attention" in kinds or fields.get("attention_chunk_size") is not None:
        return "it attends within chunks, which needs a mask"
    if "linear_attention" in kinds:
        return "its linear attention carries a state along the sequence"
    return None if fields.get("attn_logit_softcapping") is None else "it caps its attention scores"


def types_with_plan(dimension: str) -> tuple[str, ...]:
    """Return the architectures that transformers has a plan of a dimension for (`tp` or `ep`), sorted."""
    return tuple(sorted(name for name in model_types() if dimension in model_plans(name)))


@lru_cache(maxsize=256)
def part_of_rank(shape: ModelShape, layout: ParallelLayout | None) -> ModelShape:
    """Return the model with the tensors, heads and widths that one rank has; hidden and vocabulary sizes stay whole.

    Adapters that peft listed are kept: tensor parallelism is not planned for such architectures.
    """
    if layout is None or layout.tp == layout.ep == 1:
        return shape
    # patterns relative to a layer, as the names of `ModelShape.layers` are
    plans = {
        name: {pattern.partition(".*.")[2]: style for pattern, style in plan.items() if ".*." in pattern}
        for name, plan in model_plans(shape.model_type).items()
    }
    tp, ep, listed = plans.get("tp", {}), plans.get("ep", {}), shape.counted_adapters
    kinds = {kind: tuple(_split(tensor, tp, ep, layout) for tensor in kind) for kind in shape.layer_kinds}
    heads = layout.tp if _divides(tp, ATTENTION_INPUT, "colwise") else 1
    width = layout.tp if _divides(tp, MLP_OUTPUT if layout.ep == 1 else MLP_OUTPUT[:1], "rowwise") else 1
    if shape.num_experts and layout.ep > 1:  # experts are whole, each on one rank
        width = 1
    return replace(
        shape,
        layers=tuple(kinds[kind] for kind in shape.layers),
        outer=tuple(_divided(t, 0, layout.tp) if VOCABULARY.search(t.name) else t for t in shape.outer),
        num_attention_heads=shape.num_attention_heads // heads,
        num_kv_heads=shape.num_kv_heads // heads,
        intermediate_size=shape.intermediate_size // width,
        counted_adapters=None if listed is None else {kinds[kind]: adapters for kind, adapters in listed.items()},
    )


def _style(plan: Plan, name: str) -> str | None:
    """The style of the first pattern that a parameter, or its module, matches."""
    names = (name, name.rpartition(".")[0])
    return next((style for pattern, style in plan.items() if any(fnmatchcase(each, pattern) for each in names)), None)


def _divides(plan: Plan, modules: tuple[str, ...], style: str) -> bool:
    return any(_style(plan, f"{module}.weight") == style or plan.get(module) == style for module in modules)


def _split(tensor: Tensor, tp: Plan, ep: Plan, layout: ParallelLayout) -> Tensor:
    if layout.ep > 1 and _style(ep, tensor.name) is not None:
        return _divided(tensor, 0, layout.ep)
    # Tensor parallelism divides rows or columns: of the last two dimensions, after that of the experts.
    style, num_dims = _style(tp, tensor.name), len(tensor.shape)
    if style is None or not style.startswith(SPLIT_STYLES) or ("rowwise" in style and num_dims == 1):
        return tensor  # also a bias, which is added after the sum
    if style.startswith("embedding"):
        axis = 0 if style == "embedding_rowwise" else 1
    else:
        axis = num_dims - 1 if "rowwise" in style else max(num_dims - 2, 0)
    return _divided(tensor, axis, layout.tp)


def _divided(tensor: Tensor, axis: int, ranks: int) -> Tensor:
    shape = tuple(-(-size // ranks) if place == axis else size for place, size in enumerate(tensor.shape))
    return replace(tensor, shape=shape)

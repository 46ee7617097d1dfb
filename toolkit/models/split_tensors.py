"""The part of a model that one rank computes under tensor and expert parallelism, before FSDP2 shards it further.

    >>> from toolkit.models.config_fields import ConfigFields
    >>> from toolkit.models.llama_family import llama_shape
    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> shape = llama_shape("llama", ConfigFields(sizes | {"vocab_size": 1000}, "config.json"))
    >>> part = part_of_rank(shape, ParallelLayout(tp=2))
    >>> part.num_attention_heads, part.intermediate_size, part.outer[0].shape, part.outer[1].shape
    (2, 64, (500, 64), (64,))

Read from transformers' plans for the architecture (5.23, `distributed/tensor_parallel.py`, `expert_parallel.py`). Norms
and routers are whole on every rank; the input embedding is split on its vocabulary, and so is the head, whatever the
plan says (`distributed/mixin.py`, `init_parallel_plans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from toolkit.models.shape import Adapters, Layer, ModelShape, Tensor
from toolkit.models.split import SPLIT_STYLES
from toolkit.parallel.layout import ParallelLayout
from toolkit.versions import model_plans

Plan = Mapping[str, str]
"""A style for each pattern of module or parameter names."""
ATTENTION_INPUT = ("self_attn.q_proj", "self_attn.qkv_proj")
MLP_OUTPUT = ("mlp.down_proj", "mlp.experts.down_proj")


@lru_cache(maxsize=256)
def part_of_rank(shape: ModelShape, layout: ParallelLayout | None) -> ModelShape:
    """Return the model with the tensors, heads and widths that one rank has; hidden and vocabulary sizes stay whole."""
    if layout is None or layout.tp == layout.ep == 1:
        return shape
    plans = {name: _of_layers(plan) for name, plan in model_plans(shape.model_type).items()}
    tp, ep = plans.get("tp", {}), plans.get("ep", {})
    kinds = {kind: tuple(_split(tensor, tp, ep, layout) for tensor in kind) for kind in shape.layer_kinds}
    heads = layout.tp if _divides(tp, ATTENTION_INPUT, "colwise") else 1
    width = layout.tp if _divides(tp, MLP_OUTPUT if layout.ep == 1 else MLP_OUTPUT[:1], "rowwise") else 1
    if shape.num_experts and layout.ep > 1:  # experts are whole, each on one rank
        width = 1
    return replace(
        shape,
        layers=tuple(kinds[kind] for kind in shape.layers),
        outer=tuple(_split_outer(tensor, layout) for tensor in shape.outer),
        num_attention_heads=shape.num_attention_heads // heads,
        num_kv_heads=shape.num_kv_heads // heads,
        intermediate_size=shape.intermediate_size // width,
        counted_adapters=_adapters(shape, kinds),
    )


def _of_layers(plan: Plan) -> dict[str, str]:
    """Patterns relative to a layer, as the names of `ModelShape.layers` are."""
    return {pattern.partition(".*.")[2]: style for pattern, style in plan.items() if ".*." in pattern}


def _style(plan: Plan, name: str) -> str | None:
    module = name.rpartition(".")[0]
    return next((style for pattern, style in plan.items() if _matches(pattern, name, module)), None)


def _matches(pattern: str, *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _divides(plan: Plan, modules: tuple[str, ...], style: str) -> bool:
    return any(_style(plan, f"{module}.weight") == style or plan.get(module) == style for module in modules)


def _split(tensor: Tensor, tp: Plan, ep: Plan, layout: ParallelLayout) -> Tensor:
    if layout.ep > 1 and _style(ep, tensor.name) is not None:
        return _divided(tensor, 0, layout.ep)
    axis = _axis(_style(tp, tensor.name), len(tensor.shape))
    return tensor if axis is None else _divided(tensor, axis, layout.tp)


def _axis(style: str | None, num_dims: int) -> int | None:
    """The dimension that tensor parallelism divides: rows or columns of the last two, after that of the experts."""
    if style is None or not style.startswith(SPLIT_STYLES):
        return None
    if "rowwise" in style and not style.startswith("embedding"):
        return num_dims - 1 if num_dims > 1 else None  # a bias is added after the sum
    if style.startswith("embedding"):
        return 0 if style == "embedding_rowwise" else 1
    return max(num_dims - 2, 0)


def _split_outer(tensor: Tensor, layout: ParallelLayout) -> Tensor:
    """Token embedding and head, on the vocabulary."""
    splits = tensor.name.endswith("embed_tokens.weight") or tensor.name.startswith("lm_head.")
    return _divided(tensor, 0, layout.tp) if splits else tensor


def _divided(tensor: Tensor, axis: int, ranks: int) -> Tensor:
    shape = tuple(-(-size // ranks) if place == axis else size for place, size in enumerate(tensor.shape))
    return replace(tensor, shape=shape)


def _adapters(shape: ModelShape, kinds: Mapping[Layer, Layer]) -> Mapping[Layer, Adapters] | None:
    """Adapters that peft listed. `toolkit.plan.planned_split` refuses tensor parallelism for such architectures."""
    listed = shape.counted_adapters
    return None if listed is None else {kinds[kind]: adapters for kind, adapters in listed.items()}

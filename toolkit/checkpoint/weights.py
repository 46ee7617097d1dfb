"""The weights of a checkpoint under the names and in the files that `from_pretrained` (or peft) reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from toolkit.checkpoint.description import Description, Skeleton
from toolkit.checkpoint.names import ADAPTER
from toolkit.checkpoint.plain_source import PlainSource, WeightFiles
from toolkit.checkpoint.source import Source
from toolkit.checkpoint.tensors_file import Entry
from toolkit.errors import ToolkitError


def name_states(source: Source, skeleton: Skeleton) -> None:
    """Tell a reader of numbered states whose they are. Raises ToolkitError where that cannot be known."""
    if not isinstance(source, PlainSource):
        return
    groups = skeleton.groups(skeleton.trainable)
    sizes = [len(group) for group in groups if group]
    found = [size for size in source.group_sizes if size]
    if found and found != sizes:
        raise ToolkitError(
            f"{source.layout.path}/optimizer.pt has parameter groups of {found}, the model's are {sizes}: with frozen"
            " layers or an optimizer of one's own, whose states they are is not recorded",
            hint="resume it with the preset and the number of processes that it was saved with",
        )
    source.name_states([name for group in groups for name in group], skeleton.saved_names)


def check_names(source: Source, skeleton: Skeleton) -> None:
    """Every weight of the model is there, in its shape, and none that the model does not know."""
    saved, expected = source.shapes(), skeleton.shapes
    missing = [name for name in expected if name not in saved]
    if missing:
        raise ToolkitError(f"{source.layout.path} lacks {_some(missing)}")
    for name, shape in expected.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {source.layout.path} has shape {saved[name]}, the model's is {shape}")


def model_entries(source: Source, skeleton: Skeleton, dtype: torch.dtype) -> list[Entry]:
    """Every weight of the model, or of the adapter under peft's names."""
    return [
        Entry(name=skeleton.saved_names.get(name, name), shape=shape, dtype=dtype, read=partial(source.weight, name))
        for name, shape in skeleton.shapes.items()
    ]


def merged_entries(source: Source, skeleton: Skeleton, description: Description, dtype: torch.dtype) -> list[Entry]:
    """The base model's weights, with the adapter added where there is one: peft's own arithmetic, layer by layer."""
    assert description.base_folder is not None
    base = WeightFiles(description.base_folder)
    targets = _adapted_layers(skeleton)
    plain = {name.replace(".base_layer.", "."): name for name in _base_names(skeleton)}
    missing = [name for name in plain if name not in base.files]
    if missing:
        raise ToolkitError(f"the base model {description.base} lacks {_some(missing)}")
    shapes = base.shapes()

    def reader(name: str) -> Callable[[], torch.Tensor]:
        layer = targets.get(plain[name].rpartition(".base_layer.")[0])
        if layer is None or not plain[name].endswith("base_layer.weight"):
            return partial(base.read, name)
        return partial(_merged, layer, partial(base.read, name), source, plain[name].rpartition("base_layer.")[0])

    return [Entry(name=name, shape=shapes[name], dtype=dtype, read=reader(name)) for name in plain]


def _base_names(skeleton: Skeleton) -> list[str]:
    """Names inside the base model; adapters are left out."""
    prefix = "base_model.model."
    named = [name for name, _ in skeleton.model.named_parameters() if name not in set(skeleton.trainable)]
    return [name.removeprefix(prefix) for name in named]


def _adapted_layers(skeleton: Skeleton) -> dict[str, Any]:
    return {name: module for name, module in skeleton.plain.named_modules() if hasattr(module, "lora_A")}


def _merged(layer: Any, read_base: Callable[[], torch.Tensor], source: Source, name: str) -> torch.Tensor:
    """One layer brought to life, merged, and emptied again."""
    layer.to_empty(device="cpu")
    prefix = f"base_model.model.{name}"
    state = {"base_layer.weight": read_base().float()}
    for key in layer.state_dict():
        if f"{prefix}{key}" in source.shapes():
            state[key] = source.weight(f"{prefix}{key}")
    layer.load_state_dict(state, strict=False)
    layer.merge(adapter_names=[ADAPTER])
    merged: torch.Tensor = layer.base_layer.weight.data.clone()
    layer.merged_adapters.clear()
    layer.to("meta")
    return merged


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

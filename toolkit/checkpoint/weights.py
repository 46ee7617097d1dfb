"""A checkpoint's weights under the names that `from_pretrained` (or peft) reads, optionally with an adapter merged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from toolkit.checkpoint.model_definition import ADAPTER_NAME, MetaModel, ModelFiles
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.safetensors_files import WeightFiles
from toolkit.checkpoint.stored_weights import stored_tensors
from toolkit.errors import ToolkitError
from toolkit.files.safetensors_writer import SavedTensor


def check_names(reader: CheckpointReader, model: MetaModel) -> None:
    """Raise ToolkitError unless the checkpoint has every weight of the model, in its shape."""
    saved, expected = reader.shapes(), model.shapes
    missing = [name for name in expected if name not in saved]
    if missing:
        raise ToolkitError(f"{reader.layout.path} lacks {_listed(missing)}")
    for name, shape in expected.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {reader.layout.path} has shape {saved[name]}, the model's is {shape}")


def model_tensors(reader: CheckpointReader, model: MetaModel, dtype: torch.dtype) -> list[SavedTensor]:
    """Return every weight of the model under the names of its files, or of the adapter under peft's."""
    return stored_tensors(model, dtype, reader.weight)


def merged_tensors(
    reader: CheckpointReader, model: MetaModel, files: ModelFiles, dtype: torch.dtype
) -> list[SavedTensor]:
    """Return the base model's weights with the adapter merged into them, layer by layer with peft's own arithmetic."""
    assert files.base_folder is not None
    base = WeightFiles(files.base_folder)
    layers = {name: module for name, module in model.base_model.named_modules() if hasattr(module, "lora_A")}
    in_training = {name.replace(".base_layer.", "."): name for name in _base_names(model)}
    missing = [name for name in in_training if name not in base.tensors]
    if missing:
        raise ToolkitError(f"the base model {files.base} lacks {_listed(missing)}")
    shapes = base.shapes()

    def read(name: str) -> Callable[[], torch.Tensor]:
        training_name = in_training[name]
        layer = layers.get(training_name.rpartition(".base_layer.")[0])
        if layer is None or not training_name.endswith("base_layer.weight"):
            return partial(base.read, name)
        return partial(_merged, layer, partial(base.read, name), reader, training_name.rpartition("base_layer.")[0])

    return [SavedTensor(name=name, shape=shapes[name], dtype=dtype, read=read(name)) for name in in_training]


def _base_names(model: MetaModel) -> list[str]:
    """Names of the base model's parameters inside the training model."""
    trainable = set(model.trainable)
    names = [name for name, _ in model.training_model.named_parameters() if name not in trainable]
    return [name.removeprefix("base_model.model.") for name in names]


def _merged(layer: Any, read_base: Callable[[], torch.Tensor], reader: CheckpointReader, name: str) -> torch.Tensor:
    """Load one layer from the meta device, merge it, and send it back."""
    layer.to_empty(device="cpu")
    prefix = f"base_model.model.{name}"
    state = {"base_layer.weight": read_base().float()}
    saved = reader.shapes()
    state |= {key: reader.weight(f"{prefix}{key}") for key in layer.state_dict() if f"{prefix}{key}" in saved}
    layer.load_state_dict(state, strict=False)
    layer.merge(adapter_names=[ADAPTER_NAME])
    merged: torch.Tensor = layer.base_layer.weight.data.clone()
    layer.merged_adapters.clear()
    layer.to("meta")
    return merged


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

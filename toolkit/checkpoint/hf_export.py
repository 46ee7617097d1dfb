"""Export any engine's checkpoint as one Hugging Face folder, with one tensor in memory at a time.

`export(Path("out/checkpoint-8"), Path("model"))` writes the folder `model`, or nothing at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.detection import detect
from toolkit.checkpoint.engines import open_checkpoint
from toolkit.checkpoint.model_definition import ADAPTER_NAME, MetaModel, ModelFiles
from toolkit.checkpoint.output_folder import check_disk_space, check_output, copy_file, rename_to, temporary_beside
from toolkit.checkpoint.reader import CheckpointReader, check_names, listed
from toolkit.checkpoint.stored_weights import DEFAULT_SHARD_BYTES, WeightFiles, stored_tensors, write_model
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import SavedTensor
from toolkit.record.checkpoints import FINGERPRINT, INCOMPLETE_MARK, MANIFEST, read_checkpoint
from toolkit.record.folder import write_json

# A generous estimate of the tokenizer and configuration files beside the weights.
SIDE_FILE_BYTES = 64 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The folder that was written."""

    folder: Path
    num_tensors: int
    bytes: int
    adapter: bool


def export(
    path: Path,
    out: Path,
    *,
    merge_lora: bool = False,
    dtype: str = "float32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    base_model: str | None = None,
    trust_pickle: bool = False,
) -> ExportResult:
    """Write the model (or adapter) of a checkpoint into `out`.

    Raises ToolkitError for a damaged checkpoint, a folder that is not empty, and too little disk space.
    """
    if dtype not in DTYPES:
        raise ToolkitError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_output(out, source=path)
    check_complete(path)
    detect(path)  # refuses a folder that is not a checkpoint before anything is loaded
    files = ModelFiles(path, base_model)
    _check_merge(files, merge_lora=merge_lora)
    model = MetaModel(files)
    reader = open_checkpoint(path, model, trust_pickle=trust_pickle)
    try:
        check_names(reader, model)
        if merge_lora:
            tensors = _merged_tensors(reader, model, files, DTYPES[dtype])
        else:
            tensors = stored_tensors(model, DTYPES[dtype], reader.weight)
        size = sum(tensor.bytes for tensor in tensors)
        check_disk_space(out, size + SIDE_FILE_BYTES)
        adapter = files.adapter and not merge_lora
        shard_bytes = size if adapter else max_shard_bytes  # peft reads one file
        _write(out, files, tensors, adapter=adapter, dtype=dtype, max_shard_bytes=shard_bytes)
    finally:
        reader.close()
    return ExportResult(folder=out, num_tensors=len(tensors), bytes=size, adapter=adapter)


def check_complete(path: Path) -> None:
    """Raise ToolkitError if a file differs from the manifest; a checkpoint without one cannot be checked."""
    if os.path.lexists(path / MANIFEST) or os.path.lexists(path / INCOMPLETE_MARK):
        problem = read_checkpoint(path).problem(deep=True)
        if problem is not None:
            raise ToolkitError(f"{path} is damaged: {problem}", hint=f"`toolkit checkpoint inspect {path.parent}`")


def _check_merge(files: ModelFiles, *, merge_lora: bool) -> None:
    if merge_lora and not files.adapter:
        raise ToolkitError(f"{files.path} holds a full model: there is no adapter to merge")
    if merge_lora and files.base_folder is None:
        raise ToolkitError(f"{files.path} does not record its base model", hint="`--base-model FOLDER`")


def _write(
    out: Path,
    files: ModelFiles,
    tensors: Sequence[SavedTensor],
    *,
    adapter: bool,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    with temporary_beside(out) as temporary:
        write_model(temporary, tensors, max_shard_bytes=max_shard_bytes, stem="adapter_model" if adapter else "model")
        for path in files.tokenizer_files():
            copy_file(path, temporary / path.name)
        recorded = files.fingerprint(dtype=dtype)
        if recorded is not None:
            write_json(temporary / FINGERPRINT, recorded.model_dump(exclude_unset=True))
        if adapter:
            config = files.peft_config()
            config.inference_mode = True
            config.save_pretrained(temporary)
        else:
            config = files.model_config()
            config.dtype, config.use_cache = dtype, True
            config.save_pretrained(temporary)
        rename_to(out, temporary)


def _merged_tensors(
    reader: CheckpointReader, model: MetaModel, files: ModelFiles, dtype: torch.dtype
) -> list[SavedTensor]:
    """The base model's weights with the adapter merged into them, layer by layer with peft's own arithmetic."""
    assert files.base_folder is not None
    base = WeightFiles(files.base_folder)
    layers = {name: module for name, module in model.base_model.named_modules() if hasattr(module, "lora_A")}
    in_training = {name.replace(".base_layer.", "."): name for name in _base_names(model)}
    missing = [name for name in in_training if name not in base.tensors]
    if missing:
        raise ToolkitError(f"the base model {files.base} lacks {listed(missing)}")
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

"""Checkpoints in Hugging Face's files: safetensors, and beside them the `optimizer.pt` of DDP and of a single process.

transformers stores some weights under other names, or in other pieces, than the live model holds them. A mixture of
experts holds one tensor for all experts of a layer (`experts.gate_up_proj`), and its files have one per expert and
matrix. transformers converts them while it loads and saves (5.23, `core_model_loading`); here its converters run on one
tensor at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.inspect import Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, MappedFiles, group_hyperparameters, without_parameters
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import SavedTensor, damaged, read_weights, write_file

DEFAULT_SHARD_BYTES = 5 * 10**9

Read = Callable[[str], torch.Tensor]


class WeightFiles:
    """The safetensors of a folder: one file, shards with an index, or an adapter's file; all headers are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_weights(folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor; the file is unmapped again."""
        path = self.tensors[name].path
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from None
        return tensor


def live_weights(folder: Path, model: MetaModel) -> WeightFiles:
    """Return a folder's weights under the names of the live model; an adapter's keep theirs."""
    files = WeightFiles(folder)
    return files if model.adapter or set(model.shapes) <= set(files.tensors) else _LiveWeights(folder, model.base_model)


class _LiveWeights(WeightFiles):
    """Reads weights of a transformers model from files that store them in other pieces."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder)
        self.model = model
        self.pieces = _group(self.tensors, _transforms(model), known=set(model.state_dict()))

    @cached_property
    def shapes_by_group(self) -> dict[str, dict[str, tuple[int, ...]]]:
        made = {group: self._made(group, lambda name: _empty(self.tensors[name].shape)) for group in self.pieces}
        return {group: {name: tuple(tensor.shape) for name, tensor in each.items()} for group, each in made.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for shapes in self.shapes_by_group.values() for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        group = next(group for group, shapes in self.shapes_by_group.items() if name in shapes)
        return self._made(group, super().read)[name]

    def _made(self, group: str, read: Read) -> dict[str, torch.Tensor]:
        pieces = self.pieces[group]
        if pieces[0].converter is None:
            return {group: read(pieces[0].name)}
        converter = copy.deepcopy(pieces[0].converter)
        try:
            for piece in pieces:
                converter.add_tensor(group, piece.name, piece.pattern, read(piece.name))
            made = converter.convert(group, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            why = " ".join(str(error).split())[:120]
            raise ToolkitError(
                f"{self.folder}: {len(pieces)} tensors from {pieces[0].name[:80]} on do not make {group[:80]}: {why}",
                hint="copy or download the folder again",
            ) from None
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def stored_tensors(model: MetaModel, dtype: torch.dtype, read: Read) -> list[SavedTensor]:
    """Return every weight of the model, or of the adapter, as `from_pretrained` or peft expects it in a file.

    `read` returns a weight of the live model. Tensors that are made of one weight follow each other: it is read once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if model.adapter:
        return [
            SavedTensor(name=model.saved_names[name], shape=shape, dtype=dtype, read=partial(read, name))
            for name, shape in model.shapes.items()
        ]

    @lru_cache(maxsize=1)
    def made_of(*live: str) -> Any:
        return revert_weight_conversion(model.base_model, {name: read(name) for name in live})

    def read_made(name: str, *live: str) -> torch.Tensor:
        made: torch.Tensor = made_of(*live)[name]
        return made

    reverse = [transform.reverse_transform() for transform in reversed(_transforms(model.base_model))]
    tensors: list[SavedTensor] = []
    for stored, pieces in _group(model.shapes, reverse, reverse=True).items():
        first = pieces[0].name
        if pieces[0].converter is None:
            tensors.append(SavedTensor(name=stored, shape=model.shapes[first], dtype=dtype, read=partial(read, first)))
            continue
        live = [piece.name for piece in pieces]
        made = revert_weight_conversion(model.base_model, {name: _empty(model.shapes[name]) for name in live})
        tensors += [
            SavedTensor(name=name, shape=tuple(tensor.shape), dtype=dtype, read=partial(read_made, name, *live))
            for name, tensor in made.items()
        ]
    return tensors


def _transforms(model: Any) -> list[Any]:
    """transformers' conversions, in the order of loading; not of a prefix, which only the loaded files tell."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in transforms if not isinstance(transform, PrefixChange)]


class _Piece(NamedTuple):
    name: str
    converter: Any  # transformers' `WeightConverter`; None where the tensor only has another name, or the same
    pattern: str


def _group(
    names: Iterable[str], transforms: list[Any], *, reverse: bool = False, known: Container[str] = ()
) -> dict[str, list[_Piece]]:
    """Group names by what is made of them; `known` ones stay as they are."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    grouped: dict[str, list[_Piece]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = name, None
        if name not in known:
            target, pattern = rename_source_key(name, renamings, converters, reverse=reverse)
        grouped.setdefault(target, []).append(_Piece(name, by_pattern.get(pattern), pattern or ""))
    return grouped


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def write_model(
    folder: Path, tensors: Sequence[SavedTensor], *, adapter: bool, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write one file, or several with an index, in Hugging Face's layout; for an adapter one, which peft reads."""
    stem, by_name = "adapter_model" if adapter else "model", {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=sum(tensor.bytes for tensor in tensors) if adapter else max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_file(folder / file, [by_name[name] for name in names])
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class SafetensorsReader:
    """Reads the weights of a checkpoint from `model.safetensors`, or shards, or an adapter."""

    def __init__(self, layout: Layout, model: MetaModel) -> None:
        self.layout, self.model, self.saved_names = layout, model, model.saved_names
        self.weights = live_weights(layout.path, model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names = {saved: name for name, saved in self.saved_names.items()}
        return {names.get(saved, saved): shape for saved, shape in self.weights.shapes().items()}

    def weight(self, name: str) -> torch.Tensor:
        return self.weights.read(self.saved_names.get(name, name))


class PlainReader(SafetensorsReader):
    """Reads `optimizer.pt` beside the weights, whose states are numbered in the order of the parameter groups."""

    def __init__(self, layout: Layout, model: MetaModel, *, trust_pickle: bool = False) -> None:
        super().__init__(layout, model)
        self.files = MappedFiles(trust_pickle=trust_pickle)
        self.path = layout.path / "optimizer.pt"
        groups = self.files[self.path]["param_groups"] if self.path.exists() else []
        self.hyperparameters = without_parameters(groups)
        self.group_sizes = [len(group["params"]) for group in groups]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter's optimizer state. Raises ToolkitError where the model does not tell."""
        groups = self.model.groups(self.model.trainable)
        sizes, saved = [len(group) for group in groups if group], [size for size in self.group_sizes if size]
        if saved and saved != sizes:
            raise ToolkitError(
                f"{self.path} has parameter groups of {saved}, the model's are {sizes}: with frozen"
                " layers or a custom optimizer the file does not record which parameter a state belongs to",
                hint="resume it with the preset and the number of processes that it was saved with",
            )
        return {name: number for number, name in enumerate(name for group in groups for name in group)}

    def optimized(self) -> list[str]:
        return list(self.numbers) if self.path.exists() else []

    def moment(self, name: str, state: str) -> torch.Tensor:
        self.files.release()
        return self.files.copy(self.files[self.path]["state"][self.numbers[name]][state], self.model.shapes[name])

    def optimizer_step(self) -> float:
        return float(next(iter(self.files[self.path]["state"].values()))["step"])

    def close(self) -> None:
        self.files.close()


def write_weights(folder: Path, reader: CheckpointReader, model: MetaModel) -> None:
    """Write the weights in fp32, as Hugging Face's files."""
    write_model(folder, stored_tensors(model, torch.float32, reader.weight), adapter=model.adapter)


def write_plain(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    """Write the weights, and torch's optimizer state numbered in the order of the groups."""
    write_weights(folder, reader, model)
    step = reader.optimizer_step()
    states: dict[int, dict[str, torch.Tensor]] = {}
    param_groups: list[dict[str, object]] = []
    # The Trainer makes a group even if no parameter is in it: adapters have no norm layers.
    for position, names in enumerate(groups):
        numbers = list(range(len(states), len(states) + len(names)))
        for number, name in zip(numbers, names, strict=True):
            moments = {moment: reader.moment(name, moment) for moment in MOMENTS}
            states[number] = {"step": torch.tensor(step, dtype=torch.float32), **moments}
        param_groups.append({**group_hyperparameters(reader, position, groups), "params": numbers})
    torch.save({"state": states, "param_groups": param_groups}, folder / "optimizer.pt")

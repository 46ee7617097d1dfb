"""Weights that transformers stores under other names, or in other pieces, than the live model holds them.

A mixture of experts holds one tensor for all experts of a layer (`experts.gate_up_proj`), and its files have one per
expert and matrix. transformers converts them while it loads and saves (5.23, `core_model_loading`); here its
converters run on one tensor at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.model_definition import MetaModel
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import SavedTensor, damaged, read_weights, write_file

DEFAULT_SHARD_BYTES = 5 * 10**9

Read = Callable[[str], torch.Tensor]


class Weights(Protocol):
    """Tensors by name, read on request."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor."""


class WeightFiles:
    """The safetensors of a folder: one file, shards with an index, or an adapter's file; all headers are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_weights(folder)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.tensors)

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


def live_weights(files: WeightFiles, model: MetaModel) -> Weights:
    """Return a folder's weights under the names of the live model; an adapter's keep theirs."""
    stored = set(files.names)
    return files if model.adapter or set(model.shapes) <= stored else _LiveWeights(files, model.base_model)


class _LiveWeights:
    """Reads weights of a transformers model from files that store them in other pieces."""

    def __init__(self, files: WeightFiles, model: Any) -> None:
        self.files, self.model = files, model
        self.pieces = _group(files.names, _transforms(model), known=set(model.state_dict()))

    @cached_property
    def shapes_by_group(self) -> dict[str, dict[str, tuple[int, ...]]]:
        stored = self.files.shapes()
        return {group: _shapes(self._made(group, lambda name: _empty(stored[name]))) for group in self.pieces}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for shapes in self.shapes_by_group.values() for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        group = next(group for group, shapes in self.shapes_by_group.items() if name in shapes)
        return self._made(group, self.files.read)[name]

    def _made(self, group: str, read: Read) -> dict[str, torch.Tensor]:
        pieces = self.pieces[group]
        try:
            return _converted(group, pieces, read, self.model)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            why = " ".join(str(error).split())[:120]
            raise ToolkitError(
                f"{self.files.folder}: {len(pieces)} tensors from {pieces[0].name[:80]} on do not make"
                f" {group[:80]}: {why}",
                hint="copy or download the folder again",
            ) from None


def stored_tensors(model: MetaModel, dtype: torch.dtype, read: Read) -> list[SavedTensor]:
    """Return every weight of the model, or of the adapter, as `from_pretrained` or peft expects it in a file.

    `read` returns a weight of the live model. Tensors that are made of one weight follow each other: it is read once.
    """
    if model.adapter:
        return [
            SavedTensor(name=model.saved_names[name], shape=shape, dtype=dtype, read=partial(read, name))
            for name, shape in model.shapes.items()
        ]
    reverse = [transform.reverse_transform() for transform in reversed(_transforms(model.base_model))]
    tensors: list[SavedTensor] = []
    for stored, pieces in _group(model.shapes, reverse, reverse=True).items():
        names = [piece.name for piece in pieces]
        if pieces[0].converter is None:
            shape = model.shapes[names[0]]
            tensors.append(SavedTensor(name=stored, shape=shape, dtype=dtype, read=partial(read, names[0])))
        else:
            made = _MadeOf(names, model, read)
            tensors += [
                SavedTensor(name=name, shape=shape, dtype=dtype, read=partial(made.read, name))
                for name, shape in made.shapes.items()
            ]
    return tensors


class _MadeOf:
    """Tensors of a file that are made of the same weights of the live model."""

    def __init__(self, names: list[str], model: MetaModel, read: Read) -> None:
        self.names, self.model, self.read_live = names, model, read
        self.shapes = _shapes(self._reverted(lambda name: _empty(model.shapes[name])))
        self.waiting: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        if name not in self.waiting:
            self.waiting = self._reverted(self.read_live)
        return self.waiting.pop(name)

    def _reverted(self, read: Read) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        live = {name: read(name) for name in self.names}
        found: dict[str, torch.Tensor] = revert_weight_conversion(self.model.base_model, live)
        return found


def _transforms(model: Any) -> list[Any]:
    """transformers' conversions of the architecture, in the order of loading.

    Without changes of a prefix: only the files that a model was loaded from tell whether they had it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in found if not isinstance(transform, PrefixChange)]


class _Piece(NamedTuple):
    name: str
    converter: Any
    """transformers' `WeightConverter`; None where the tensor only has another name, or the same."""
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
        target, pattern = (
            (name, None) if name in known else rename_source_key(name, renamings, converters, reverse=reverse)
        )
        grouped.setdefault(target, []).append(_Piece(name, by_pattern.get(pattern), pattern or ""))
    return grouped


def _converted(group: str, pieces: list[_Piece], read: Read, model: Any) -> dict[str, torch.Tensor]:
    if pieces[0].converter is None:
        return {group: read(pieces[0].name)}
    converter = copy.deepcopy(pieces[0].converter)
    for piece in pieces:
        converter.add_tensor(group, piece.name, piece.pattern, read(piece.name))
    found = converter.convert(group, model=model, config=model.config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_model(folder: Path, tensors: Sequence[SavedTensor], *, max_shard_bytes: int, stem: str = "model") -> None:
    """Write one file, or several with an index, in Hugging Face's layout."""
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        write_file(folder / file, [by_name[name] for name in names])
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

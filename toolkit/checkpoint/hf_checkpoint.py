"""One interface to any engine's checkpoint, and checkpoints in Hugging Face's files.

`hf_export.open_checkpoint` returns a reader of fp32 weights and Adam moments, one parameter at a time. Parameter names
are those of the training model; adapters keep peft's `.default.`. Hugging Face's files are safetensors, and beside them
the `optimizer.pt` of DDP and of a single process.

transformers stores some weights under other names, or in other pieces, than the live model holds them. A mixture of
experts holds one tensor for all experts of a layer (`experts.gate_up_proj`), and its files have one per expert and
matrix. transformers converts them while it loads and saves (5.23, `core_model_loading`); here its converters run on one
tensor at a time.
"""

import copy
import gc
import json
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.inspect import Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.engines.safe_loading import torch_load
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import SavedTensor, damaged, read_weights, write_file

MOMENTS = ("exp_avg", "exp_avg_sq")
MAPPED_BYTES = 64 * 2**20  # a mapped page counts as this process's memory until its mapping is dropped
_LARGEST_STEP = 2**53
Value = TypeVar("Value")


class CheckpointReader:
    """Reads tensors of any engine's checkpoint on request, and keeps none of them.

    The readers of the engines have the same methods, and follow the structures that their libraries write. In a damaged
    file any step of that can fail: here an error names the checkpoint and what was read.
    """

    def __init__(self, layout: Layout, open_reader: Callable[[], Any]) -> None:
        self.layout = layout
        self._reader = self._read("its states", open_reader)
        self.hyperparameters: list[dict[str, Any]] = self._reader.hyperparameters
        """Of each parameter group, without the parameters; empty without optimizer states."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every saved weight."""
        return self._read("the shapes of its weights", self._reader.shapes)

    def optimized(self) -> list[str]:
        """Return the names of the parameters that have optimizer states."""
        return self._read("the names of its optimizer states", self._reader.optimized)

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight that the optimizer updates (fp32 under every preset)."""
        return self._read(name, lambda: self._reader.weight(name))

    def moment(self, name: str, state: str) -> torch.Tensor:
        """Return `exp_avg` or `exp_avg_sq`, in the weight's shape. Raises ToolkitError if the optimizer is not Adam."""

        def read() -> Any:
            try:
                return self._reader.moment(name, state)
            except KeyError:
                raise ToolkitError(
                    f"{self.layout.path} has no {state} for {name}: only Adam and AdamW in fp32 are converted",
                    hint="resume it with the preset and the number of processes that it was saved with",
                ) from None

        return self._read(f"{state} of {name}", read)

    def optimizer_step(self) -> float:
        """Return Adam's own step count."""
        step: float = self._read("the optimizer's step", self._reader.optimizer_step)
        if not (0 <= step <= _LARGEST_STEP and step == int(step)):
            raise ToolkitError(f"{self.layout.path}: the optimizer's step is {step}, expected a count")
        return step

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _read(self, what: str, read: Callable[[], Value]) -> Value:
        try:
            return read()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise ToolkitError(
                f"{self.layout.path} is damaged: {what[:80]} cannot be read ({why})", hint="copy or download it again"
            ) from error


def listed(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_parameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyperparameters of torch's parameter groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def group_hyperparameters(reader: CheckpointReader, position: int, groups: list[list[str]]) -> dict[str, object]:
    """Return the values of one of the Trainer's parameter groups; DeepSpeed drops a group without parameters."""
    saved, filled = reader.hyperparameters, [index for index, names in enumerate(groups) if names]
    if not saved:
        raise ToolkitError(f"{reader.layout.path} has no parameter groups of an optimizer")
    if len(saved) == len(groups):
        return saved[position]
    if position not in filled:
        return saved[0] | {"weight_decay": 0.0}
    return saved[filled.index(position) if len(saved) == len(filled) else 0]


class MappedFiles:
    """Files of `torch.save`, memory-mapped, and unmapped together once `MAPPED_BYTES` were read from them."""

    def __init__(self, *, trust_pickle: bool = False) -> None:
        self.read_bytes, self.load = 0, cache(partial(torch_load, trust_pickle=trust_pickle))

    def __getitem__(self, path: Path) -> Any:
        return self.load(path)

    def copy(self, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a copy of a mapped tensor, and count its bytes as read. Raises ValueError for another shape."""
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise ValueError(f"{str(getattr(tensor, 'shape', tensor))[:80]}, expected a tensor of {list(shape)}")
        self.read_bytes += tensor.nbytes
        copied: torch.Tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copied

    def release(self) -> None:
        """Unmap the files if enough was read. No view of them may be alive."""
        if self.read_bytes >= MAPPED_BYTES:
            self.close()

    def close(self) -> None:
        """Unmap the files."""
        self.load.cache_clear()
        self.read_bytes = 0
        gc.collect()


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

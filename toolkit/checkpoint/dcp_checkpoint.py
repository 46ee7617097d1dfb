"""Read and write FSDP2 checkpoints (torch's distributed checkpoints) in one process, one parameter at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from toolkit.checkpoint.detection import FSDP_MODEL, FSDP_OPTIMIZER, Layout
from toolkit.checkpoint.model_definition import MetaModel, without_adapter_name
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, group_hyperparameters
from toolkit.files.safe_loading import read_dcp_metadata, read_dcp_value

_STATE_PREFIX = ("optimizer", "state")

Readers = dict[str, Callable[[], torch.Tensor]]
"""What returns the tensor of a key, when it is written."""


class DcpReader:
    """Reads `pytorch_model_fsdp_0/` and `optimizer_0/`."""

    def __init__(self, layout: Layout, *, trust_pickle: bool = False) -> None:
        self.layout = layout
        self.model = DcpFolder(layout.path / FSDP_MODEL, trust_pickle=trust_pickle)
        self.optimizer = DcpFolder(layout.path / FSDP_OPTIMIZER, trust_pickle=trust_pickle)
        self.hyperparameters = self._hyperparameters()

    @cached_property
    def keys(self) -> dict[str, str]:
        """Parameter name to key. Adapter weights are saved without the adapter's name, optimizer states with it."""
        saved = {key.removeprefix("model."): key for key in self.model.keys}
        optimized = {without_adapter_name(name): name for name in self.optimized()}
        return {optimized.get(name, name): key for name, key in saved.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.model.shape(key) for name, key in self.keys.items()}

    def optimized(self) -> list[str]:
        paths = self.optimizer.paths.values()
        return [str(path[2]) for path in paths if path[:2] == _STATE_PREFIX and path[3] == "exp_avg"]

    def weight(self, name: str) -> torch.Tensor:
        return self.model.read(self.keys[name])

    def moment(self, name: str, state: str) -> torch.Tensor:
        return self.optimizer.read(f"optimizer.state.{name}.{state}")

    def optimizer_step(self) -> float:
        first = next(iter(self.optimized()), "")
        return float(self.optimizer.read(f"optimizer.state.{first}.step"))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        for key, path in self.optimizer.paths.items():
            if path[:2] == ("optimizer", "param_groups") and path[3] != "params":
                groups.setdefault(int(path[2]), {})[str(path[3])] = self.optimizer.read(key)
        return [groups[number] for number in sorted(groups)]


class DcpFolder:
    """One distributed checkpoint, whose metadata is read once."""

    def __init__(self, path: Path, *, trust_pickle: bool) -> None:
        self.path, self.trust_pickle = path, trust_pickle
        self.metadata = read_dcp_metadata(path, trust_pickle=trust_pickle) if path.is_dir() else None

    @property
    def keys(self) -> list[str]:
        return [] if self.metadata is None else list(self.metadata.state_dict_metadata)

    @property
    def paths(self) -> dict[str, Any]:
        return {} if self.metadata is None else dict(self.metadata.planner_data or {})

    def shape(self, key: str) -> tuple[int, ...]:
        assert self.metadata is not None
        return tuple(self.metadata.state_dict_metadata[key].size)

    def read(self, key: str) -> Any:
        assert self.metadata is not None
        entry = self.metadata.state_dict_metadata[key]
        if isinstance(entry, BytesStorageMetadata):
            return read_dcp_value(self.path, self.metadata, key, trust_pickle=self.trust_pickle)
        state: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no process group
            try:
                dcp.load(state, storage_reader=_CachedMetadataReader(self.path, self.metadata), no_dist=True)
            except CheckpointException as error:
                raise _cause(error) from None
        return state[key]


class _CachedMetadataReader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader with known metadata, instead of reading it again for every tensor."""

    def __init__(self, path: Any, metadata: Any) -> None:
        super().__init__(path)
        self.known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self.known


def write_dcp(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    """Write `pytorch_model_fsdp_0/` and `optimizer_0/`, which any number of ranks loads."""
    ties = _tied_names(model)
    shapes = model.shapes | {tied: model.shapes[first] for tied, first in ties.items()}
    rename = without_adapter_name if model.adapter else str
    weights = {rename(name): torch.empty(shape, device="meta") for name, shape in shapes.items()}
    readers: Readers = {f"model.{rename(name)}": partial(reader.weight, ties.get(name, name)) for name in shapes}
    save_dcp(folder / FSDP_MODEL, {"model": weights}, readers)
    _save_optimizer(folder / FSDP_OPTIMIZER, reader, model, groups)


def _save_optimizer(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    step = torch.tensor(reader.optimizer_step(), dtype=torch.float32)
    state: dict[str, Any] = {}
    readers: Readers = {}
    for name in [name for names in groups for name in names]:
        empty = {moment: torch.empty(model.shapes[name], device="meta") for moment in MOMENTS}
        state[name] = {"step": step, **empty}
        readers |= {f"optimizer.state.{name}.{moment}": partial(reader.moment, name, moment) for moment in MOMENTS}
    numbered = [
        {**group_hyperparameters(reader, position, groups), "params": names} for position, names in enumerate(groups)
    ]
    save_dcp(folder, {"optimizer": {"state": state, "param_groups": numbered}}, readers)


def _tied_names(model: MetaModel) -> dict[str, str]:
    """Tied name to parameter name: torch saves the weight under both."""
    if model.adapter:
        return {}
    first = {id(parameter): name for name, parameter in model.training_model.named_parameters()}
    every = model.training_model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def save_dcp(folder: Path, state: dict[str, Any], readers: Readers) -> None:
    """Write a distributed checkpoint in one process; tensors in `state` only have a shape, `readers` return them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=_LazyPlanner(readers), no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from None


def _cause(error: CheckpointException) -> BaseException:
    """What was raised on the one rank that there is: a `CheckpointException` itself is no `Exception`."""
    raised: BaseException = next((own for own, _ in error.failures.values()), error)
    return raised


class _LazyPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """torch's planner, which plans with shapes and reads each tensor when it is written."""

    def __init__(self, readers: Readers) -> None:
        super().__init__()
        self.readers = readers

    def lookup_object(self, index: Any) -> Any:
        reader = self.readers.get(index.fqn)
        return super().lookup_object(index) if reader is None else reader()

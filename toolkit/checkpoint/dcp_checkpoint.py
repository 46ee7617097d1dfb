"""Read and write torch's distributed checkpoints in one process, one parameter at a time.

FSDP2 writes one of weights and one of optimizer states. A model that transformers sharded while it loaded it has a
Hugging Face folder, and one of the optimizer in which every parameter has its own states and hyperparameters by name,
so that any mesh reads it (transformers 5.23, `save_optimizer_distributed`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from toolkit.checkpoint.hf_checkpoint import SafetensorsReader, write_weights
from toolkit.checkpoint.inspect import FSDP_MODEL, FSDP_OPTIMIZER, Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, group_hyperparameters
from toolkit.engines.safe_loading import DCP_METADATA, damage_reported, read_dcp_metadata, read_dcp_value
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER

_STATE, _GROUP = "optimizer.state.", "optimizer.param_groups."

Readers = Mapping[str, Callable[[], torch.Tensor]]
"""What returns the tensor of a key, when it is written."""


class _DcpStates:
    """Reads Adam's states by the name of the parameter; no file stays open."""

    optimizer: DcpFolder

    def optimized(self) -> list[str]:
        ending = f".{MOMENTS[0]}"
        states = [key.removeprefix(_STATE) for key in self.optimizer.keys if key.startswith(_STATE)]
        return [key.removesuffix(ending) for key in states if key.endswith(ending)]

    def moment(self, name: str, state: str) -> Any:
        return self.optimizer.read(f"{_STATE}{name}.{state}")

    def optimizer_step(self) -> float:
        return float(self.optimizer.read(f"{_STATE}{self.optimized()[0]}.step"))

    def close(self) -> None:
        pass


class DcpReader(_DcpStates):
    """Reads `pytorch_model_fsdp_0/` and `optimizer_0/`."""

    def __init__(self, layout: Layout, model: MetaModel, *, trust_pickle: bool = False) -> None:
        self.layout = layout
        self.live_names = {saved: name for name, saved in model.saved_names.items()}
        self.model = DcpFolder(layout.path / FSDP_MODEL, trust_pickle=trust_pickle)
        self.optimizer = DcpFolder(layout.path / FSDP_OPTIMIZER, trust_pickle=trust_pickle)
        groups: dict[int, dict[str, Any]] = {}
        paths = {} if self.optimizer.metadata is None else self.optimizer.metadata.planner_data or {}
        for key, path in paths.items():
            if path[:2] == ("optimizer", "param_groups") and path[3] != "params":
                groups.setdefault(int(path[2]), {})[str(path[3])] = self.optimizer.read(key)
        self.hyperparameters = [groups[number] for number in sorted(groups)]

    @cached_property
    def keys(self) -> dict[str, str]:
        """Parameter name to key. Adapter weights are saved without the adapter's name, optimizer states with it."""
        saved = {key.removeprefix("model."): key for key in self.model.keys}
        return {self.live_names.get(name, name): key for name, key in saved.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.model.keys[key].size) for name, key in self.keys.items()}

    def weight(self, name: str) -> torch.Tensor:
        return self.model.read(self.keys[name])


class AtLoadReader(_DcpStates, SafetensorsReader):
    """Reads `optimizer_dcp/` beside a Hugging Face folder's weights."""

    def __init__(self, layout: Layout, model: MetaModel, *, trust_pickle: bool = False) -> None:
        super().__init__(layout, model)
        self.optimizer = DcpFolder(layout.path / AT_LOAD_OPTIMIZER, trust_pickle=trust_pickle)
        keys = self.optimizer.keys
        prefixes = [f"{_GROUP}{names[0]}." for names in model.groups(self.optimized()) if names]
        self.hyperparameters = [
            {key.removeprefix(prefix): self.optimizer.read(key) for key in keys if key.startswith(prefix)}
            for prefix in prefixes
        ]


class DcpFolder:
    """One distributed checkpoint, whose metadata is read once."""

    def __init__(self, path: Path, *, trust_pickle: bool) -> None:
        self.path, self.trust_pickle = path, trust_pickle
        self.metadata = read_dcp_metadata(path / DCP_METADATA, trust_pickle=trust_pickle) if path.is_dir() else None
        self.keys: dict[str, Any] = {} if self.metadata is None else self.metadata.state_dict_metadata
        """What is recorded of each key."""

    def read(self, key: str) -> Any:
        assert self.metadata is not None
        entry = self.keys[key]
        if isinstance(entry, BytesStorageMetadata):
            return read_dcp_value(self.path, self.metadata, key, trust_pickle=self.trust_pickle)
        state: dict[str, Any] = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        reader = dcp.FileSystemReader(self.path)
        reader.read_metadata = lambda *_, **__: self.metadata  # it would be read again for every tensor
        with damage_reported(self.path), _in_one_process():
            dcp.load(state, storage_reader=reader, no_dist=True)
        return state[key]


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """Hide the warning about no process group, and raise what was raised on the one rank that there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:  # it is no `Exception`
            raise next((failure for failure, _ in error.failures.values()), error) from None


def write_dcp(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    """Write `pytorch_model_fsdp_0/` and `optimizer_0/`, which any number of ranks loads."""
    sources = {name: name for name in model.shapes}
    if not model.adapter:
        first: dict[int, str] = {}  # torch saves a tied weight under each of its names
        every = model.training_model.named_parameters(remove_duplicate=False)
        sources |= {name: first.setdefault(id(parameter), name) for name, parameter in every}
    saved = {model.saved_names.get(name, name): source for name, source in sources.items()}
    weights = {name: torch.empty(model.shapes[source], device="meta") for name, source in saved.items()}
    readers: Readers = {f"model.{name}": partial(reader.weight, source) for name, source in saved.items()}
    _save_dcp(folder / FSDP_MODEL, {"model": weights}, readers)
    state, readers = _states(reader, model, groups)
    param_groups = [
        {**group_hyperparameters(reader, position, groups), "params": names} for position, names in enumerate(groups)
    ]
    _save_dcp(folder / FSDP_OPTIMIZER, {"optimizer": {"state": state, "param_groups": param_groups}}, readers)


def write_at_load(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    """Write the weights and `optimizer_dcp/`, which every layout of a model that is sharded at load resumes from."""
    write_weights(folder, reader, model)
    states, readers = _states(reader, model, groups)
    state = {f"state.{name}.{key}": value for name, values in states.items() for key, value in values.items()}
    # torch loads a group only if the file has every hyperparameter that the live optimizer has.
    defaults = torch.optim.AdamW([torch.nn.Parameter(torch.empty(1))]).defaults
    for position, names in enumerate(groups):
        saved = group_hyperparameters(reader, position, groups) if names else {}
        known = {key: value for key, value in saved.items() if key in defaults or key == "initial_lr"}
        for name in names:
            values = {**defaults, "initial_lr": saved["lr"], **known}
            state |= {f"param_groups.{name}.{key}": value for key, value in values.items()}
    _save_dcp(folder / AT_LOAD_OPTIMIZER, {"optimizer": state}, readers)


def _states(
    reader: CheckpointReader, model: MetaModel, groups: list[list[str]]
) -> tuple[dict[str, dict[str, torch.Tensor]], Readers]:
    """Return each parameter's states, moments without values, and what reads these."""
    step = torch.tensor(reader.optimizer_step(), dtype=torch.float32)
    names = [name for names in groups for name in names]
    state = {
        name: {"step": step} | {moment: torch.empty(model.shapes[name], device="meta") for moment in MOMENTS}
        for name in names
    }
    return state, {
        f"{_STATE}{name}.{moment}": partial(reader.moment, name, moment) for name in names for moment in MOMENTS
    }


def _save_dcp(folder: Path, state: dict[str, Any], readers: Readers) -> None:
    """Write a distributed checkpoint in one process; tensors in `state` only have a shape, `readers` return them."""
    planner = dcp.DefaultSavePlanner()
    look_up = planner.lookup_object
    # torch plans with the shapes, and asks for each tensor when it is written
    planner.lookup_object = lambda index: readers.get(index.fqn, partial(look_up, index))()
    with _in_one_process():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=planner, no_dist=True)

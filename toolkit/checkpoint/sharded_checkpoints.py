"""Read and write the checkpoints of engines that shard, one parameter at a time in one process.

FSDP2 writes torch's distributed checkpoints, one of weights and one of optimizer states. A model that transformers
sharded while it loaded it has a Hugging Face folder, and one of the optimizer in which every parameter has its own
states and hyperparameters by name, so that any mesh reads it (transformers 5.23, `save_optimizer_distributed`).

DeepSpeed's own `zero_to_fp32` and `ds_to_universal` build the complete model in memory or a second copy on disk. The
offsets that they use are in the files: `param_slice_mappings` (ZeRO-1, 2), `param_shapes` (ZeRO-3).
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from toolkit.checkpoint.hf_checkpoint import (
    MOMENTS,
    CheckpointReader,
    MappedFiles,
    SafetensorsReader,
    group_hyperparameters,
    without_parameters,
    write_weights,
)
from toolkit.checkpoint.inspect import FSDP_MODEL, FSDP_OPTIMIZER, LATEST_UNIVERSAL, Layout, rank_of
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.engines.safe_loading import DCP_METADATA, damage_reported, read_dcp_metadata, read_dcp_value
from toolkit.engines.zero import Zero
from toolkit.errors import ToolkitError
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER
from toolkit.versions import installed_version

_STATE, _GROUP = "optimizer.state.", "optimizer.param_groups."
Readers = Mapping[str, Callable[[], torch.Tensor]]  # what returns the tensor of a key, when it is written


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


class Fragment(NamedTuple):
    """A part of one parameter in one rank's flat buffer."""

    path: Path
    group: int
    start: int
    num_elements: int


class ZeroReader:
    """Reads `global_stepN/`: one file of optimizer states per rank, and one or more of model states."""

    def __init__(self, layout: Layout, _model: MetaModel, *, trust_pickle: bool = False) -> None:
        self.layout, self.files = layout, MappedFiles(trust_pickle=trust_pickle)
        self.optim = sorted(layout.state_folder.glob("*_optim_states.pt"), key=rank_of)
        self.model = sorted(layout.state_folder.glob("*_model_states.pt"), key=rank_of)
        if not self.optim or not self.model:
            raise ToolkitError(f"{layout.state_folder} has no *_optim_states.pt and *_model_states.pt files")
        first = self._optimizer_part(self.optim[0])
        self.stage = int(getattr(first["zero_stage"], "value", first["zero_stage"]))
        self.hyperparameters = without_parameters(self._base_optimizer(self.optim[0])["param_groups"])
        counts = first.get("partition_count", len(self.optim))
        ranks = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
        if ranks != len(self.optim):
            raise ToolkitError(
                f"{self.layout.state_folder} has optimizer states of {len(self.optim)} ranks, expected {ranks}"
            )

    @cached_property
    def shapes_by_group(self) -> list[dict[str, tuple[int, ...]]]:
        groups = self.files[self.model[0]]["param_shapes"]
        groups = [groups] if isinstance(groups, dict) else groups
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    @cached_property
    def fragments(self) -> dict[str, list[Fragment]]:
        """The fragments of each trained parameter, in order."""
        fragments: dict[str, list[Fragment]] = {}
        if self.stage < 3:
            for path in self.optim:
                for group, mapping in enumerate(self._optimizer_part(path)["param_slice_mappings"]):
                    for name, address in mapping.items():
                        fragments.setdefault(name, []).append(Fragment(path, group, address.start, address.numel))
            return fragments
        for group, shapes in enumerate(self.shapes_by_group):  # equal shares of each parameter, the last one padded
            start = 0
            for name, shape in shapes.items():
                share = math.ceil(math.prod(shape) / len(self.optim))
                fragments[name] = [Fragment(path, group, start, share) for path in self.optim]
                start += share
        return fragments

    @cached_property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.files[self.model[0]]
        buffers = {name: state["module"][name].shape for name in state["buffer_names"] if name in state["module"]}
        trained = {name: shape for group in self.shapes_by_group for name, shape in group.items()}
        others = {**(state.get("frozen_param_shapes") or {}), **buffers}
        return trained | {name: tuple(shape) for name, shape in others.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.all_shapes

    def optimized(self) -> list[str]:
        return [name for group in self.shapes_by_group for name in group]

    def weight(self, name: str) -> torch.Tensor:
        if name in self.fragments:
            return self._gather(name, "fp32")
        self.files.release()
        shape = self.all_shapes[name]
        if self.stage == 3 and name in (self.files[self.model[0]].get("frozen_param_shapes") or {}):
            shards = [self.files[path]["frozen_param_fragments"][name].view(-1) for path in self.model]
            return self.files.copy(torch.cat(shards)[: math.prod(shape)].view(shape), shape)
        return self.files.copy(self.files[self.model[0]]["module"][name], shape)

    def moment(self, name: str, state: str) -> torch.Tensor:
        return self._gather(name, state)

    def optimizer_step(self) -> float:
        return float(self._base_optimizer(self.optim[0])["state"][0]["step"])

    def close(self) -> None:
        self.files.close()

    def _gather(self, name: str, state: str) -> torch.Tensor:
        self.files.release()
        shape = self.all_shapes[name]
        full, at = torch.empty(math.prod(shape)), 0
        for path, group, start, numel in self.fragments[name]:
            taken = min(numel, full.numel() - at)
            if taken <= 0:
                break
            if state == "fp32":
                masters = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
                held = self._optimizer_part(path)[masters][group]
            else:
                held = self._base_optimizer(path)["state"][group][state]
            flat = held.view(-1).narrow(0, start, taken)
            full[at : at + taken].copy_(flat)
            self.files.read_bytes += flat.nbytes
            at += taken
        if at != full.numel():
            raise ToolkitError(f"{name} has {at} elements in {self.layout.state_folder}, expected {full.numel()}")
        return full.view(shape)

    def _optimizer_part(self, path: Path) -> Any:
        return self.files[path]["optimizer_state_dict"]

    def _base_optimizer(self, path: Path) -> Any:
        part = self._optimizer_part(path)
        return part["base_optimizer_state"] if "base_optimizer_state" in part else part["optimizer_state_dict"]


def write_universal(folder: Path, reader: CheckpointReader, _model: MetaModel, groups: list[list[str]]) -> None:
    """Write a universal checkpoint, `global_stepN_universal/zero/NAME/`, which every ZeRO stage and size loads."""
    step = reader.optimizer_step()
    tag = f"global_step{int(step)}_universal"
    states = folder / tag / "zero"
    for name in [name for names in groups for name in names]:
        (states / name).mkdir(parents=True)
        torch.save({"param": reader.weight(name).float()}, states / name / "fp32.pt")
        for moment in MOMENTS:
            torch.save({"param": reader.moment(name, moment)}, states / name / f"{moment}.pt")
        torch.save(torch.tensor(step), states / name / "step.pt")
    saved = [group_hyperparameters(reader, position, groups) for position, names in enumerate(groups) if names]
    # Stage 3 copies the first group's values to all groups. Those that differ (weight decay) are left out, so that each
    # group keeps the value of the run's own arguments.
    shared = {key: value for key, value in saved[0].items() if all(group.get(key) == value for group in saved)}
    optimizer = {"state": {0: {"step": torch.tensor(step)}}, "param_groups": [shared]}
    version = {"ds_version": installed_version(Zero.name)}
    torch.save({**version, "param_groups": saved, "optimizer_state_dict": optimizer}, states / "optimizer_state.pt")
    # The module's own weights would be ignored.
    model_state: dict[str, object] = {"module": {}, "lr_scheduler": None, "global_steps": int(step), "skipped_steps": 0}
    model_state |= {"dp_world_size": 1, "mp_world_size": 1, **version}
    # Stages 1 and 2 read the first name, stage 3 the second.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model_state, folder / tag / name)
    (folder / LATEST_UNIVERSAL).write_text(tag)

"""Read DeepSpeed ZeRO checkpoints one parameter at a time, and write DeepSpeed's universal checkpoints.

DeepSpeed's own `zero_to_fp32` and `ds_to_universal` build the complete model in memory or a second copy on disk. The
offsets that they use are in the files: `param_slice_mappings` (ZeRO-1, 2), `param_shapes` (ZeRO-3).
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from toolkit.checkpoint.inspect import LATEST_UNIVERSAL, Layout, rank_of
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, MappedFiles, group_hyperparameters, without_parameters
from toolkit.engines.zero import Zero
from toolkit.errors import ToolkitError
from toolkit.versions import installed_version


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
    """Write a universal checkpoint, which every ZeRO stage and world size loads.

    `latest_universal`, `global_stepN_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`, and the global state.
    DeepSpeed's `ds_to_universal` converts DeepSpeed's own checkpoints only.
    """
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

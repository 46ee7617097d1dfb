"""Read a DeepSpeed ZeRO checkpoint, one parameter at a time.

DeepSpeed's own `zero_to_fp32` and `ds_to_universal` build the whole model in memory or a second copy on the disk;
the addresses that they go by are in the files: `param_slice_mappings` (ZeRO-1, 2), `param_shapes` (ZeRO-3).
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.layout import Layout, rank_of
from toolkit.checkpoint.torch_files import TorchFiles
from toolkit.errors import ToolkitError

Piece = tuple[Path, int, int, int]
"""A file, the group in it, and where a parameter's elements start and how many they are."""


class DeepSpeedSource:
    """`global_stepN/`: one file of optimizer states a rank, and one or more of model states."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.files = layout, TorchFiles()
        self.optim = sorted(layout.state_folder.glob("*_optim_states.pt"), key=rank_of)
        self.model = sorted(layout.state_folder.glob("*_model_states.pt"), key=rank_of)
        if not self.optim or not self.model:
            raise ToolkitError(f"{layout.state_folder} has no *_optim_states.pt and *_model_states.pt of a ZeRO run")
        first = self._optimizer_part(self.optim[0])
        self.stage = int(getattr(first["zero_stage"], "value", first["zero_stage"]))
        base = self._base_optimizer(self.optim[0])
        self.hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in base["param_groups"]]
        self._check_ranks(first)

    def _check_ranks(self, first: Any) -> None:
        counts = first.get("partition_count", len(self.optim))
        ranks = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
        if ranks != len(self.optim):
            raise ToolkitError(
                f"{self.layout.state_folder} has optimizer states of {len(self.optim)} ranks, {ranks} wrote it"
            )

    @cached_property
    def shapes_by_group(self) -> list[dict[str, tuple[int, ...]]]:
        groups = self.files[self.model[0]]["param_shapes"]
        groups = [groups] if isinstance(groups, dict) else groups
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """Where each trained parameter's elements are, in order."""
        return self._stage3_pieces() if self.stage == 3 else self._stage12_pieces()

    def _stage12_pieces(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for path in self.optim:
            for group, mapping in enumerate(self._optimizer_part(path)["param_slice_mappings"]):
                for name, address in mapping.items():
                    found.setdefault(name, []).append((path, group, address.start, address.numel))
        return found

    def _stage3_pieces(self) -> dict[str, list[Piece]]:
        """Every rank holds an equal share of every parameter, the last one padded."""
        found: dict[str, list[Piece]] = {}
        for group, shapes in enumerate(self.shapes_by_group):
            start = 0
            for name, shape in shapes.items():
                share = math.ceil(math.prod(shape) / len(self.optim))
                found[name] = [(path, group, start, share) for path in self.optim]
                start += share
        return found

    @cached_property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        shapes = self.files[self.model[0]].get("frozen_param_shapes") or {}
        return {name: tuple(shape) for name, shape in shapes.items()}

    @cached_property
    def buffers(self) -> dict[str, tuple[int, ...]]:
        state = self.files[self.model[0]]
        return {name: tuple(state["module"][name].shape) for name in state["buffer_names"] if name in state["module"]}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for group in self.shapes_by_group for name, shape in group.items()} | (
            self.frozen | self.buffers
        )

    def optimized(self) -> list[str] | None:
        return [name for group in self.shapes_by_group for name in group]

    def weight(self, name: str) -> torch.Tensor:
        if name in self.pieces:
            return self._gather(name, "fp32")
        self.files.rest()
        if self.stage == 3 and name in self.frozen:
            return self._frozen_shards(name)
        return self.files.copied(self.files[self.model[0]]["module"][name])

    def moment(self, name: str, state: str) -> torch.Tensor:
        return self._gather(name, state)

    def optimizer_step(self) -> float:
        return float(self._base_optimizer(self.optim[0])["state"][0]["step"])

    def close(self) -> None:
        self.files.close()

    def _gather(self, name: str, state: str) -> torch.Tensor:
        self.files.rest()
        shape = self.shapes()[name]
        whole, at = torch.empty(math.prod(shape)), 0
        for path, group, start, numel in self.pieces[name]:
            taken = min(numel, whole.numel() - at)
            if taken <= 0:
                break
            flat = self._flat(path, group, state).narrow(0, start, taken)
            whole[at : at + taken].copy_(flat)
            self.files.read_bytes += flat.nbytes
            at += taken
        if at != whole.numel():
            raise ToolkitError(f"{name} has {at} elements in {self.layout.state_folder}, expected {whole.numel()}")
        return whole.view(shape)

    def _flat(self, path: Path, group: int, state: str) -> torch.Tensor:
        if state == "fp32":
            masters = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            flat: torch.Tensor = self._optimizer_part(path)[masters][group]
        else:
            flat = self._base_optimizer(path)["state"][group][state]
        return flat.view(-1)

    def _optimizer_part(self, path: Path) -> Any:
        return self.files[path]["optimizer_state_dict"]

    def _base_optimizer(self, path: Path) -> Any:
        part = self._optimizer_part(path)
        return part["base_optimizer_state"] if "base_optimizer_state" in part else part["optimizer_state_dict"]

    def _frozen_shards(self, name: str) -> torch.Tensor:
        shards = [self.files[path]["frozen_param_fragments"][name].view(-1) for path in self.model]
        shape = self.frozen[name]
        return self.files.copied(torch.cat(shards)[: math.prod(shape)].view(shape))

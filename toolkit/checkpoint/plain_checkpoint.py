"""Read and write the checkpoints of DDP and of a single process: safetensors and `optimizer.pt`.

The optimizer's states are numbered in the order of the Trainer's parameter groups; the model's own order names them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.detection import Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, MappedFiles, group_hyperparameters
from toolkit.checkpoint.stored_weights import (
    DEFAULT_SHARD_BYTES,
    WeightFiles,
    live_weights,
    stored_tensors,
    write_model,
)
from toolkit.errors import ToolkitError


class SafetensorsReader:
    """Reads the weights of a checkpoint from `model.safetensors`, or shards, or an adapter."""

    def __init__(self, layout: Layout, model: MetaModel) -> None:
        self.layout, self.model, self.saved_names = layout, model, model.saved_names
        self.weights = live_weights(WeightFiles(layout.path), model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names = {saved: name for name, saved in self.saved_names.items()}
        return {names.get(saved, saved): shape for saved, shape in self.weights.shapes().items()}

    def weight(self, name: str) -> torch.Tensor:
        return self.weights.read(self.saved_names.get(name, name))


class PlainReader(SafetensorsReader):
    """Reads `optimizer.pt` beside the weights."""

    def __init__(self, layout: Layout, model: MetaModel, *, trust_pickle: bool = False) -> None:
        super().__init__(layout, model)
        self.files = MappedFiles(trust_pickle=trust_pickle)
        path = layout.path / "optimizer.pt"
        self.optimizer_file = path if path.exists() else None
        groups = self.files[path]["param_groups"] if path.exists() else []
        self.hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self.group_sizes = [len(group["params"]) for group in groups]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter's optimizer state.

        Raises ToolkitError where the model does not tell which parameter a numbered state belongs to.
        """
        groups = self.model.groups(self.model.trainable)
        sizes, found = [len(group) for group in groups if group], [size for size in self.group_sizes if size]
        if found and found != sizes:
            raise ToolkitError(
                f"{self.layout.path}/optimizer.pt has parameter groups of {found}, the model's are {sizes}: with frozen"
                " layers or a custom optimizer the file does not record which parameter a state belongs to",
                hint="resume it with the preset and the number of processes that it was saved with",
            )
        return {name: number for number, name in enumerate(name for group in groups for name in group)}

    def optimized(self) -> list[str]:
        return [] if self.optimizer_file is None else list(self.numbers)

    def moment(self, name: str, state: str) -> torch.Tensor:
        self.files.release()
        return self.files.copy(self._states()[self.numbers[name]][state], self.model.shapes[name])

    def optimizer_step(self) -> float:
        return float(next(iter(self._states().values()))["step"])

    def close(self) -> None:
        self.files.close()

    def _states(self) -> Any:
        assert self.optimizer_file is not None
        return self.files[self.optimizer_file]["state"]


def write_weights(folder: Path, reader: CheckpointReader, model: MetaModel) -> None:
    """Write the weights in fp32, as Hugging Face's files; an adapter's in one file, which is what peft reads."""
    tensors = stored_tensors(model, torch.float32, reader.weight)
    limit = sum(tensor.bytes for tensor in tensors) if model.adapter else DEFAULT_SHARD_BYTES
    write_model(folder, tensors, max_shard_bytes=limit, stem="adapter_model" if model.adapter else "model")


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

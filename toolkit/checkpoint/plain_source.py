"""Read what DDP and a single process write: safetensors and `optimizer.pt`.

The optimizer's states are numbered, not named: `Names` (from the model's own order) says which is whose.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.checkpoint.layout import ADAPTER_WEIGHTS, FULL_WEIGHTS, Layout
from toolkit.checkpoint.torch_files import TorchFiles


class PlainSource:
    """`model.safetensors` (or shards, or an adapter) and `optimizer.pt`."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.files = layout, TorchFiles()
        self.numbers: dict[str, int] = {}
        self.saved_names: dict[str, str] = {}
        path = layout.path / "optimizer.pt"
        self.optimizer_file = path if path.exists() else None
        groups = self.files[path]["param_groups"] if path.exists() else []
        self.group_sizes = [len(group["params"]) for group in groups]
        self.hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def name_states(self, ordered: list[str], saved_names: dict[str, str]) -> None:
        """Say which parameter each numbered state belongs to, and under which name its weight was saved."""
        self.numbers = {name: number for number, name in enumerate(ordered)}
        self.saved_names = saved_names

    @cached_property
    def weights(self) -> WeightFiles:
        return WeightFiles(self.layout.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        back = {saved: name for name, saved in self.saved_names.items()}
        return {back.get(saved, saved): shape for saved, shape in self.weights.shapes().items()}

    def optimized(self) -> list[str] | None:
        return list(self.numbers) or None

    def weight(self, name: str) -> torch.Tensor:
        return self.weights.read(self.saved_names.get(name, name))

    def moment(self, name: str, state: str) -> torch.Tensor:
        self.files.rest()
        return self.files.copied(self._states()[self.numbers[name]][state])

    def optimizer_step(self) -> float:
        return float(next(iter(self._states().values()))["step"])

    def close(self) -> None:
        self.files.close()

    def _states(self) -> Any:
        assert self.optimizer_file is not None
        return self.files[self.optimizer_file]["state"]


class WeightFiles:
    """The safetensors of a folder, whole, in shards, or an adapter's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def files(self) -> dict[str, Path]:
        """Tensor name to file."""
        index = self.folder / FULL_WEIGHTS[1]
        if index.exists():
            return {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        names = (FULL_WEIGHTS[0], ADAPTER_WEIGHTS)
        path = next(self.folder / name for name in names if (self.folder / name).exists())
        with safe_open(path, "pt") as file:
            return {name: path for name in file.keys()}  # noqa: SIM118  (no mapping, despite its method)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in sorted(set(self.files.values())):
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own: the file's mapping ends here."""
        with safe_open(self.files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name).clone()
        return tensor

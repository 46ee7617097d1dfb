"""Read and write checkpoints of models that transformers sharded while it loaded them, one parameter at a time.

The weights are a Hugging Face folder. The optimizer is a distributed checkpoint in which every parameter has its own
states and hyperparameters by name, so that any mesh reads it (transformers 5.23, `save_optimizer_distributed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.dcp_checkpoint import DcpFolder, Readers, save_dcp
from toolkit.checkpoint.detection import Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.plain_checkpoint import SafetensorsReader, write_weights
from toolkit.checkpoint.reader import MOMENTS, CheckpointReader, group_hyperparameters
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER

_STATE, _GROUP = "optimizer.state.", "optimizer.param_groups."


class AtLoadReader(SafetensorsReader):
    """Reads `optimizer_dcp/` beside the weights."""

    def __init__(self, layout: Layout, model: MetaModel, *, trust_pickle: bool = False) -> None:
        super().__init__(layout, model)
        self.optimizer = DcpFolder(layout.path / AT_LOAD_OPTIMIZER, trust_pickle=trust_pickle)
        self.hyperparameters = [self._hyperparameters(names[0]) for names in model.groups(self.optimized()) if names]

    def optimized(self) -> list[str]:
        ending = f".{MOMENTS[0]}"
        states = [key.removeprefix(_STATE) for key in self.optimizer.keys if key.startswith(_STATE)]
        return [key.removesuffix(ending) for key in states if key.endswith(ending)]

    def moment(self, name: str, state: str) -> torch.Tensor:
        moment: torch.Tensor = self.optimizer.read(f"{_STATE}{name}.{state}")
        return moment

    def optimizer_step(self) -> float:
        return float(self.optimizer.read(f"{_STATE}{self.optimized()[0]}.step"))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _hyperparameters(self, name: str) -> dict[str, Any]:
        prefix = f"{_GROUP}{name}."
        keys = [key for key in self.optimizer.keys if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.optimizer.read(key) for key in keys}


def write_at_load(folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]) -> None:
    """Write the weights and `optimizer_dcp/`, which every layout of a model that is sharded at load resumes from."""
    write_weights(folder, reader, model)
    step = torch.tensor(reader.optimizer_step(), dtype=torch.float32)
    state: dict[str, Any] = {}
    readers: Readers = {}
    for position, names in enumerate(groups):
        if not names:
            continue
        hyperparameters = _hyperparameters_of_adamw(group_hyperparameters(reader, position, groups))
        for name in names:
            state |= {f"state.{name}.{moment}": torch.empty(model.shapes[name], device="meta") for moment in MOMENTS}
            state[f"state.{name}.step"] = step
            readers |= {f"{_STATE}{name}.{moment}": partial(reader.moment, name, moment) for moment in MOMENTS}
            state |= {f"param_groups.{name}.{key}": value for key, value in hyperparameters.items()}
    save_dcp(folder / AT_LOAD_OPTIMIZER, {"optimizer": state}, readers)


def _hyperparameters_of_adamw(saved: Mapping[str, object]) -> dict[str, object]:
    """Complete the hyperparameters: torch loads a group only if the file has every one that the live optimizer has."""
    defaults = torch.optim.AdamW([torch.nn.Parameter(torch.empty(1))]).defaults
    known = {name: value for name, value in saved.items() if name in defaults or name == "initial_lr"}
    return {**defaults, "initial_lr": saved["lr"], **known}

"""Write FSDP2's distributed checkpoint in one process; any number of ranks loads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from toolkit.checkpoint.description import Skeleton
from toolkit.checkpoint.layout import FSDP_MODEL, FSDP_OPTIMIZER
from toolkit.checkpoint.names import without_adapter_name
from toolkit.checkpoint.plain_target import hyperparameters
from toolkit.checkpoint.source import MOMENTS, Source

Readers = dict[str, Callable[[], torch.Tensor]]


def write_dcp(folder: Path, source: Source, skeleton: Skeleton, groups: list[list[str]]) -> None:
    """`pytorch_model_fsdp_0/` and `optimizer_0/`, each tensor read when it is written."""
    ties = _ties(skeleton)
    shapes = skeleton.shapes | {tied: skeleton.shapes[first] for tied, first in ties.items()}
    rename = without_adapter_name if skeleton.adapter else str
    model = {rename(name): torch.empty(shape, device="meta") for name, shape in shapes.items()}
    readers: Readers = {f"model.{rename(name)}": partial(source.weight, ties.get(name, name)) for name in shapes}
    _save(folder / FSDP_MODEL, {"model": model}, readers)
    _save_optimizer(folder / FSDP_OPTIMIZER, source, skeleton, groups)


def _save_optimizer(folder: Path, source: Source, skeleton: Skeleton, groups: list[list[str]]) -> None:
    step = torch.tensor(source.optimizer_step(), dtype=torch.float32)
    state: dict[str, Any] = {}
    readers: Readers = {}
    for name in [name for names in groups for name in names]:
        empty = {moment: torch.empty(skeleton.shapes[name], device="meta") for moment in MOMENTS}
        state[name] = {"step": step, **empty}
        readers |= {f"optimizer.state.{name}.{moment}": partial(source.moment, name, moment) for moment in MOMENTS}
    numbered = [{**hyperparameters(source, position, groups), "params": names} for position, names in enumerate(groups)]
    _save(folder, {"optimizer": {"state": state, "param_groups": numbered}}, readers)


def _ties(skeleton: Skeleton) -> dict[str, str]:
    """Tied name to the name under which the weight is a parameter: torch saves both."""
    if skeleton.adapter:
        return {}
    first = {id(parameter): name for name, parameter in skeleton.model.named_parameters()}
    every = skeleton.model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _save(folder: Path, state: dict[str, Any], readers: Readers) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there, which is meant
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=_Lazy(readers), no_dist=True)


class _Lazy(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """torch's planner, planning with shapes and reading each tensor when its turn to be written comes."""

    def __init__(self, readers: Readers) -> None:
        super().__init__()
        self.readers = readers

    def lookup_object(self, index: Any) -> Any:
        reader = self.readers.get(index.fqn)
        return super().lookup_object(index) if reader is None else reader()

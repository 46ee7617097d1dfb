"""Write what DDP and a single process resume from: safetensors and `optimizer.pt`."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.checkpoint.description import Skeleton
from toolkit.checkpoint.source import MOMENTS, Source
from toolkit.checkpoint.tensors_file import write_model
from toolkit.checkpoint.weights import model_entries

MAX_SHARD_BYTES = 5 * 10**9


def write_plain(folder: Path, source: Source, skeleton: Skeleton, groups: list[list[str]]) -> None:
    """The whole model, and torch's own optimizer state: numbered in the order of the groups."""
    stem = "adapter_model" if skeleton.adapter else "model"
    entries = model_entries(source, skeleton, torch.float32)
    limit = sum(entry.bytes for entry in entries) if skeleton.adapter else MAX_SHARD_BYTES
    write_model(folder, entries, max_shard_bytes=limit, stem=stem)
    step = source.optimizer_step()
    state, param_groups, number = {}, [], 0
    # The Trainer makes a group even where no parameter is in it: adapters have no norm.
    for position, names in enumerate(groups):
        numbers = list(range(number, number + len(names)))
        number += len(names)
        for place, name in zip(numbers, names, strict=True):
            moments = {moment: source.moment(name, moment) for moment in MOMENTS}
            state[place] = {"step": torch.tensor(step, dtype=torch.float32), **moments}
        param_groups.append({**hyperparameters(source, position, groups), "params": numbers})
    torch.save({"state": state, "param_groups": param_groups}, folder / "optimizer.pt")


def hyperparameters(source: Source, position: int, groups: list[list[str]]) -> dict[str, object]:
    """Of one of the Trainer's two groups. DeepSpeed drops a group without parameters; torch keeps it."""
    known = source.hyperparameters
    if len(known) == len(groups):
        return known[position]
    filled = [index for index, names in enumerate(groups) if names]
    group = dict(known[filled.index(position)] if position in filled and len(known) == len(filled) else known[0])
    return group if position in filled else group | {"weight_decay": 0.0}

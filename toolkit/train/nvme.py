"""NVMe offload inside a rank: the folder is named before DeepSpeed reads it, the buffers are sized from the model.

A preset's file knows neither the disk nor the model. `"nvme_path": "auto"` is accelerate's to fill, from the
environment; `buffer_size` and `buffer_count`, where the file leaves them out, are filled here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.runs.nvme import ACCELERATE_VARIABLES, NAME_A_DISK, NVME_PATH_VARIABLE, nvme_blocks, swap_folder
from toolkit.train.modelling import model_without_weights

RUN_ID_VARIABLE = "TOOLKIT_RUN_ID"


def name_swap_folder() -> Path | None:
    """Give accelerate this run's own folder on the disk that the environment names, if it names one.

    The ranks of a machine agree on it without a word: they share the launcher's id, or the launcher itself.
    """
    run_id = os.environ.get(RUN_ID_VARIABLE) or f"pid{os.getppid()}"
    named = [os.environ.get(name) for name in (NVME_PATH_VARIABLE, *ACCELERATE_VARIABLES.values())]
    given = next(filter(None, named), None)
    if given is None:
        return None
    folder = swap_folder(Path(given).expanduser().absolute(), run_id)
    for variable in ACCELERATE_VARIABLES.values():
        os.environ[variable] = str(folder)
    return folder


def prepare_nvme(training: Any, model_arguments: Any) -> dict[str, Any] | None:
    """Size the buffers, and refuse a run without a disk; what is in force, or None without NVMe offload.

    Called after `TrainingArguments` exist, and before the model is loaded: loading swaps already.
    """
    plugin = training.deepspeed_plugin
    blocks = {} if plugin is None else nvme_blocks(plugin.deepspeed_config.get("zero_optimization") or {})
    if not blocks:
        return None
    for name, block in blocks.items():
        if str(block.get("nvme_path", "none")) in ("none", "auto"):
            raise ToolkitError(f"{name} is on NVMe, and no disk is named", hint=NAME_A_DISK)
    facts: dict[str, Any] = {"swap_folder": str(next(iter(blocks.values()))["nvme_path"])}
    if (param := blocks.get("offload_param")) is not None:
        sizes = buffers(_partitions(model_arguments, training.world_size))
        for name, value in sizes.items():
            if param.get(name, "auto") == "auto":
                param[name] = value
            facts[name] = param[name]
    plugin.set_deepspeed_weakref()  # what `from_pretrained` reads is a copy
    return facts


def buffers(partitions: Mapping[str, list[int]]) -> dict[str, int]:
    """One buffer holds the largest partition; there is one for each tensor that is gathered at a time.

    >>> buffers({"attention": [8, 4], "head": [100]})
    {'buffer_size': 100, 'buffer_count': 2}
    """
    largest = max((size for sizes in partitions.values() for size in sizes), default=1)
    return {"buffer_size": largest, "buffer_count": max(2, *map(len, partitions.values()))}


def _partitions(model_arguments: Any, world_size: int) -> dict[str, list[int]]:
    """Elements on one rank of each module's own tensors and its children's: what loading gathers together."""
    model = model_without_weights(model_arguments)
    return {
        name: [
            ceil(parameter.numel() / world_size)
            for part in (module, *module.children())
            for parameter in part.parameters(recurse=False)
        ]
        for name, module in model.named_modules()
    }


def swap_bytes(facts: Mapping[str, Any]) -> int:
    """What the swap files of this machine's ranks take on the disk."""
    return sum(file.stat().st_size for file in Path(facts["swap_folder"]).rglob("*.swp"))

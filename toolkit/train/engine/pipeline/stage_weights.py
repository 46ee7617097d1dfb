"""Read the weights of single stages from a model folder or the hub, and write all of them as one model folder.

Every rank writes one safetensors file with the names of the whole model, and rank 0 the index: `from_pretrained` loads
the folder as it is, without a merge.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from toolkit.errors import ToolkitError
from toolkit.files.json_files import read_json_object
from toolkit.files.model_weights import read_weights
from toolkit.record.folder import write_json


def weights_reader(name: str, revision: str) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one tensor by name, from a local folder or a hub id.

    Of a hub id with several files, only those that hold the tensors that are read are downloaded.
    """
    find = _local_files(Path(name)) if Path(name).is_dir() else _hub_files(name, revision)
    opened: dict[str, Any] = {}

    def read(tensor: str) -> torch.Tensor:
        path = find(tensor)
        if path is None:
            raise ToolkitError(
                f"model {name!r} has no tensor {tensor!r}, which a stage of the pipeline needs",
                hint="`--preset fsdp2` loads it through transformers, which converts older names",
            )
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        loaded: torch.Tensor = opened[path].get_tensor(tensor)
        return loaded

    return read


def _local_files(folder: Path) -> Callable[[str], str | None]:
    stored = read_weights(folder)
    return lambda tensor: str(stored[tensor].path) if tensor in stored else None


def _hub_files(name: str, revision: str) -> Callable[[str], str | None]:
    found = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
    if found is None:
        single = cached_file(name, SAFE_WEIGHTS_NAME, revision=revision)
        with safe_open(single, framework="pt") as file:
            names = set(file.keys())
        return lambda tensor: single if tensor in names else None
    file_of = read_json_object(Path(found))["weight_map"]
    return lambda tensor: cached_file(name, file_of[tensor], revision=revision) if tensor in file_of else None


def write_part(folder: Path, tensors: dict[str, torch.Tensor], *, part: int, parts: int) -> dict[str, str]:
    """Write one rank's tensors, and return the index of their names."""
    file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    return dict.fromkeys(tensors, file)


def write_index(folder: Path, weight_map: dict[str, str], *, total_bytes: int) -> None:
    """Write the index over the files of all ranks."""
    write_json(
        folder / SAFE_WEIGHTS_INDEX_NAME,
        {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))},
    )

"""Read and write a model's safetensors files one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from toolkit.files.model_weights import damaged, read_weights
from toolkit.files.safetensors_writer import SavedTensor, write_file

DEFAULT_SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightFiles:
    """The safetensors of a folder: one file, shards with an index, or an adapter's file; all headers are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_weights(folder)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor; the file is unmapped again."""
        path = self.tensors[name].path
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from None
        return tensor


def write_model(folder: Path, tensors: Sequence[SavedTensor], *, max_shard_bytes: int, stem: str = "model") -> None:
    """Write one file, or several with an index, in Hugging Face's layout."""
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / f"{stem}.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = {"total_size": sum(tensor.bytes for tensor in tensors)}
    index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
    (folder / f"{stem}.safetensors.index.json").write_text(index + "\n")


def _shards(tensors: Sequence[SavedTensor], max_shard_bytes: int) -> list[list[SavedTensor]]:
    shards: list[list[SavedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + tensor.bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards

"""Read and write a model's safetensors files one tensor at a time.

safetensors' own writer needs all tensors of a file in memory at once; the format's header needs only names, dtypes
and shapes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.files.model_weights import read_weights
from toolkit.files.safetensors_header import damaged

DEFAULT_SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_CODES = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}


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
        return {name: tensor.entry.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor; the file is unmapped again."""
        path = self.tensors[name].path
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise damaged(path, str(error)) from None
        return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor to be written: `read` is called when its turn comes, and its result is cast to `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def write_model(folder: Path, tensors: Sequence[SavedTensor], *, max_shard_bytes: int, stem: str = "model") -> None:
    """Write one file, or several with an index, in Hugging Face's layout."""
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / f"{stem}.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
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


def _write_file(path: Path, tensors: Sequence[SavedTensor]) -> None:
    with path.open("wb") as file:
        header = _header(tensors)
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            values = tensor.read().to(tensor.dtype).contiguous()
            assert tuple(values.shape) == tensor.shape, f"{tensor.name}: {tuple(values.shape)}, expected {tensor.shape}"
            file.write(memoryview(values.view(-1).view(torch.uint8).numpy()))


def _header(tensors: Sequence[SavedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        code = _DTYPE_CODES[tensor.dtype]
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)

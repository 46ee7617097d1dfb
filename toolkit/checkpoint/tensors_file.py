"""Write safetensors one tensor at a time: the format's header needs only names, dtypes and shapes.

safetensors' own writer wants a whole file's tensors in memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODES = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def write_safetensors(path: Path, entries: Sequence[Entry]) -> None:
    """One file; each tensor is read, cast, written and let go of."""
    with path.open("wb") as file:
        header = _header(entries)
        file.write(len(header).to_bytes(8, "little") + header)
        for entry in entries:
            tensor = entry.read().to(entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, f"{entry.name}: {tuple(tensor.shape)}, expected {entry.shape}"
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.bytes
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_model(folder: Path, entries: Sequence[Entry], *, max_shard_bytes: int, stem: str = "model") -> list[Path]:
    """One file, or several with an index, in Hugging Face's layout."""
    shards = _shards(entries, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", shards[0])
        return [folder / f"{stem}.safetensors"]
    weight_map: dict[str, str] = {}
    paths = []
    for number, shard in enumerate(shards, 1):
        paths.append(folder / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors")
        write_safetensors(paths[-1], shard)
        weight_map |= {entry.name: paths[-1].name for entry in shard}
    total = {"total_size": sum(entry.bytes for entry in entries)}
    index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
    (folder / f"{stem}.safetensors.index.json").write_text(index + "\n")
    return paths


def _shards(entries: Sequence[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + entry.bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    return shards

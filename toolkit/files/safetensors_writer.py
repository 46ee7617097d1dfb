"""Write a safetensors file one tensor at a time, while other threads run.

safetensors' own writer needs all tensors of a file in memory at once, and holds the GIL until they are written; the
format's header needs only names, dtypes and shapes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DTYPE_CODES = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}


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


def write_file(path: Path, tensors: Sequence[SavedTensor]) -> None:
    """Write one safetensors file."""
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

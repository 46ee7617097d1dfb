"""The weights of a model folder: read from the headers of its safetensors files, without torch, and written."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import ToolkitError
from toolkit.files.documents import as_mapping, open_file, parse_json, read_json_object, unexpected

if TYPE_CHECKING:
    import torch

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the library's limit
# Bits of an element of each dtype: https://github.com/huggingface/safetensors#format
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
_PICKLED = "pytorch_model*.bin"
_AGAIN = "copy or download it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    dtype: str  # as the format spells it: `BF16`
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, from its header, which must account for every byte.

    The library reads headers with numpy or torch alone. Raises ToolkitError for a file that is cut off or damaged.
    """
    with open_file(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(MAX_HEADER_BYTES, size) else b""
    try:
        header = as_mapping(parse_json(text.decode(), "its header"), "its header")
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (begin, next_begin) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
                raise ValueError(f"shape of {name[:80]}")
            if begin != end or 8 * (next_begin - begin) != BITS[dtype] * math.prod(shape):
                raise ValueError(f"bytes of {name[:80]}")
            tensors[name], end = StoredTensor(path=path, dtype=dtype, shape=shape), next_begin
    except (ToolkitError, LookupError, TypeError, ValueError) as error:
        raise damaged(path, error) from None
    if 8 + length + end != size:
        raise damaged(path, ValueError(f"{size:,} bytes, expected {8 + length + end:,}"))
    return tensors


def damaged(path: Path, error: Exception) -> ToolkitError:
    """Return the error for a safetensors file that cannot be used."""
    return ToolkitError(f"{path} is damaged: {str(error)[:200]}", hint=_AGAIN)


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model or an adapter by name.

    Raises ToolkitError for a folder without safetensors, for a damaged file, and for an index that names files outside
    the folder, missing files, or tensors that are not in them.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        path = next((folder / name for name in (SINGLE_FILE, ADAPTER_FILE) if os.path.lexists(folder / name)), None)
        if path is not None:
            return read_header(path)
        if any(folder.glob(_PICKLED)):
            what = f"{folder} has its weights in pickles ({_PICKLED}), expected safetensors: a pickle can run code"
            hint = "load it with transformers where you trust it, and `save_pretrained` it again"
            raise ToolkitError(what, hint=hint)
        raise ToolkitError(f"{folder} has no {SINGLE_FILE}, {INDEX} or {ADAPTER_FILE}", hint=_AGAIN)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unexpected(index, "weight_map", weight_map, "a file for each tensor")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file:
            raise unexpected(index, f"weight_map.{name[:80]}", file, "the name of a file in this folder")
        if file not in headers:
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise ToolkitError(f"{index}: {name[:80]} is not in {file}", hint=_AGAIN)
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def check_weights(folder: Path) -> None:
    """Check the weights of a model folder before a run loads them: the headers of safetensors, the kind of other files.

    Raises ToolkitError as `read_weights` does, and for a pickle that `torch.save` has not written.
    """
    if any(os.path.lexists(folder / name) for name in (SINGLE_FILE, INDEX)):
        read_weights(folder)
        return
    pickles = sorted(folder.glob(_PICKLED))
    if not pickles and not any(folder.glob("*.safetensors")):  # weights under names of their own
        raise ToolkitError(f"model folder {folder} has no weights (*.safetensors or *.bin)")
    for path in pickles:
        with open_file(path) as file:
            if not zipfile.is_zipfile(file):
                raise ToolkitError(f"{path} was not written by torch.save, or is cut off", hint=_AGAIN)


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
    """Write one safetensors file, one tensor at a time, while other threads run.

    The library's own writer needs all tensors of a file in memory at once, and holds the GIL until they are written;
    the format's header needs only names, dtypes and shapes (https://github.com/huggingface/safetensors#format).
    """
    import torch

    codes = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    codes |= {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset := offset + tensor.bytes]
        header[tensor.name] = {"dtype": codes[tensor.dtype], "shape": tensor.shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = tensor.read().to(tensor.dtype).contiguous()
            assert tuple(values.shape) == tensor.shape, f"{tensor.name}: {tuple(values.shape)}, expected {tensor.shape}"
            file.write(memoryview(values.view(-1).view(torch.uint8).numpy()))

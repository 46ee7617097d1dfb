"""The header of a safetensors file: names, dtypes, shapes and offsets, checked against the file's size.

Format: eight bytes of length, a JSON object, then the tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from toolkit.errors import ToolkitError
from toolkit.files.json_files import as_mapping, parse_json
from toolkit.files.reading import open_file

# The library's own limit (`MAX_HEADER_SIZE`).
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA = "__metadata__"
# torch's own limit; to multiply a million lengths takes minutes.
MAX_DIMENSIONS = 64
BYTES_PER_ELEMENT = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    """As the format spells it: `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Byte offset of its first element, counted from the end of the header."""
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file by name.

    Raises ToolkitError for a file that is cut off or damaged, and for a header that contradicts itself or the file.
    """
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise damaged(path, f"its header would have {length:,} of its {size:,} bytes")
        text = file.read(length)
    try:
        content = as_mapping(parse_json(text.decode(), f"{path}: its header"), f"{path}: its header")
    except UnicodeDecodeError:
        raise damaged(path, "its header is not text") from None
    metadata = content.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, f"{METADATA} is {str(metadata)[:80]}, expected keys and text")
    entries = {name: _entry(path, name, value) for name, value in content.items() if name != METADATA}
    _check_offsets(path, entries, size - LENGTH_BYTES - length)
    return entries


def damaged(path: Path, why: str) -> ToolkitError:
    """Return the error for a safetensors file that cannot be used."""
    return ToolkitError(f"{path} is damaged: {why}", hint="copy or download it again")


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BYTES_PER_ELEMENT:
        raise damaged(path, f"tensor {name[:80]!r} has the dtype {str(dtype)[:40]!r}, unknown to the format")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise damaged(path, f"tensor {name[:80]!r} has the shape {str(shape)[:80]}, its offsets {str(offsets)[:80]}")
    entry = TensorEntry(dtype=dtype, shape=tuple(shape), start=offsets[0], end=offsets[1])
    if len(shape) > MAX_DIMENSIONS or entry.elements * BYTES_PER_ELEMENT[dtype] != entry.end - entry.start:
        size = f"{entry.end - entry.start:,} bytes"
        raise damaged(path, f"tensor {name[:80]!r} has {size} for {dtype} {str(shape)[:80]}")
    return entry


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_offsets(path: Path, entries: Mapping[str, TensorEntry], num_bytes: int) -> None:
    """The tensors lie behind each other, and fill the file."""
    spans = sorted((entry.start, entry.end) for entry in entries.values())
    ends = [(0, 0), *spans, (num_bytes, num_bytes)]
    for (_, end), (start, _) in pairwise(ends):
        if start != end:
            raise damaged(path, f"its tensors end at byte {end:,} and the next start at {start:,}")

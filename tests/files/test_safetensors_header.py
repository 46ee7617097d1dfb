"""A safetensors header is believed only where it agrees with itself and with the file's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import ToolkitError
from toolkit.files.safetensors_header import MAX_HEADER_BYTES, read_header

TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, *, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * data)
    return path


def test_the_librarys_own_file_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(0, 5), "c": torch.zeros((), dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "own.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "own.safetensors")
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F32", (0, 5)),
        "c": ("BF16", ()),
    }
    assert found["a"].elements == 6


@pytest.mark.parametrize(
    ("header", "given"),
    [
        ({"a": TENSOR}, {"data": 23}),
        ({"a": TENSOR}, {"data": 25}),
        ({"a": TENSOR}, {"length": 0}),
        ({"a": TENSOR}, {"length": 2**63}),
        ({"a": TENSOR}, {"length": 2**64 - 1}),
        ({"a": TENSOR}, {"length": MAX_HEADER_BYTES + 1}),
        ({"a": TENSOR | {"dtype": "F33"}}, {}),
        ({"a": TENSOR | {"dtype": ["F32"]}}, {}),
        ({"a": TENSOR | {"dtype": None}}, {}),
        ({"a": TENSOR | {"dtype": "BF16"}}, {}),
        ({"a": TENSOR | {"shape": [2, 4]}}, {}),
        ({"a": TENSOR | {"shape": [-2, -3]}}, {}),
        ({"a": TENSOR | {"shape": [2.0, 3]}}, {}),
        ({"a": TENSOR | {"shape": [True, 6]}}, {}),
        ({"a": TENSOR | {"shape": "23"}}, {}),
        ({"a": TENSOR | {"shape": [2**62, 2**62]}}, {}),
        ({"a": TENSOR | {"shape": [2**63] * 5_000}}, {}),
        ({"a": TENSOR | {"shape": [2**64 - 1] * 1_000_000}}, {}),
        ({"a": TENSOR | {"data_offsets": [24, 0]}}, {}),
        ({"a": TENSOR | {"data_offsets": [0]}}, {}),
        ({"a": TENSOR | {"data_offsets": {"0": 0}}}, {}),
        ({"a": TENSOR | {"data_offsets": [8, 32]}}, {"data": 32}),
        ({"a": TENSOR, "b": TENSOR}, {}),
        ({"a": TENSOR, "b": TENSOR | {"data_offsets": [12, 36]}}, {"data": 36}),
        ({"a": None}, {}),
        ({"a" * 100_000: 5}, {}),
        ({"a": {"dtype": "F32"}}, {}),
        ([TENSOR], {}),
        (b"{}" * 3, {}),
        (b"\xff\xfe{}", {}),
        (b"[" * 100_000, {}),
        (b'{"a":' * 100_000, {}),
        (b'{"a": NaN}', {}),
        (b"", {"data": 0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_lies_is_refused(header: Any, given: dict[str, int], tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, **given)
    with pytest.raises(ToolkitError, match=r"model\.safetensors") as refused:
        read_header(path)
    assert len(refused.value.message) < 400


@pytest.mark.parametrize("size", [0, 1, 7, 8, 40])
def test_a_file_that_is_cut_off_is_refused(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": TENSOR})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ToolkitError, match="is damaged: its header"):
        read_header(path)

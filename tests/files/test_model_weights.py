"""The headers of safetensors files are read without torch, and a damaged file or index is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import ToolkitError
from toolkit.files.model_weights import check_weights, read_header, read_weights

TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, *, data: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * data)
    return path


def test_the_librarys_own_file_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(0, 5), "c": torch.zeros((), dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "own.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "own.safetensors")
    facts = {name: (tensor.dtype, tensor.shape) for name, tensor in header.items()}
    assert facts == {"a": ("F32", (2, 3)), "b": ("F32", (0, 5)), "c": ("BF16", ())}
    assert header["a"].elements == 6


@pytest.mark.parametrize(
    ("header", "given"),
    [
        ({"a": TENSOR}, {"data": 23}),
        ({"a": TENSOR}, {"length": 2**63}),
        ({"a": TENSOR | {"shape": [2**64 - 1] * 5_000}}, {}),
        ({"a" * 100_000: 5}, {}),
        (b"", {"data": 0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_lies_is_refused(header: Any, given: dict[str, int], tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, **given)
    with pytest.raises(ToolkitError, match=r"model\.safetensors is damaged: ") as refused:
        read_header(path)
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "holds list"),
        ({"weight_map": []}, r"weight_map is \[\]"),
        ({"weight_map": {"a": 5}}, r"weight_map\.a is 5"),
        ({"weight_map": {"a": "../../secret"}}, r"weight_map\.a is '\.\./\.\./secret'"),
        ({"weight_map": {"a": "missing.safetensors"}}, "no such file"),
        ({"weight_map": {"b": "model.safetensors"}}, "b is not in model.safetensors"),
    ],
    ids=str,
)
def test_an_index_that_names_what_is_not_there_is_refused(index: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": TENSOR})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ToolkitError, match=message):
        read_weights(tmp_path)


def test_pickled_weights_that_torch_cannot_have_written_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    check_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes((tmp_path / "pytorch_model.bin").read_bytes()[:-40])
    with pytest.raises(ToolkitError, match=r"pytorch_model.bin was not written by torch\.save, or is cut off"):
        check_weights(tmp_path)

"""Only regular files are read, only up to a size, every refusal names the file; and a file is written completely.

The headers of safetensors files are read without torch, and a damaged file or index is named.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import read_bytes, read_text
from toolkit.files.model_weights import check_weights, read_header, read_weights
from toolkit.files.paths import user_path


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "is a folder, expected a file"),
        (os.mkfifo, "is a named pipe, expected a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path, "no such file"),
        (lambda path: path.symlink_to("x" * 300), "cannot be read: File name too long"),
        (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: Input/output error"),
    ],
)
def test_what_is_no_readable_file_is_refused_at_once(make: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(ToolkitError, match=f"{path}.*{kind}|{kind}: {path}"):
        read_bytes(path)


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"x" * 1024)
    assert read_bytes(path, max_bytes=1024) == b"x" * 1024
    path.write_bytes(b"x" * 1025)
    with pytest.raises(OverLimit, match="has more than 1 KiB"):
        read_bytes(path, max_bytes=1024)


def test_text_is_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "given"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("é", encoding)
        assert read_text(path) == "é"
    for content, byte in (("aé".encode("latin-1"), 1), ("a".encode("utf-16"), 0), (b"ab\xed\xa0\x80", 2)):
        path.write_bytes(content)
        with pytest.raises(ToolkitError, match=f"is not UTF-8 text: byte {byte}"):
            read_text(path)


def test_a_users_path_is_expanded_once_and_one_that_no_file_can_have_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = [str(user_path(text)) for text in ("~/x", "runs/~first", "~no-such-user/x")]
    assert paths == ["/home/me/x", "runs/~first", "~no-such-user/x"]
    for text in ("a\0b", "x" * 256, "runs/" + "é" * 128):
        with pytest.raises(ToolkitError, match="is not one that a file can have") as refused:
            user_path(text)
        assert len(refused.value.message) < 250


# -- writing


def test_the_mode_of_an_existing_file_and_a_link_to_it_are_kept(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_text(link, "new")
    assert (link.is_symlink(), file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (True, "new", 0o640)


def test_a_full_device_a_pipe_without_a_reader_and_a_folder_are_errors_and_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, why in (("/dev/full", "No space left on device"), ("pipe", "No such device"), ("folder", "directory")):
        with pytest.raises(OSError, match=why):
            write_text(tmp_path / path, "text")
    assert Path("/dev/full").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


# -- weights

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

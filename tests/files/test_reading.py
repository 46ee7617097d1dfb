"""Only regular files are read, only up to a size, and every refusal names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files.reading import read_bytes, read_text, user_path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def named_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link_to(target: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.symlink_to(target)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (folder, "is a folder, expected a file"),
        (named_pipe, "is a named pipe, expected a file"),
        (link_to("/dev/zero"), "is a device, expected a file"),
        (link_to("given"), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path, "no such file"),
        (lambda path: path.with_name("x" * 300), "cannot be read: File name too long"),
        (lambda _path: Path("/proc/self/mem"), "cannot be read: Input/output error"),
        (lambda _path: Path("a\0b"), "cannot be read: embedded null byte"),
    ],
)
def test_what_is_no_readable_file_is_refused_at_once(make: Callable[[Path], Path], kind: str, tmp_path: Path) -> None:
    path = make(tmp_path / "given")
    with pytest.raises(ToolkitError) as refused:
        read_bytes(path)
    assert kind in refused.value.message
    assert len(refused.value.message) < 1_200


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"x" * 1024)
    assert read_bytes(path, max_bytes=1024) == b"x" * 1024
    path.write_bytes(b"x" * 1025)
    with pytest.raises(OverLimit, match="has more than 1 KiB"):
        read_bytes(path, max_bytes=1024)


def test_text_is_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "given"
    for content in ("é".encode(), "é".encode("utf-8-sig")):
        path.write_bytes(content)
        assert read_text(path) == "é"
    for content, byte in (("aé".encode("latin-1"), 1), ("a".encode("utf-16"), 0), (b"ab\xed\xa0\x80", 2)):
        path.write_bytes(content)
        with pytest.raises(ToolkitError, match=f"is not UTF-8 text: byte {byte}"):
            read_text(path)


def test_a_users_path_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x")
    assert user_path("runs/~first") == Path("runs/~first")
    assert user_path("~no-such-user/x") == Path("~no-such-user/x")


@pytest.mark.parametrize("text", ["a\0b", "x" * 256, "runs/" + "é" * 128])
def test_a_path_that_no_file_can_have_is_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match="is not one that a file can have") as refused:
        user_path(text)
    assert len(refused.value.message) < 250

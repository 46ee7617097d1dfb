"""Only regular files are read, only up to a size, every refusal names the file; and a file is written completely."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.errors import OverLimit, ToolkitError
from toolkit.files import write_text
from toolkit.files.reading import read_bytes, read_text, user_path


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


def test_a_users_path_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = [str(user_path(text)) for text in ("~/x", "runs/~first", "~no-such-user/x")]
    assert paths == ["/home/me/x", "runs/~first", "~no-such-user/x"]


@pytest.mark.parametrize("text", ["a\0b", "x" * 256, "runs/" + "é" * 128])
def test_a_path_that_no_file_can_have_is_refused(text: str) -> None:
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

"""A file is written completely or stays as it was, and what is no file is not replaced by one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from toolkit.files import write_text


def test_the_mode_of_an_existing_file_and_a_link_to_it_are_kept(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_text(link, "new")
    assert (link.is_symlink(), file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (True, "new", 0o640)


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_text(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()


def test_a_pipe_that_nobody_reads_is_an_error_instead_of_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write_text(tmp_path / "pipe", "text")


def test_a_folder_in_its_place_is_an_error_and_leaves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]

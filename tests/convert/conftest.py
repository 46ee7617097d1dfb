"""The source distributions of axolotl, LLaMA-Factory and TRL, whose example configurations are converted.

They are downloaded by pip, checked by their hash, and cached; nothing of them is copied into this repository.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cache import cache_folder

SHA256 = {
    "axolotl==0.19.0": "136d623f04c909c5149d7f5dbd4a0e215014ab4c3617cce9d64010b5b8ca609d",
    "llamafactory==0.9.5": "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    "trl==1.16.0": "999bd4a85b08870b7bfa387e1efa5177d2a4b88fe82b2526a057ac5d3cc600cd",
}


@pytest.fixture(scope="session")
def source_of() -> Callable[[str], Path]:
    """Return a function: requirement to the unpacked source distribution. Skips where pip reaches no index."""
    return _unpacked


def _unpacked(requirement: str) -> Path:
    folder = cache_folder() / "sdists" / requirement.replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _download(requirement, folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    temporary = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    (temporary / "requirements.txt").write_text(f"{requirement} --hash=sha256:{SHA256[requirement]}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--dest", str(temporary), "--requirement", str(temporary / "requirements.txt")]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(temporary.glob("*.tar.gz"))
    if not archives:
        why = (pip.stderr.strip().splitlines() or ["no output"])[-1]
        shutil.rmtree(temporary)
        assert "DO NOT MATCH THE HASHES" not in pip.stderr, pip.stderr
        pytest.skip(f"pip cannot download {requirement}: {why}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(temporary / "unpacked", filter="data")
    (unpacked,) = (temporary / "unpacked").iterdir()
    unpacked.rename(folder)
    shutil.rmtree(temporary)

"""Wheels of this package, built as a person builds them."""

import subprocess
import sys
from pathlib import Path

from launching import ROOT


def build_wheel(folder: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*build, str(folder)], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("finetune_toolkit-*.whl")
    return built

"""An environment for each program, built with pip from pinned versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH, DEEPSPEED = "torch==2.13.0", "deepspeed==0.19.8"
# Program -> what `pip install` gets beside torch. An empty list: the interpreter that runs the benchmark, whose
# versions are in constraints.txt.
REQUIREMENTS: dict[str, list[str]] = {
    **{"bare": [], "toolkit": [], "trl": []},
    # With DeepSpeed 0.18, which LLaMA-Factory and axolotl ask for, ZeRO-2 ends in an error on CPUs under this torch:
    # "Output 0 of Split is a view and is being modified inplace".
    "llamafactory": ["llamafactory==0.9.5", DEEPSPEED, "torchvision==0.28.0", "hatchling", "editables"],
    "ms-swift": ["ms-swift==4.6.0", DEEPSPEED, "torchvision==0.28.0"],
    "axolotl": ["axolotl==0.19.0", DEEPSPEED],
}
BUILD_TOOLS = ["setuptools<81", "wheel", "ninja", "py-cpuinfo", "numpy", "packaging", "psutil"]
# Read from each environment for the record.
REPORTED = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets"}
REPORTED |= {"llamafactory", "ms-swift", "axolotl"}
REPORT = """
import importlib.metadata, json, sys
names = {each.name for each in importlib.metadata.distributions()} & {*sys.argv}
print(json.dumps({name: importlib.metadata.version(name) for name in names}))  # the first on the path
"""
# Compiled at DeepSpeed's first use, which no timing may contain.
COMPILE = """
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""


class Unbuildable(Exception):
    """An environment could not be built; the message is pip's last error."""


def python_of(program: str, environments: Path) -> Path:
    """Return the interpreter of a program's environment, built or not."""
    return environments / program / "bin" / "python" if REQUIREMENTS[program] else Path(sys.executable)


def build(program: str, environments: Path) -> None:
    """Create a program's environment unless it is there. Raises Unbuildable, and leaves no half of one."""
    folder, packages = environments / program, REQUIREMENTS[program]
    if not packages or (folder / "complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = ["nice", "-n", "15", str(folder / "bin" / "python"), "-m", "pip", "--no-input", "--no-cache-dir", "install"]
    variables = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    variables.pop("PYTHONPATH", None)
    for wanted in ([TORCH, *BUILD_TOOLS], ["--no-build-isolation", TORCH, *packages]):
        done = subprocess.run([*pip, "--quiet", *wanted], env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line]
            raise Unbuildable((errors or done.stderr.splitlines() or ["pip failed"])[-1][:300])
    make_importable(folder)
    (folder / "complete").touch()


def make_importable(folder: Path) -> None:
    """Take out compiled parts that belong to another build of torch; a job on text uses none of them.

    On a node without GPUs, the published torchvision and torchaudio do not load next to torch's CPU build, and the
    programs that import them fail: transformers does without torchvision, torchaudio without its extension.
    """
    python = folder / "bin" / "python"
    if not can_import(python, "torchvision"):
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    if not can_import(python, "torchaudio"):
        for path in folder.glob("lib/python*/site-packages/torchaudio/lib/*.so"):
            path.unlink()


def can_import(python: Path, module: str) -> bool:
    """Return True if a module can be imported, or is not installed."""
    code = f"import importlib.util; importlib.util.find_spec({module!r}) and __import__({module!r})"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def extensions_of(program: str, environments: Path) -> Path:
    """Return the folder of a program's compiled ops: one per environment, or they rebuild each other's."""
    from toolkit.engines.compiled_ops import torch_extensions_folder

    return environments / program / "torch_extensions" if REQUIREMENTS[program] else torch_extensions_folder()


def compile_ops(program: str, environments: Path) -> None:
    """Compile the communication op that DeepSpeed loads on a CPU; nothing happens where it is compiled already."""
    python, extensions = python_of(program, environments), extensions_of(program, environments)
    if any(extensions.glob("**/deepspeed_shm_comm*.so")):
        return
    variables = os.environ | {"TORCH_EXTENSIONS_DIR": str(extensions), "DS_ACCELERATOR": "cpu"}
    variables["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    variables.pop("PYTHONPATH", None)
    subprocess.run([str(python), "-c", COMPILE], env=variables, capture_output=True, check=False)


def versions(program: str, environments: Path) -> dict[str, str]:
    """Return the versions of the libraries that a program runs with."""
    argv = [str(python_of(program, environments)), "-c", REPORT, *sorted(REPORTED)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(sorted(json.loads(done.stdout).items()))

"""`make setup` installs what the node can use, and says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT

from toolkit.doctor import node_packages
from toolkit.doctor.node_packages import GPU_PACKAGES, left_out, main

NO_REAL_GPU = pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")


@pytest.fixture
def eight_gpus(program: Callable[[str, str], None]) -> None:
    """An nvidia-smi that lists eight GPUs."""
    program("nvidia-smi", "for index in 0 1 2 3 4 5 6 7; do echo GPU $index: NVIDIA H100; done")


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_packages, "is_importable", lambda module: module not in GPU_PACKAGES)


@NO_REAL_GPU
@pytest.mark.usefixtures("without_packages")
def test_a_node_without_a_gpu_is_told_how_to_add_the_gpu_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--extras"]) == main() == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(name in lines[0] for name in GPU_PACKAGES)
    assert lines[0].endswith("there is no NVIDIA GPU here")
    assert lines[1] == "  to add it: pip install -c constraints.txt -e '.[gpu]'"


@NO_REAL_GPU
@pytest.mark.usefixtures("without_packages", "eight_gpus")
def test_a_node_with_a_gpu_needs_the_gpu_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_packages, "find_nvcc", lambda: None)
    monkeypatch.setattr(node_packages, "torch_cuda_version", lambda: None)
    assert main(["--extras"]) == 0
    assert capsys.readouterr().out == "gpu\n"
    packages, cuda, kernels = left_out()
    assert packages.reason == "they are not installed"
    assert cuda.reason.endswith("is a CPU build, so no GPU would be used")
    assert kernels.reason == "there is no nvcc"


@NO_REAL_GPU
@pytest.mark.usefixtures("eight_gpus")
def test_make_setup_installs_the_gpu_packages_on_a_node_with_gpus(tmp_path: Path) -> None:
    log, python = tmp_path / "calls.txt", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # pip and the compiler are only recorded; everything else is the real program.
    recorded = f'case "$*" in *"-m pip"*|*doctor.ops*) echo "$*" >> {log};; *) exec {sys.executable} "$@";; esac'
    python.write_text(f"#!/bin/sh\n{recorded}\n")
    python.chmod(0o755)
    (tmp_path / "venv" / ".set-up").touch()
    hidden = "import sys\nsys.modules.update(dict.fromkeys(['bitsandbytes', 'liger_kernel', 'pynvml']))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = ["make", f"VENV={tmp_path / 'venv'}", "setup"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    install, compile_ops = log.read_text().splitlines()
    assert "-c constraints.txt --no-build-isolation -e .[gpu]" in install
    assert compile_ops == "-m toolkit.doctor.ops --async-io"
    assert "set-up: packages for this node's GPUs" in ended.stderr
    assert "left out: GPU packages: bitsandbytes" in ended.stderr

"""The oldest and the newest versions of the libraries that pyproject.toml allows train under each engine.

In environments of their own, from the index that pip is configured with. The newest torch of most indices is a CUDA
build, which runs on a CPU too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, preset_job, read

from toolkit.installation import RANGES
from toolkit.versions import version_numbers

pytestmark = [pytest.mark.nightly, pytest.mark.launch]

BUILD = ("setuptools<82", "wheel", "ninja", "py-cpuinfo", "hatchling", "editables")
ENGINES = {"single": 1, "ddp": 2, "fsdp2": 2, "zero2": 2}


@pytest.fixture(scope="module", params=["oldest", "newest"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the libraries at one end of their ranges."""
    folder = tmp_path_factory.mktemp(request.param)
    ends = {name: f"{name}>={least},<{below}" for name, (least, below) in RANGES.items()}
    if request.param == "oldest":
        ends = {name: f"{name}=={least}" for name, (least, _) in RANGES.items()}
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    deepspeed = ends.pop("deepspeed")
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    for words in ([*BUILD, *ends.values()], ["--no-build-isolation", deepspeed], ["--no-build-isolation", str(ROOT)]):
        command = [str(python), "-m", "pip", "install", "--quiet", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return python


@pytest.mark.parametrize("preset", ENGINES)
def test_a_preset_of_each_engine_trains(
    preset: str, python: Path, tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    words = [*preset_job("ddp", tiny_model, faq_alpaca), "--output_dir", str(tmp_path / "out")]
    words = ["--preset", preset, "--num-processes", str(ENGINES[preset]), "--cpu", "--", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOOLKIT_CACHE": str(tmp_path / "cache")}
    command = [str(python), "-m", "toolkit", "train", *words]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    run, attestation = read(tmp_path / "out" / "run.json"), read(tmp_path / "out" / "attestation.json")
    assert (run["status"], attestation["verdict"]) == ("completed", "attested")
    for name in ("torch", "transformers", "accelerate"):
        least, below = map(version_numbers, RANGES[name])
        assert least <= version_numbers(run["versions"][name]) < below

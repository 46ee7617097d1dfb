"""accelerate's own test passes unchanged under our presets on two CPU ranks; TRL's scripts: observe/, compare/."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import accelerate_launch, nightly_launch

from toolkit.engines.compiled_ops import path_with_ninja, torch_extensions_folder
from toolkit.presets import load_preset
from toolkit.presets.export import export_presets

ACCELERATE = "1.15.0"
"""The version whose test was run; with another one, run it again and change it."""
STAGES = {"ddp": None, "zero2": 2, "zero3": 3}


def test_the_installed_version_is_the_one_that_is_named() -> None:
    assert version("accelerate") == ACCELERATE


def launch(preset: str, folder: Path, script: str) -> str:
    """Launch a script under the preset's exported files, from a folder of its own, and return its output."""
    config, *_ = export_presets([load_preset(preset)], folder / "presets", force=False)
    # A script of our own finds the compiled ops by itself.
    variables = {"TORCH_EXTENSIONS_DIR": str(torch_extensions_folder()), "PATH": path_with_ninja()}
    variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ended = accelerate_launch(config, script, script="run_on_cpu_ranks.py", cwd=folder, variables=variables)
    assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    return ended.stdout


@nightly_launch
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_accelerates_own_test_passes_in_two_processes(preset: str, tmp_path: Path) -> None:
    """It checks process control, random states and data loaders, and without DeepSpeed also training."""
    spec = find_spec("accelerate")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    script = Path(spec.origin).with_name("test_utils") / "scripts" / "test_script.py"
    shown = launch(preset, tmp_path, str(script))
    stage, kind = STAGES[preset], "MULTI_CPU" if preset == "ddp" else "DEEPSPEED"
    assert re.search(rf"Distributed environment: DistributedType\.{kind}.*\nNum processes: 2\n", shown)
    assert "All rng are properly synched." in shown
    assert ("Training yielded the same results" in shown) == (stage is None)
    assert stage is None or f"'stage': {stage}" in shown

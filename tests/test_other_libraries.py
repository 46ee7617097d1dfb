"""Scripts that others wrote run unchanged under our presets, on two CPU ranks: accelerate's own test, and TRL's SFT.

The versions that were run are in `LIBRARIES`; with another version, run the scripts again and change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, read

from toolkit.engines.compiled_ops import path_with_ninja, torch_extensions_folder
from toolkit.presets import load_preset
from toolkit.presets.export import export_presets

# Library -> the version whose script was run.
LIBRARIES = {"accelerate": "1.15.0", "trl": "1.16.0"}
STAGES = {"ddp": None, "zero2": 2, "zero3": 3}
ROWS = 8


def script_of(library: str, path: str) -> str:
    spec = find_spec(library)
    assert spec is not None and spec.origin is not None  # noqa: PT018
    return str(Path(spec.origin).parent / path)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_version_is_the_one_that_is_named(library: str) -> None:
    assert version(library) == LIBRARIES[library]


def launch(preset: str, folder: Path, script: str, *words: str) -> str:
    """Launch a script under the preset's exported files, from a folder of its own, and return its output."""
    folder.mkdir(exist_ok=True)
    config, *_ = export_presets([load_preset(preset)], folder / "presets", force=False)
    # A script of our own finds the compiled ops by itself.
    variables = {"TORCH_EXTENSIONS_DIR": str(torch_extensions_folder()), "PATH": path_with_ninja()}
    variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = (script, *words)
    ended = accelerate_launch(config, *words, script="run_on_cpu_ranks.py", cwd=folder, variables=variables)
    assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
    return ended.stdout


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_accelerates_own_test_passes_in_two_processes(preset: str, tmp_path: Path) -> None:
    """It checks process control, random states and data loaders, and without DeepSpeed also training."""
    script = script_of("accelerate", "test_utils/scripts/test_script.py")
    shown = launch(preset, tmp_path, script)
    stage, kind = STAGES[preset], "MULTI_CPU" if preset == "ddp" else "DEEPSPEED"
    assert re.search(rf"Distributed environment: DistributedType\.{kind}.*\nNum processes: 2\n", shown)
    assert "All rng are properly synched." in shown
    assert ("Training yielded the same results" in shown) == (stage is None)
    assert stage is None or f"'stage': {stage}" in shown


@pytest.fixture(scope="module")
def trl_runs(build_once: Callable[..., Path], tiny_model: Path) -> dict[str, Path]:
    """The checkpoint of TRL's own script under each preset: two steps, that is one epoch for two ranks."""
    script = script_of("trl", "scripts/sft.py")

    def run_all(folder: Path) -> None:
        (folder / "data").mkdir()
        rows = (ROOT / "examples" / "data.jsonl").read_text().splitlines()[:ROWS]
        (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")
        words = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(folder / "data"), "--max_length", "64"]
        words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--save_steps", "2"]
        words += ["--report_to", "none", "--use_cpu", "--bf16", "false", "--learning_rate", "1e-3"]
        for preset in STAGES:
            shown = launch(preset, folder / preset, script, *words, "--output_dir", str(folder / preset / "out"))
            assert "Training completed" in shown

    folder = build_once("trl_runs", run_all)
    return {preset: folder / preset / "out" / "checkpoint-2" for preset in STAGES}


@pytest.mark.launch
@pytest.mark.nightly
def test_trls_own_script_trains_the_same_under_each_preset_and_is_sharded_as_it_says(trl_runs: dict[str, Path]) -> None:
    states = {preset: read(checkpoint / "trainer_state.json") for preset, checkpoint in trl_runs.items()}
    losses = {name: [row["loss"] for row in one["log_history"] if "loss" in row] for name, one in states.items()}
    assert len(losses["ddp"]) == 2
    for preset in STAGES:
        assert losses[preset] == pytest.approx(losses["ddp"], rel=1e-4), preset
        assert states[preset]["epoch"] == 1  # two steps of two ranks; one rank would be at half of its epoch

    # DeepSpeed saves the optimizer states of each rank; at stage 3 the parameters, too.
    files = "global_step2/*zero_pp_rank_*_{}_states.pt"
    saved = {
        preset: [len(list(checkpoint.glob(files.format(kind)))) for kind in ("optim", "model")]
        for preset, checkpoint in trl_runs.items()
    }
    assert saved == {"ddp": [0, 0], "zero2": [2, 0], "zero3": [2, 2]}

"""Under torchrun alone a rank gives itself the environment of the preset that the user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import attested, losses, preset_job, torchrun_preset

from toolkit.errors import ToolkitError
from toolkit.train.launch_context import LaunchContext

TWO_NODES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--save_strategy", "no"]
    return [*words, "--save_model", "false", "--output_dir"]


@pytest.mark.launch
@pytest.mark.parametrize(
    "preset", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("ddp", "zero3")), "fsdp2"]
)
def test_torchrun_and_accelerate_launch_put_the_same_strategy_in_effect(
    preset: str, preset_runs: dict[str, Path], tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    ended = torchrun_preset(preset, *preset_job(preset, tiny_model, faq_alpaca), "--output_dir", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = attested(tmp_path / "out")
    assert found == attested(preset_runs[preset])
    assert len(found) > 40
    assert losses(tmp_path / "out") == losses(preset_runs[preset])


@pytest.mark.launch
def test_a_smaller_allocation_than_the_job_asked_for_is_refused_once_before_a_model_is_loaded(
    job: list[str], tmp_path: Path
) -> None:
    ended = torchrun_preset("zero2", *job, str(tmp_path / "out"), TOOLKIT_WORLD_SIZE="16")
    assert ended.returncode == 1  # torchrun's own; that of the rank is 2
    assert ended.stderr.count("error: the job asked for 16 ranks (TOOLKIT_WORLD_SIZE), and 2 were started") == 1
    assert "exitcode  : 2" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_several_nodes_without_a_preset_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ToolkitError, match="TOOLKIT_PRESET is not set, and torchrun has started this job on 2 nodes"):
        LaunchContext.from_env()


def test_a_preset_of_several_processes_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_PRESET", "zero2")
    with pytest.raises(ToolkitError, match="TOOLKIT_PRESET=zero2 needs a launcher"):
        LaunchContext.from_env()


def test_what_a_launcher_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` may have been given other options than the preset's file has."""
    monkeypatch.setenv("TOOLKIT_PRESET", "fsdp2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    launch = LaunchContext.from_env()
    assert (launch.world_size, launch.preset and launch.preset.name) == (2, "fsdp2")
    assert "FSDP_VERSION" not in os.environ

"""The preset and world size of a launch: from the launcher's own command line, or the environment under torchrun."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import ROOT, attested, losses, nightly, preset_job, torchrun_preset

from toolkit.errors import ToolkitError
from toolkit.train.arguments import LaunchContext, accelerate_launch_arguments, context_of_command

ZERO2 = str(ROOT / "accelerate_configs" / "zero2.yaml")
TWO_NODES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
LAUNCHERS = ["python3 /venv/bin/accelerate launch", "accelerate launch", "python3 /venv/bin/accelerate-launch"]
OTHERS = ["python -m toolkit.train --dataset accelerate", "/venv/bin/accelerate config", "torchrun train.py", ""]
MINE = ["--config_file", "mine.yaml"]  # of four processes
SCRIPT = ["-m", "toolkit.train"]


@pytest.mark.parametrize("words", [*LAUNCHERS, "python -u -m accelerate.commands.launch", *OTHERS])
def test_the_launcher_is_told_from_another_program(words: str) -> None:
    options = ["--num_processes", "2"]
    assert accelerate_launch_arguments([*words.split(), *options]) == (None if words in OTHERS else options)


@pytest.mark.parametrize(
    ("options", "preset", "sizes"),
    [
        (["--config_file", ZERO2, "--num_processes", "2", *SCRIPT], "zero2", (2, None)),
        (["--config_file=" + ZERO2, "--num_processes=2", *SCRIPT], "zero2", (2, None)),
        (["--num-processes=2", "--config-file", ZERO2, "train.py", "--num_processes", "9"], "zero2", (2, None)),
        (["--num_processes", "2", *SCRIPT, "--config_file", "x.yaml"], None, (2, None)),  # of the script
        (SCRIPT, None, (None, None)),
        ([*MINE, *SCRIPT], "mine", (4, None)),
        ([*MINE, "--num_processes", "2", *SCRIPT], "mine", (2, None)),
        ([*MINE, "--parallelism_config_dp_shard_size=4", *SCRIPT], "mine", (4, 4)),
    ],
    ids=str,
)
def test_preset_and_sizes_are_the_launchers(options: list[str], preset: str | None, sizes: Any, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "ddp.yaml").read_text()) | {"num_processes": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    found = context_of_command(options, tmp_path)
    assert (found.preset.name if found.preset else None, (found.world_size, found.dp_shard_size)) == (preset, sizes)


@pytest.mark.launch
@pytest.mark.parametrize("preset", [*nightly("ddp", "zero3"), "fsdp2"])
def test_torchrun_and_accelerate_launch_put_the_same_strategy_in_effect(
    preset: str, preset_runs: dict[str, Path], tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    ended = torchrun_preset(preset, *preset_job(preset, tiny_model, faq_alpaca), "--output_dir", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = attested(tmp_path / "out")
    assert found == attested(preset_runs[preset])
    assert len(found) > 40
    assert losses(tmp_path / "out") == losses(preset_runs[preset])


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TWO_NODES, "TOOLKIT_PRESET is not set, and torchrun has started this job on 2 nodes"),
        ({"TOOLKIT_PRESET": "zero2"}, "TOOLKIT_PRESET=zero2 needs a launcher"),
        (
            TWO_NODES | {"TOOLKIT_PRESET": "zero2", "TOOLKIT_WORLD_SIZE": "16"},
            r"the job asked for 16 ranks \(TOOLKIT_WORLD_SIZE\), and 2 were started: 1 on each of 2 nodes",
        ),
    ],
)
def test_an_environment_without_preset_or_launcher_or_of_other_ranks_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ToolkitError, match=message):
        LaunchContext.from_env()


def test_what_a_launcher_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` may have been given other options than the preset's file has."""
    given = {"TOOLKIT_PRESET": "fsdp2", "ACCELERATE_MIXED_PRECISION": "fp16"}
    for name, value in (TWO_NODES | given).items():
        monkeypatch.setenv(name, value)
    launch = LaunchContext.from_env()
    assert (launch.world_size, launch.preset and launch.preset.name) == (2, "fsdp2")
    assert "FSDP_VERSION" not in os.environ

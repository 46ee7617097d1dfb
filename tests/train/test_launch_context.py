"""The preset and world size of a launch are read from the launcher's own command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from launching import ROOT, accelerate_launch, read

from toolkit.presets import load_preset
from toolkit.train.launch_context import accelerate_launch_arguments, context_of_command

ZERO2 = "accelerate_configs/zero2.yaml"


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        (["/usr/bin/python3", "/venv/bin/accelerate", "launch"], True),
        (["accelerate", "launch"], True),
        (["/usr/bin/python3", "/venv/bin/accelerate-launch"], True),
        (["python", "-u", "-m", "accelerate.commands.launch"], True),
        (["python", "-m", "toolkit.train", "--dataset", "accelerate"], False),
        (["/venv/bin/accelerate", "config"], False),
        (["torchrun", "train.py"], False),
        ([], False),
    ],
)
def test_the_launcher_is_told_from_another_program(words: list[str], launches: bool) -> None:
    options = ["--num_processes", "2"]
    assert accelerate_launch_arguments([*words, *options]) == (options if launches else None)


@pytest.mark.parametrize(
    "options",
    [
        ["--config_file", ZERO2, "--num_processes", "2", "-m", "toolkit.train"],
        ["--config_file=" + ZERO2, "--num_processes=2", "-m", "toolkit.train"],
        ["--num-processes=2", "--config-file", str(ROOT / ZERO2), "train.py", "--num_processes", "9"],
    ],
    ids=" ".join,
)
def test_preset_and_world_size_are_read_from_the_launchers_options(options: list[str]) -> None:
    found = context_of_command(options, ROOT)
    assert (found.preset, found.world_size) == (load_preset("zero2"), 2)


def test_script_arguments_are_not_taken_for_accelerate_launch_arguments() -> None:
    found = context_of_command(["--num_processes", "2", "-m", "toolkit.train", "--config_file", "x.yaml"], ROOT)
    assert (found.preset, found.world_size) == (None, 2)
    found = context_of_command(["-m", "toolkit.train"], ROOT)
    assert (found.preset, found.world_size) == (None, None)


def test_num_processes_comes_from_the_file_unless_a_flag_gives_it(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "ddp.yaml").read_text()) | {"num_processes": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    assert context_of_command(["--config_file", "mine.yaml", "-m", "toolkit.train"], tmp_path).world_size == 4
    flagged = ["--config_file", "mine.yaml", "--num_processes", "2", "-m", "toolkit.train"]
    assert context_of_command(flagged, tmp_path).world_size == 2


def test_the_shard_degree_is_read_from_the_launchers_flags() -> None:
    words = ["--config_file", "accelerate_configs/fsdp2_hybrid.yaml", "--num_processes", "8"]
    found = context_of_command([*words, "--parallelism_config_dp_shard_size=4", "-m", "toolkit.train"], ROOT)
    assert (found.world_size, found.dp_shard_size) == (8, 4)


@pytest.mark.launch
def test_a_deepspeed_preset_is_launched_from_any_working_directory(
    tiny_model: Path, faq_alpaca: Path, tmp_path: Path
) -> None:
    job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--output_dir", "run"]
    sizes = ["--max_seq_length", "128", "--max_steps", "1", "--save_strategy", "no"]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "zero2.yaml", *job, *sizes, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    attested = read(tmp_path / "run" / "attestation.json")["ranks"]
    assert [rank["sharding"] for rank in attested] == ["shard_grad_op", "shard_grad_op"]

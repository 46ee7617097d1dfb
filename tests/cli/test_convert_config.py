"""The command `toolkit convert-config`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from launching import ROOT, toolkit

from toolkit.run.script_arguments import read_config_file

AXOLOTL = ROOT / "tests" / "fixtures" / "axolotl.yaml"


def test_the_yaml_goes_to_stdout_and_the_next_command_to_stderr(tmp_path: Path) -> None:
    ended = toolkit("convert-config", str(AXOLOTL), cwd=tmp_path)
    assert ended.returncode == 0
    assert yaml.safe_load(ended.stdout)["per_device_train_batch_size"] == 2
    assert ended.stdout.splitlines()[:2] == [
        f"# Converted from axolotl: {AXOLOTL}",
        "#   toolkit train --preset ddp -- train.yaml",
    ]
    assert "# axolotl drops longer rows" in ended.stdout
    assert "# Defaults of axolotl, which differ from ours:\nnum_train_epochs: 1.0\n" in ended.stdout
    assert "#   loss_watchdog_threshold: 5.0  (`toolkit train` ends a run" in ended.stdout
    assert ended.stderr.splitlines() == [
        "axolotl: 6 settings converted, 1 without a counterpart",
        "not converted: loss_watchdog_threshold",
        "next: toolkit train --preset ddp -- train.yaml",
    ]


def test_the_output_file_is_read_by_the_training_script(tmp_path: Path) -> None:
    ended = toolkit("convert-config", str(AXOLOTL), "--output", "new/ours.yaml", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "toolkit train --preset ddp -- new/ours.yaml" in ended.stderr
    assert read_config_file(tmp_path / "new" / "ours.yaml")["learning_rate"] == 2e-5


def test_an_existing_file_is_overwritten_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("mine")
    words = ["convert-config", str(AXOLOTL), "--output", "ours.yaml"]
    refused = toolkit(*words, cwd=tmp_path)
    assert (refused.returncode, refused.stderr.splitlines()) == (
        2,
        ["error: ours.yaml exists already", "  hint: `--force` overwrites it, or name another `--output`"],
    )
    assert (tmp_path / "ours.yaml").read_text() == "mine"
    assert toolkit(*words, "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "ours.yaml").read_text().startswith("# Converted from axolotl")


def test_json_names_what_became_of_every_setting(tmp_path: Path) -> None:
    ended = toolkit("convert-config", str(AXOLOTL), "--json", cwd=tmp_path)
    shown = json.loads(ended.stdout)
    assert (shown["tool"], shown["preset"], shown["num_processes"]) == ("axolotl", "ddp", None)
    assert shown["converted"]["micro_batch_size"] == "per_device_train_batch_size"
    assert shown["not_converted"] == [
        {
            "key": "loss_watchdog_threshold",
            "value": 5.0,
            "reason": "`toolkit train` ends a run whose loss is not a number",
        }
    ]
    assert shown["redundant"] == ["datasets[0].type"]


def test_what_the_configuration_does_not_say_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: a/b\nstage: sft\ndataset: faq\n")
    ended = toolkit("convert-config", "theirs.yaml", cwd=tmp_path)
    assert "next: toolkit train --preset ddp -- train.yaml --dataset FILE" in ended.stderr


@pytest.mark.parametrize(
    ("text", "options", "message", "hint"),
    [
        ("base_model: a/b\nrl: dpo\n", (), "not supervised fine-tuning", "use a preset with TRL"),
        ("learning_rate: 1e-5\n", (), "is not recognised", "`--from trl`, `--from axolotl`, `--from llama-factory`"),
        ("distributed_type: FSDP\n", (), "is not recognised", "an accelerate YAML is a preset already"),
        ("base_model: a/b\n", ("--from", "axolotel"), "--from is 'axolotel'", "did you mean `axolotl`?"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_in_two_lines(
    text: str, options: tuple[str, ...], message: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    ended = toolkit("convert-config", "theirs.yaml", *options, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    first, second = ended.stderr.splitlines()
    assert message in first
    assert hint in second


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file: theirs.yaml"),
        ("- a\n- b\n", "theirs.yaml holds list, expected keys and values"),
        ("a: [\n", "theirs.yaml is not YAML: while parsing a flow node"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "theirs.yaml").write_text(text)
    ended = toolkit("convert-config", "theirs.yaml", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {message}")
    assert len(ended.stderr.splitlines()) == 1


def test_the_tool_can_be_named_where_the_settings_do_not_say(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1e-5\n")
    ended = toolkit("convert-config", "theirs.yaml", "--from", "trl", cwd=tmp_path)
    assert yaml.safe_load(ended.stdout)["activation_checkpointing"] is True

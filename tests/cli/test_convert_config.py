"""The command `toolkit convert-config`: what it prints and writes, and its exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import run_command
from launching import ROOT

from toolkit.job.argument_reading import read_config_file

AXOLOTL = ROOT / "tests" / "fixtures" / "axolotl.yaml"
Convert = Callable[..., tuple[int, str, str]]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Runs the command in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(["convert-config", *words], capsys)


def test_the_yaml_goes_to_stdout_and_the_next_command_to_stderr(convert: Convert) -> None:
    code, out, err = convert(str(AXOLOTL))
    assert code == 0
    assert yaml.safe_load(out)["per_device_train_batch_size"] == 2
    assert "#   toolkit train --preset ddp -- train.yaml" in out.splitlines()
    assert err.splitlines() == [
        "axolotl: 6 settings converted, 1 without a counterpart",
        "not converted: loss_watchdog_threshold",
        f"next: toolkit convert-config {AXOLOTL} --output train.yaml && toolkit train --preset ddp -- train.yaml",
    ]


def test_the_output_file_is_read_by_the_training_script(convert: Convert, tmp_path: Path) -> None:
    code, out, err = convert(str(AXOLOTL), "--output", "new/ours.yaml")
    assert (code, out) == (0, "")
    assert "toolkit train --preset ddp -- new/ours.yaml" in err
    assert read_config_file(tmp_path / "new" / "ours.yaml")["learning_rate"] == 2e-5


def test_an_existing_file_is_overwritten_only_with_force(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("mine")
    words = [str(AXOLOTL), "--output", "ours.yaml"]
    code, _, err = convert(*words)
    hint = "`--force` overwrites it, or name another `--output`"
    assert (code, err) == (2, f"error: ours.yaml exists already\n  hint: {hint}\n")
    assert (tmp_path / "ours.yaml").read_text() == "mine"
    assert convert(*words, "--force")[0] == 0
    assert (tmp_path / "ours.yaml").read_text().startswith("# Converted from axolotl")


def test_json_names_what_became_of_every_setting(convert: Convert) -> None:
    shown = json.loads(convert(str(AXOLOTL), "--json")[1])
    assert (shown["tool"], shown["preset"], shown["num_processes"]) == ("axolotl", "ddp", None)
    assert shown["converted"]["micro_batch_size"] == "per_device_train_batch_size"
    reason = "`toolkit train` ends a run whose loss is not a number"
    (left,) = shown["not_converted"]
    assert left == {"key": "loss_watchdog_threshold", "value": 5.0, "reason": reason, "has_effect": True}
    assert shown["redundant"] == ["datasets[0].type"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("base_model: a/b\nrl: dpo\n", (), "not supervised fine-tuning"),
        ("learning_rate: 1e-5\n", (), "is not recognised"),
        ("base_model: a/b\n", ("--from", "axolotel"), "--from is 'axolotel'"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_in_two_lines(
    convert: Convert, text: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    code, out, err = convert("theirs.yaml", *options)
    assert (code, out, len(err.splitlines())) == (2, "", 2)
    assert message in err.splitlines()[0]


def test_the_tool_can_be_named_where_the_settings_do_not_say(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1e-5\n")
    assert yaml.safe_load(convert("theirs.yaml", "--from", "trl")[1])["activation_checkpointing"] is True

"""The training script's arguments, read without torch as transformers reads them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.script_arguments import (
    argument_types,
    dataset_names,
    dataset_weights,
    flag,
    integer,
    read_arguments,
)
from toolkit.train.arguments import _parse_flags
from toolkit.versions import training_argument_types


def test_argument_names_read_from_the_source_equal_the_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    fields = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    assert list(training_argument_types()) == fields


def test_our_arguments_and_transformers_arguments_have_different_names() -> None:
    ours = set(argument_types()) - set(training_argument_types())
    assert {"model_name_or_path", "dataset", "lora_r", "untimed_steps"} <= ours
    assert len(argument_types()) == len(ours) + len(training_argument_types())


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_steps", "8"],
        ["--max_steps=8"],
        ["--max-steps", "8"],
        ["--max-steps=8"],
        ["--max_steps", "7", "--max_steps", "8"],
    ],
    ids=" ".join,
)
def test_every_spelling_of_a_flag_means_the_same(argv: list[str]) -> None:
    assert read_arguments(argv) == {"max_steps": "8"}


def test_a_value_may_hold_an_equals_sign_or_a_minus() -> None:
    assert read_arguments(["--run_name=a=b", "--max_steps", "-1"]) == {"run_name": "a=b", "max_steps": "-1"}


def test_a_list_flag_takes_several_words() -> None:
    assert read_arguments(["--lora_target_modules", "q_proj", "v_proj"]) == {
        "lora_target_modules": ["q_proj", "v_proj"]
    }


def test_one_or_several_data_sets_are_read_from_flags_and_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    for text, names, weights in (
        ("dataset: a.jsonl", ["a.jsonl"], []),
        ("dataset: [a.jsonl, owner/name]\ndataset_weights: [0.7, 0.3]", ["a.jsonl", "owner/name"], [0.7, 0.3]),
        ("dataset: a.jsonl\ndataset_weights: 2", ["a.jsonl"], [2.0]),
    ):
        config.write_text(text)
        words = ["--dataset", *names, *(["--dataset_weights", *map(str, weights)] if weights else [])]
        for argv in ([str(config)], words):
            read = read_arguments(argv)
            assert (dataset_names(read), dataset_weights(read)) == (names, weights)
            parsed = _parse_flags(argv)
            assert (parsed.dataset, parsed.dataset_weights or []) == (names, weights)
    with pytest.raises(ToolkitError, match="--dataset_weights is 'many', expected a number"):
        read_arguments(["--dataset", "a.jsonl", "b.jsonl", "--dataset_weights", "0.7", "many"])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--bf16"], True),
        (["--bf16", "True"], True),
        (["--bf16=yes"], True),
        (["--bf16", "1"], True),
        (["--bf16", "false"], False),
        (["--no_bf16"], False),
        (["--no-bf16"], False),
    ],
    ids=str,
)
def test_a_boolean_is_read_as_transformers_reads_it(argv: list[str], expected: bool) -> None:
    assert flag(read_arguments(argv)["bf16"]) is expected


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("max_steps: 8\nlearning_rate: 1e-4\nbf16: true\nlora_r:\n")
    values = read_arguments([str(config), "--max_steps", "9"])
    assert values == {"max_steps": "9", "learning_rate": "1e-4", "bf16": True, "lora_r": None}


def test_a_json_file_is_a_configuration_file_too(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text('{"max_steps": 8}')
    assert read_arguments([str(config)]) == {"max_steps": 8}


def test_an_absent_or_null_number_has_its_default() -> None:
    assert integer({}, "seed", 42) == 42
    assert integer({"seed": None}, "seed", 42) == 42
    assert integer({"seed": "7"}, "seed", 42) == 7


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["--max_stepz", "8"], "unknown argument --max_stepz", "did you mean `--max_steps`?"),
        (["--no_save_modl"], "unknown argument --no_save_modl", None),
        (["--qqq"], "unknown argument --qqq", "see `python -m toolkit.train --help`"),
        (["--evaluation_stratigy", "no"], "unknown argument --evaluation_stratigy", None),
        (["max_steps", "8"], "unexpected word 'max_steps'; a flag starts with `--`", "did you mean `--max_steps`?"),
        (["--max_steps", "8", "zero2"], "unexpected word 'zero2' after --max_steps 8", None),
        (["--max_steps", "--bf16"], "--max_steps has no value", "`--max_steps VALUE`"),
        (["--max_steps", "many"], "--max_steps is 'many', expected a whole number", None),
        (["--max_steps", "8.5"], "--max_steps is '8.5', expected a whole number", None),
        (["--learning_rate", "fast"], "--learning_rate is 'fast', expected a number", None),
        (["--bf16", "maybe"], "--bf16 is 'maybe', expected true or false", None),
        (["nowhere.yaml"], "no such file: nowhere.yaml", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_invalid_argument_is_named_in_the_error(argv: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(argv)
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stepz: 8", "unknown key 'max_stepz'"),
        ("max_steps: many", "job.yaml: max_steps is 'many', expected a whole number"),
        ("- max_steps", "holds list, expected keys and values"),
        ("", "holds NoneType, expected keys and values"),
        ("a: [", "is not YAML: while parsing"),
        ("1: 2", "has the key 1, expected a name"),
    ],
)
def test_an_invalid_configuration_file_is_named_in_the_error(text: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(text)
    with pytest.raises(ToolkitError) as caught:
        read_arguments([str(config)])
    assert message in caught.value.message


def test_an_unknown_key_of_the_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("learning_rat: 1e-4\n")
    with pytest.raises(ToolkitError) as caught:
        read_arguments([str(config)])
    assert str(caught.value) == f"{config}: unknown key 'learning_rat'\n  hint: did you mean `learning_rate`?"

"""The training script's arguments, read without torch as transformers reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from loaded_modules import HEAVY, loaded_after

from toolkit.errors import ToolkitError
from toolkit.job.argument_reading import argument_types, lora_fields, read_arguments
from toolkit.train import __main__ as rank


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
    assert read_arguments(argv) == {"max_steps": 8}


def test_a_value_may_hold_an_equals_sign_or_a_minus_or_be_several_words() -> None:
    given = ["--run_name=a=b", "--max_steps", "-1", "--lora_target_modules", "q_proj", "v_proj"]
    assert read_arguments(given) == {
        "run_name": "a=b",
        "max_steps": -1,
        "lora_target_modules": ("q_proj", "v_proj"),
    }


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
    assert read_arguments(argv)["bf16"] is expected


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(
        "max_steps: 8\nlearning_rate: 1e-4\nbf16: true\nlora_r:\nval_size: 5\nlora_config: {use_dora: true}"
    )
    values = read_arguments([str(config), "--max_steps", "9"])
    expected = {"max_steps": 9, "learning_rate": 1e-4, "bf16": True, "val_size": 5}
    assert values == expected | {"lora_config": {"use_dora": True}}


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
        (["nowhere.yaml"], "no such file: nowhere.yaml", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_invalid_argument_is_named_in_the_error(argv: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(argv)
    assert caught.value.message == message
    assert hint is None or caught.value.hint == hint


def test_the_help_names_every_argument_and_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert rank.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name in argument_types():
        assert re.search(rf"^  --{name}( |$)", printed, flags=re.MULTILINE), name
    assert "95 % CI of the median" in " ".join(printed.split())
    assert not loaded_after("import toolkit.train.__main__ as rank; rank.main(['--help'])") & HEAVY


def test_quoted_values_of_a_json_word_are_read_as_transformers_reads_them() -> None:
    from transformers.training_args import _convert_str_dict

    given = {"even_batches": "False", "a": {"b": "8", "c": "0.5"}, "d": "1.2.3", "e": "min"}
    assert read_arguments(["--accelerator_config", json.dumps(given)])["accelerator_config"] == _convert_str_dict(given)


def test_any_field_of_lora_config_passes_as_flag_or_mapping() -> None:
    assert lora_fields(["use_rslora=true", "layers_to_transform=[0, 1]", "bias=none"]) == {
        "use_rslora": True,
        "layers_to_transform": [0, 1],
        "bias": "none",
    }
    assert lora_fields({"use_dora": True}) == lora_fields("use_dora=true")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("use_dorra=true", "did you mean `use_dora`"),
        ("use_dora=flase", "expected true or false"),
        ("r=8", "`--lora_r VALUE`"),
        ("use_dora", "is not key=value"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(word: str, words: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        lora_fields([word])
    assert words in str(refused.value)

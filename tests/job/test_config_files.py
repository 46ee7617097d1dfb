"""A training YAML with values of the wrong shape, or that is no configuration, is refused before the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.argument_reading import read_config_file

# A line of the YAML -> what the message says after the file's name, and its hint.
WRONG_SHAPES = {
    "output_dir: {a: b}": ("output_dir is {'a': 'b'}, expected a value without keys", None),
    "learning_rate: [1]": ("learning_rate is [1], expected a number", None),
    "max_steps: {}": ("max_steps is {}, expected a value without keys", None),
    "dataset: {}": ("dataset is {}, expected a value without keys", None),
    "dataset: [rows.jsonl, 5]": ("dataset is 5, expected text", None),
    "dataset: [[rows.jsonl]]": ("dataset is ['rows.jsonl'], expected text", None),
    "bf16: [true]": ("bf16 is [True], expected true or false", None),
    "run_name: 2024-01-01": ("run_name is datetime.date(2024, 1, 1), expected text", "quote it"),
    "profile_steps: 3:5": ("profile_steps is 185, expected text", "quote it"),
    "eval_strategy: no": ("eval_strategy is False, expected text", "quote it"),
    f"report_to: {{{'x' * 1000}: 1}}": ("report_to is {'xxx", None),
    "warmup_steps: .inf": ("warmup_steps is inf, expected a finite number", None),
    "seed: 18446744073709551616": ("seed is an integer of 65 bits", None),
    "? [a]\n: 5": (" is not YAML", None),
    "5: a": (" has the key 5, expected a name", "put the key in quotes"),
    f"{'k' * 1000}: 1": ("unknown key 'kkk", None),
}


@pytest.mark.parametrize("line", WRONG_SHAPES, ids=lambda line: line[:30])
def test_a_value_of_the_wrong_shape_is_refused_by_file_and_key(line: str, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"{line}\n")
    with pytest.raises(ToolkitError) as refused:
        read_config_file(file)
    words, hint = WRONG_SHAPES[line]
    assert refused.value.message.startswith(str(file))
    assert words in refused.value.message
    assert len(refused.value.message) < len(str(file)) + 500
    if hint is not None:
        assert hint in str(refused.value.hint)


def test_what_an_argument_may_hold_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(
        "dataset: rows.jsonl\nlearning_rate: 2e-5\nbf16: true\nlora_config: {use_dora: true}\n"
        "report_to: [none]\nval_size: 5\n"
    )
    assert read_config_file(file) == {
        "dataset": "rows.jsonl",
        "learning_rate": "2e-5",
        "bf16": True,
        "lora_config": {"use_dora": True},
        "report_to": ["none"],
        "val_size": 5,
    }

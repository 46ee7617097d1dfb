"""The training script's arguments, read without torch as transformers reads them; those of TRL, axolotl and others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from loaded_modules import HEAVY, loaded_after

from toolkit.errors import ToolkitError
from toolkit.job.argument_aliases import ALIASES, HINTS, canonical_values
from toolkit.job.argument_reading import argument_types, lora_fields, read_arguments
from toolkit.job.argument_values import nearest_word
from toolkit.job.job import Job
from toolkit.job.job_checks import check_values
from toolkit.train import __main__ as rank


@pytest.mark.parametrize(
    "words", ["--max_steps 8", "--max_steps=8", "--max-steps 8", "--max-steps=8", "--max_steps 7 --max_steps 8"]
)
def test_every_spelling_of_a_flag_means_the_same(words: str) -> None:
    assert read_arguments(words.split()) == {"max_steps": 8}


def test_a_value_may_hold_an_equals_sign_or_a_minus_or_be_several_words() -> None:
    given = ["--run_name=a=b", "--max_steps", "-1", "--lora_target_modules", "q_proj", "v_proj"]
    assert read_arguments(given) == {"run_name": "a=b", "max_steps": -1, "lora_target_modules": ("q_proj", "v_proj")}


def test_a_boolean_is_read_as_transformers_reads_it() -> None:
    for words in ("--bf16", "--bf16 True", "--bf16=yes", "--bf16 1"):
        assert read_arguments(words.split())["bf16"] is True, words
    for words in ("--bf16 false", "--no_bf16", "--no-bf16"):
        assert read_arguments(words.split())["bf16"] is False, words


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config, text = tmp_path / "job.yaml", "max_steps: 8\nlearning_rate: 1e-4\nbf16: true\nlora_r:\nval_size: 5\n"
    config.write_text(text + "lora_config: {use_dora: true}")
    values = read_arguments([str(config), "--max_steps", "9"])
    expected = {"max_steps": 9, "learning_rate": 1e-4, "bf16": True, "val_size": 5}
    assert values == expected | {"lora_config": {"use_dora": True}}


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--max_stepz 8", "unknown argument --max_stepz", "did you mean `--max_steps`?"),
        ("--no_save_modl", "unknown argument --no_save_modl", ""),
        ("--qqq", "unknown argument --qqq", "see `toolkit train -- --help`"),
        ("--evaluation_stratigy no", "unknown argument --evaluation_stratigy", ""),
        ("max_steps 8", "unexpected word 'max_steps'; a flag starts with `--`", "did you mean `--max_steps`?"),
        ("--max_steps 8 zero2", "unexpected word 'zero2' after --max_steps 8", ""),
        ("--max_steps --bf16", "--max_steps has no value", "`--max_steps VALUE`"),
        ("nowhere.yaml", "no such file: nowhere.yaml", ""),
        ("--dry-run", "unknown argument --dry_run", "an option of the toolkit goes before `--`"),
    ],
)
def test_an_invalid_argument_is_named_in_the_error(words: str, message: str, hint: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(words.split())
    assert caught.value.message == message
    assert not hint or caught.value.hint == hint


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
    given = ["use_rslora=true", "layers_to_transform=[0, 1]", "bias=none"]
    assert lora_fields(given) == {"use_rslora": True, "layers_to_transform": [0, 1], "bias": "none"}
    assert lora_fields({"use_dora": True}) == lora_fields("use_dora=true")


def test_columns_are_words_after_one_flag_or_several_or_a_mapping_or_a_list_of_a_file(tmp_path: Path) -> None:
    expected = {"column": {"instruction": "question", "output": "my answer"}}
    for words in (
        ["instruction=question", "output=my answer"],
        ["instruction=question", "--column", "output=my answer"],
    ):
        assert read_arguments(["--column", *words]) == expected
    config = tmp_path / "job.yaml"
    for text in ("{instruction: question, output: my answer}", "[instruction=question, output=my answer]"):
        config.write_text(f"column: {text}\n")
        assert read_arguments([str(config)]) == expected
    assert read_arguments([str(config), "--column", "text=body"]) == {"column": {"text": "body"}}


def test_an_invalid_field_is_named_in_the_error() -> None:
    for word, words in (
        ("use_dorra=true", "did you mean `use_dora`"),
        ("r=8", "`--lora_r VALUE`"),
        ("use_dora", "is not key=value"),
    ):
        with pytest.raises(ToolkitError) as refused:
            lora_fields([word])
        assert words in str(refused.value)


# -- one argument at a time: types, ranges and words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_steps", "many"], "--max_steps is 'many', expected a whole number"),
        (["--max_steps", "1e400"], "--max_steps is '1e400', expected a whole number"),
        (["--seed", "9" * 20], f"--seed is '{'9' * 20}', expected a whole number of at most 64 bits"),
        (["--seed", "9" * 5000], f"--seed is '{'9' * 76}..., expected a whole number"),
        (["--learning_rate", "1e400"], "--learning_rate is '1e400', expected a finite number"),
        (["--learning_rate="], "--learning_rate is '', expected a number"),
        (["--dataset_weights", "0.5", "nan"], "--dataset_weights is 'nan', expected a finite number"),
        (["--bf16", "2"], "--bf16 is '2', expected true or false"),
        (["--run_name", "a\0b"], r"--run_name is 'a\x00b', expected text without a null byte"),
        (["x" * 5000], f"unexpected word '{'x' * 76}...; a flag starts with `--`"),
        ([f"--{'x' * 5000}", "1"], f"unknown argument --{'x' * 80}"),
    ],
)
def test_a_word_that_is_no_such_value_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(words)
    assert caught.value.message == expected


# A line of a YAML file -> what the message, or its hint, says after the file's name.
WRONG_SHAPES = {
    "max_steps: 8.5": "max_steps is 8.5, expected a whole number",
    "max_steps: true": "max_steps is True, expected a whole number",
    "max_steps: {}": "max_steps is {}, expected a value without keys",
    "max_steps: null": "max_steps is null, expected a number",
    "max_stepz: 8": "unknown key 'max_stepz'\n  hint: did you mean `max_steps`?",
    "learning_rate: [1]": "learning_rate is [1], expected a number",
    "bf16: [true]": "bf16 is [True], expected true or false",
    "save_strategy: no": "save_strategy is False, expected text\n  hint: quote it",
    "run_name: 2024-01-01": "run_name is datetime.date(2024, 1, 1), expected text\n  hint: quote it",
    "profile_steps: 3:5": "profile_steps is 185, expected text\n  hint: quote it",
    "dataset: [rows.jsonl, 5]": "dataset is 5, expected text",
    "dataset: [[rows.jsonl]]": "dataset is ['rows.jsonl'], expected text",
    f"report_to: {{{'x' * 1000}: 1}}": "report_to is {'xxx",
    f"{'k' * 1000}: 1": "unknown key 'kkk",
    "": "holds NoneType, expected keys and values",
}


@pytest.mark.parametrize("line", WRONG_SHAPES, ids=lambda line: line[:30])
def test_a_value_of_the_wrong_shape_in_a_file_is_refused_by_file_and_key(line: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(line)
    with pytest.raises(ToolkitError) as refused:
        read_arguments([str(file)])
    assert refused.value.message.startswith(str(file) if "null" not in line else "--max_steps")
    assert WRONG_SHAPES[line] in str(refused.value)
    assert len(refused.value.message) < len(str(file)) + 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lora_r": "0"}, "--lora_r is 0, expected 1 or more"),
        ({"lora_r": "70000"}, "--lora_r is 70000, expected 65,536 or less"),
        ({"max_steps": "0"}, "--max_steps is 0, expected 1 or more, or -1"),
        ({"max_seq_length": "1"}, "--max_seq_length is 1, expected 2 or more"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs is 0, expected more than 0"),
        ({"adam_beta1": "2"}, "--adam_beta1 is 2, expected a fraction from 0 to below 1"),
        ({"seed": "-1"}, "--seed is -1, expected 0 or more"),
        ({"seed": str(2**32)}, "--seed is 4294967296, expected 4,294,967,295 or less"),
        ({"preprocessing_num_workers": 10**6}, "--preprocessing_num_workers is 1000000, expected 1,024 or less"),
        ({"stop_when_steps_within": "2"}, "--stop_when_steps_within is 2, expected a fraction above 0 and below 1"),
        ({"untimed_steps": "-1"}, "--untimed_steps is -1, expected 0 or more"),
    ],
)
def test_a_number_out_of_range_is_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        check_values(Job.from_values(arguments), on_cpu=True)
    assert caught.value.message == expected


def test_a_word_that_is_no_choice_is_refused_with_the_nearest() -> None:
    for name, given, close in (
        ("optim", "adamw", "adamw_torch"),
        ("optim", "ADAMW_TORCH", "adamw_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("loss_on", "asistant", "assistant"),
    ):
        with pytest.raises(ToolkitError) as caught:
            check_values(Job.from_values({name: given}), on_cpu=True)
        assert caught.value.message.startswith(f"--{name} is {given!r}, expected ")
        assert caught.value.hint == f"did you mean `{close}`?"
    with pytest.raises(ToolkitError, match="--loss_on is 'everything', expected assistant or all"):
        check_values(Job(loss_on="everything"), on_cpu=True)
    assert nearest_word("", ["sgd"]) is None


# Name and value of the other tool, ours.
ACCEPTED = [("dataset_name", "owner/name", "dataset", "owner/name"), ("dataset_config", "en", "dataset_config", "en")]
ACCEPTED += [("max_length", "512", "max_seq_length", "512"), ("model_revision", "v1.1", "revision", "v1.1")]
ACCEPTED += [("base_model", "Qwen/Qwen3-8B", "model_name_or_path", "Qwen/Qwen3-8B"), ("lora_rank", "8", "lora_r", "8")]
ACCEPTED += [("lora_target", "q_proj,v_proj", "lora_target_modules", ["q_proj", "v_proj"])]
ACCEPTED += [("lora_target", "all", "lora_target_modules", ["all-linear"])]
ACCEPTED += [("dataset_num_proc", "4", "preprocessing_num_workers", "4")]
ACCEPTED += [("assistant_only_loss", "true", "loss_on", "assistant"), ("train_on_inputs", "true", "loss_on", "all")]
ACCEPTED += [("train_on_inputs", "false", "loss_on", "assistant"), ("sample_packing", "true", "packing", "true")]
ACCEPTED += [("micro_batch_size", "4", "per_device_train_batch_size", "4")]
ACCEPTED += [("flash_attention", "true", "attn_implementation", "flash_attention_2")]
# Name and value of the other tool, what the hint says to type.
REFUSED = [("cutoff_len", "512", "`--max_seq_length`"), ("sequence_len", "512", "`--max_seq_length`")]
REFUSED += [("lr", "1e-4", "`--learning_rate`"), ("train_batch_size", "2", "`--per_device_train_batch_size`")]
REFUSED += [("use_peft", "true", "`--lora_r 16`"), ("dtype", "bfloat16", "`--bf16 false`")]
REFUSED += [("config", "job.yaml", "`-- config.yaml --max_steps 8`")]
REFUSED += [("fp8", "true", "`toolkit plan --fp8`")]
REFUSED += [("num_processes", "2", "`toolkit train --num-processes 2 -- ...`")]
REFUSED += [("assistant_only_loss", "false", "`--loss_on`"), ("flash_attention", "false", "`--attn_implementation`")]
# What another name was once mistaken for.
MISLEADING = {
    "use_peft": "use_cpu",
    "train_batch_size": "auto_find",
    "lora_rank": "local_rank",
    "config": "lora_config",
}

WAYS = pytest.mark.parametrize("way", ["flag", "dashed flag", "assignment", "YAML key"])


def given(way: str, name: str, value: Any, folder: Path) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if way == "YAML key":
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({name: yaml.safe_load(value) if isinstance(value, str) else value}))
        return [str(path)]
    if way == "assignment" and len(values) == 1:
        return [f"--{name}={values[0]}"]
    return [f"--{name.replace('_', '-') if way == 'dashed flag' else name}", *values]


@WAYS
@pytest.mark.parametrize(("theirs", "value", "ours", "our_value"), ACCEPTED)
def test_an_argument_of_another_tool_starts_the_same_run_as_ours(
    theirs: str, value: str, ours: str, our_value: Any, way: str, tmp_path: Path
) -> None:
    read = read_arguments(given(way, ours, our_value, tmp_path))
    assert set(read) == {ours}
    assert read_arguments(given(way, theirs, value, tmp_path)) == read


@WAYS
@pytest.mark.parametrize(("theirs", "value", "typed"), REFUSED)
def test_an_argument_that_means_something_else_is_answered_with_what_to_type(
    theirs: str, value: str, typed: str, way: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_arguments(given(way, theirs, value, tmp_path))
    assert theirs in caught.value.message
    assert typed in str(caught.value.hint)
    assert MISLEADING.get(theirs, "no other") not in str(caught.value.hint)


def test_an_argument_under_both_names_is_refused_in_a_file() -> None:
    with pytest.raises(ToolkitError, match="max_length and max_seq_length are the same argument") as caught:
        canonical_values({"max_seq_length": 512, "max_length": 256})
    assert caught.value.hint == "keep `max_seq_length`"


def test_every_alias_and_hint_is_about_an_argument_that_we_do_not_have() -> None:
    ours = argument_types()
    assert {alias.name for alias in ALIASES.values()} <= set(ours)
    assert not (set(ALIASES) | set(HINTS)) & set(ours)
    assert not set(ALIASES) & set(HINTS)

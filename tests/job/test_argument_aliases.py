"""Arguments of TRL, axolotl and LLaMA-Factory: accepted where they mean the same, else answered with what to type."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import ToolkitError
from toolkit.job.argument_aliases import ALIASES, HINTS, canonical_values
from toolkit.job.argument_reading import argument_types, read_arguments

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

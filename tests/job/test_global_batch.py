"""The global batch: its accumulation steps, the learning rate for it, and gradients that stay sharded meanwhile."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.accumulation import chosen_accumulate
from toolkit.job.global_batch import scaled_rate, with_accumulation
from toolkit.job.job import Job
from toolkit.presets import list_presets, load_preset
from toolkit.presets.spec import default_accumulate
from toolkit.presets.support import check_arguments, unsupported
from toolkit.presets.training_arguments import trainer_arguments

BATCH = Job(per_device_train_batch_size=2, global_batch_size=8)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_accumulation_steps_make_up_for_the_number_of_ranks(ranks: int, steps: int) -> None:
    assert with_accumulation(BATCH, data_parallel_size=ranks) == replace(BATCH, gradient_accumulation_steps=steps)
    without = Job(gradient_accumulation_steps=3)
    assert with_accumulation(without, data_parallel_size=ranks) is without


def test_accumulation_steps_may_be_given_too_if_they_agree() -> None:
    agreed = BATCH.with_values(gradient_accumulation_steps=2)
    assert with_accumulation(agreed, data_parallel_size=2) == agreed
    with pytest.raises(ToolkitError, match="× 4 accumulation steps, and --gradient_accumulation_steps is 2") as error:
        with_accumulation(agreed, data_parallel_size=1)
    assert "leave `--gradient_accumulation_steps` out" in str(error.value.hint)


@pytest.mark.parametrize(
    ("micro_batch", "groups", "ranks_per_batch", "message", "hint"),
    [
        (2, 3, 1, "is no multiple of 3 data-parallel ranks × 2 sequences (--per_device_train_batch_size); numbers of"
         " processes that keep it: 1, 2, 4", "train on 2"),
        (2, 3, 2, "that keep it: 2, 4, 8", "train on 4"),  # ranks that share their rows
        (4, 4, 1, "is no multiple of 4 data-parallel ranks × 4", "`--per_device_train_batch_size 2`"),
    ],
)  # fmt: skip
def test_a_number_of_processes_that_cannot_keep_the_batch_is_refused_with_what_can(
    micro_batch: int, groups: int, ranks_per_batch: int, message: str, hint: str
) -> None:
    job = BATCH.with_values(per_device_train_batch_size=micro_batch)
    with pytest.raises(ToolkitError) as error:
        with_accumulation(job, data_parallel_size=groups, ranks_per_batch=ranks_per_batch)
    assert message in error.value.message
    assert error.value.hint == hint


# Each lets the rows of a step depend on the number of ranks.
DEPENDENT = ["--auto_find_batch_size true", "--ignore_data_skip", "--train_sampling_strategy batch_rebalance"]
DEPENDENT += ['--accelerator_config {"use_seedable_sampler":false}', '--accelerator_config {"split_batches":true}']


@pytest.mark.parametrize("words", DEPENDENT)
def test_an_argument_that_lets_rows_depend_on_the_number_of_ranks_is_refused_by_name(words: str) -> None:
    job = Job.from_argv(words.split())
    check_arguments(job, None, num_processes=2, on_cpu=True)
    with pytest.raises(ToolkitError, match=f"--global_batch_size does not go with {words.split()[0]}"):
        check_arguments(job.with_values(global_batch_size=8), None, num_processes=2, on_cpu=True)


@pytest.mark.parametrize(
    ("rule", "rate", "arithmetic"),
    [("linear", 8e-5, "64/16 (linear) = 8e-05"), ("sqrt", 4e-5, "√(64/16) (sqrt) = 4e-05")],
)
def test_the_rate_is_scaled_and_the_arithmetic_is_shown(rule: str, rate: float, arithmetic: str) -> None:
    scaled = scaled_rate(2e-5, rule=rule, global_batch_size=64, reference_batch_size=16)
    assert scaled.learning_rate == pytest.approx(rate)
    assert scaled.sentence == f"learning rate 2e-05 × {arithmetic}"


# -- sharded or whole gradients: who chooses, and what it becomes in `accelerator_config`

SYNC: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def test_gradients_stay_sharded_under_each_preset_that_shards_them() -> None:
    whole = {preset.name for preset in list_presets() if default_accumulate(preset) == "whole"}
    assert whole == {"single", "ddp", "zero1", "pipeline_1f1b"}


def test_only_fsdp2_has_a_choice() -> None:
    def accepted(accumulate: str) -> set[str]:
        method = Job(accumulate=accumulate)
        return {preset.name for preset in list_presets() if unsupported(preset, method) is None}

    fsdp2 = {preset.name for preset in list_presets() if preset.engine == "fsdp2"}
    assert accepted("whole") & accepted("sharded") == fsdp2
    assert accepted("whole") == fsdp2 | {"single", "ddp", "zero1", "pipeline_1f1b"}


def test_sync_each_batch_of_the_user_is_the_same_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SYNC))
    for given in (SYNC, json.dumps(SYNC), str(tmp_path / "config.json")):
        assert Job.from_values({"accelerator_config": given}).chosen_accumulate == "sharded"
    assert Job(accelerator_config={"even_batches": False}).chosen_accumulate is None


def test_two_choices_that_contradict_each_other_are_refused() -> None:
    assert chosen_accumulate("sharded", SYNC) == "sharded"
    with pytest.raises(ToolkitError) as refused:
        chosen_accumulate("whole", SYNC)
    assert refused.value.message == (
        "accumulate is whole, but accelerator_config has sync_each_batch: true, which means sharded"
    )
    assert refused.value.hint == "leave one of them out"


def test_the_trainer_arguments_of_fsdp2_alone_carry_the_default() -> None:
    carried = {p.name for p in list_presets() if "accelerator_config" in trainer_arguments(p, precision="no")}
    assert carried == {preset.name for preset in list_presets() if preset.engine == "fsdp2"}
    assert trainer_arguments(load_preset("fsdp2"), precision="no")["accelerator_config"] == SYNC

"""`--global_batch_size` decides the accumulation steps, or names the numbers of processes that keep the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.global_batch import scaled_rate, with_accumulation
from toolkit.job.job import Job
from toolkit.presets.preset_checks import check_arguments

BATCH = Job(per_device_train_batch_size=2, global_batch_size=8)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_accumulation_steps_make_up_for_the_number_of_ranks(ranks: int, steps: int) -> None:
    kept = with_accumulation(BATCH, data_parallel_size=ranks)
    assert kept == replace(BATCH, gradient_accumulation_steps=steps)


def test_without_the_argument_nothing_changes() -> None:
    job = Job(gradient_accumulation_steps=3)
    assert with_accumulation(job, data_parallel_size=2) is job


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


@pytest.mark.parametrize(
    "words",
    [
        ["--auto_find_batch_size", "true"],
        ["--ignore_data_skip"],
        ["--train_sampling_strategy", "batch_rebalance"],
        ["--accelerator_config", '{"use_seedable_sampler": false}'],
        ["--accelerator_config", '{"split_batches": true}'],
    ],
)
def test_an_argument_that_lets_rows_depend_on_the_number_of_ranks_is_refused_by_name(words: list[str]) -> None:
    def check(*more: str) -> list[str]:
        return check_arguments(Job.from_argv([*words, *more]), None, num_processes=2, on_cpu=True)

    check()
    with pytest.raises(ToolkitError, match=f"--global_batch_size does not go with {words[0]}"):
        check("--global_batch_size", "8")


def test_the_rate_is_scaled_and_the_arithmetic_is_shown() -> None:
    linear = scaled_rate(2e-5, rule="linear", global_batch_size=64, reference_batch_size=16)
    assert linear.learning_rate == pytest.approx(8e-5)
    assert linear.sentence == "learning rate 2e-05 × 64/16 (linear) = 8e-05"
    root = scaled_rate(2e-5, rule="sqrt", global_batch_size=64, reference_batch_size=16)
    assert root.learning_rate == pytest.approx(4e-5)
    assert root.sentence == "learning rate 2e-05 × √(64/16) (sqrt) = 4e-05"

"""Weights and streaming options are checked before the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.dataset_checks import check_streaming, check_weights, streaming_warnings
from toolkit.job.job import Job
from toolkit.record.checkpoints import Checkpoint, Manifest
from toolkit.record.resume_checks import check_resume_settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--streaming needs --max_steps"),
        ({"max_steps": "5", "val_size": "0.1"}, "--val_size with --streaming"),
        ({"max_steps": "5", "train_sampling_strategy": "group_by_length"}, "group_by_length with --streaming"),
        ({"max_steps": "5", "dataloader_num_workers": "3"}, "is 3, and a stream is divided among 0, 1, 2, 4 or 8"),
    ],
)
def test_unsupported_streaming_options_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        check_streaming(Job.from_values({"streaming": "true", **given}))
    check_streaming(Job.from_values(given))


def test_options_without_effect_are_reported() -> None:
    assert streaming_warnings(Job.from_values({"streaming_buffer_size": "5"})) == [
        "--streaming_buffer_size has no effect without --streaming"
    ]
    assert (
        "`--dataloader_num_workers` has"
        in streaming_warnings(Job.from_values({"streaming": True, "preprocessing_num_workers": 2}))[0]
    )
    assert streaming_warnings(Job.from_values({"streaming": True, "streaming_buffer_size": "5"})) == []


@pytest.mark.parametrize(
    ("then", "now", "hint"),
    [
        (8, 16, "`--streaming true --streaming_buffer_size 8`"),
        (8, 0, "buffer_size 8`"),
        (0, 8, "leave `--streaming` out"),
    ],
)
def test_resuming_with_another_streaming_buffer_is_refused(then: int, now: int, hint: str, tmp_path: Path) -> None:
    options = {"global_batch_size": 1, "data_parallel_size": 1, "seed": 42, "max_steps": 9}
    checkpoint = Checkpoint(path=tmp_path, step=3, manifest=Manifest(step=3, files=(), streaming_buffer_size=then))
    with pytest.raises(ToolkitError, match="the data would not resume") as caught:
        check_resume_settings(checkpoint, **options, streaming_buffer_size=now)
    assert str(caught.value.hint).endswith(hint)
    check_resume_settings(checkpoint, **options, streaming_buffer_size=then)


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["a.jsonl", "b.jsonl"], "0.7", "--dataset_weights has length 1, expected 2: a weight for each data set"),
        ("a.jsonl", ["0.7", "0.3"], "--dataset_weights has length 2, expected 1: a weight for each data set"),
        (["a.jsonl", "b.jsonl"], ["0.7", "0"], "--dataset_weights has 0, expected numbers above 0"),
        (["a.jsonl", "b.jsonl"], [0.7, -1.5], "--dataset_weights has -1.5, expected numbers above 0"),
    ],
)
def test_weights_that_do_not_fit_the_data_sets_are_refused(names: object, weights: object, message: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        check_weights(Job.from_values({"dataset": names, "dataset_weights": weights}))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("then", "now", "hint"),
    [
        ([0.7, 0.3], [], "`--dataset_weights 0.7 0.3`"),
        ([], [0.7, 0.3], "leave `--dataset_weights` out"),
        ([0.7, 0.3], [0.3, 0.7], "`--dataset_weights 0.7 0.3`"),
    ],
)
def test_resuming_with_other_weights_is_refused(then: list[float], now: list[float], hint: str, tmp_path: Path) -> None:
    options = {"global_batch_size": 1, "data_parallel_size": 1, "seed": 42, "max_steps": 9}
    checkpoint = Checkpoint(path=tmp_path, step=3, manifest=Manifest(step=3, files=(), dataset_weights=then))
    with pytest.raises(ToolkitError, match="was trained with --dataset_weights") as caught:
        check_resume_settings(checkpoint, **options, dataset_weights=now)
    assert caught.value.hint == hint
    check_resume_settings(checkpoint, **options, dataset_weights=then)


def test_another_optimizer_does_not_resume_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"global_batch_size": 1, "data_parallel_size": 1, "seed": 42, "max_steps": 9}
    checkpoint = Checkpoint(path=tmp_path, step=3, manifest=Manifest(step=3, files=(), optim="adamw_bnb_8bit"))
    with pytest.raises(
        ToolkitError, match="has the states of --optim adamw_bnb_8bit, with which --optim sgd"
    ) as caught:
        check_resume_settings(checkpoint, **options, optim="sgd")
    assert caught.value.hint == "`--optim adamw_bnb_8bit`"
    for optim in ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"):  # one class, one format
        check_resume_settings(checkpoint, **options, optim=optim)

"""Weights and streaming options are checked before the launch."""

from __future__ import annotations

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.dataset_checks import check_streaming, check_weights, streaming_warnings
from toolkit.job.job import Job


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

"""Fake tensors answer with true values where these follow from the batch, and say where they make one up."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.models.fake_values import ValueAnswers, unanswered

MASK = torch.tensor([[True, True, False], [True, False, False]])


@contextmanager
def answering() -> Iterator[ValueAnswers]:
    answers = ValueAnswers()
    with FakeTensorMode(allow_non_fake_inputs=True), answers:
        yield answers


def fake_of(answers: ValueAnswers, values: torch.Tensor) -> torch.Tensor:
    fake = torch.empty(values.shape, dtype=values.dtype)
    answers.know(fake, values)
    return fake


def test_what_follows_from_the_batch_has_its_true_value() -> None:
    with answering() as answers:
        mask, weights = fake_of(answers, MASK), torch.empty(2, 3)
        assert (mask.sum().item(), mask.sum(dim=1).max().item(), bool(mask.all())) == (3, 2, False)
        assert weights[mask].shape == weights.masked_select(mask).shape == (3,)
        assert torch.unique(mask.long().cumsum(1)).shape == (2,)
    assert answers.made_up == {}


def test_what_follows_from_weights_is_made_up_and_listed_with_its_line() -> None:
    with answering() as answers:
        weights = torch.empty(2, 3)
        assert weights.mean().item() == 1.0
        assert weights[weights > 0].shape == (6,)
    first, second = answers.made_up
    assert first.startswith("1.0 for a number read at ")
    assert second.startswith("all elements where a mask selects at ")
    assert f"{Path(__file__).name}:" in first


def test_a_known_tensor_that_is_overwritten_is_known_no_more() -> None:
    with answering() as answers:
        lengths, unknown = fake_of(answers, torch.ones(4)), torch.empty(4)
        row = lengths[:2]
        lengths.copy_(unknown)
        assert (answers.values(lengths), answers.values(row)) == (None, None)


@pytest.mark.parametrize("read", [torch.unique, torch.Tensor.numpy])
def test_what_cannot_be_answered_is_an_error_that_names_the_line_and_others_are_left_as_they_are(read: object) -> None:
    with answering():
        weights = torch.empty(4)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            read(weights)  # type: ignore[operator]
    refused = unanswered(raised.value)
    assert f"{Path(__file__).name}:" in refused.message
    assert "reads values that fake tensors do not have: `read(weights)" in refused.message
    assert unanswered(ValueError("a mistake in the script")) is None

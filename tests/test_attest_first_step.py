"""What is seen in the first step itself: the norm that reaches the optimizer, and what backward computes again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from toolkit.train.attest.check import describe
from toolkit.train.attest.clipping import GradientNorms, clipping_differences, without_norms
from toolkit.train.attest.recomputation import Recomputation, recomputes_activations

Facts = dict[str, Any]


def ranks(*at_optimizer: float | None, told: float | None = 2.0, **facts: Any) -> list[Facts]:
    """What ranks read of the first step: a norm that all know, and what each one's optimizer got."""
    known = {"grad_norm": told, "local_grad_norm": None, "grad_norm_ranks": None, "tried_norm": 1.0}
    known |= {"sharding": "full_shard"} | facts
    return [{"rank": rank, "optimizer_norm": share, **known} for rank, share in enumerate(at_optimizer)]


# -- clipping. A norm of 2 clipped at 1 leaves 1: whole on each of two replicas, 0.6 and 0.8 on two shards.

REPLICATED = {"sharding": "replicate"}


@pytest.mark.parametrize(
    "kept",
    [
        ranks(1.0, 1.0, **REPLICATED),
        ranks(0.6, 0.8),
        ranks(0.6, 0.8, 0.6, 0.8, sharding="hybrid_shard", dp_shard_size=2),
        ranks(0.6, 0.8, told=None, local_grad_norm=2**0.5, grad_norm_ranks=2),  # FSDP2: each knows its share of 2
        ranks(0.3, 0.4, told=0.5),  # nothing to clip
        ranks(0.6, None),  # an optimizer that cannot be looked at
        ranks(0.6, 0.8, told=None),
        ranks(0.6, 0.8, told=float("inf")),  # fp16: the step was skipped
    ],
)
def test_a_gradient_that_was_clipped_as_it_should_is_no_difference(kept: list[Facts]) -> None:
    assert clipping_differences(kept, 1.0) == []


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (ranks(2.0, 2.0, **REPLICATED), "2.0000"),
        (ranks(1.0, 7**0.5, **REPLICATED), "2.0000"),  # one rank clips: the mean of the squares
        (ranks(1.2, 1.6), "2.0000"),
        (ranks(0.3, 0.4), "0.5000"),  # clipped at another norm
    ],
)
def test_a_gradient_that_was_not_is_told_with_both_norms(wrong: list[Facts], found: str) -> None:
    said = [describe(difference) for difference in clipping_differences(wrong, 1.0)]
    assert said == [f"gradient norm at the optimizer is {found}, promised 1.0000 (2.0000, clipped at 1)"]


def test_a_first_gradient_too_small_to_tell_leaves_it_to_a_large_one() -> None:
    """Ten times the threshold is tried on each rank."""
    wrong = ranks(0.3, 0.4, told=0.5)
    wrong[1]["tried_norm"] = 10.0
    said = [describe(difference) for difference in clipping_differences(wrong, 1.0)]
    assert said == ["norm of a large gradient, clipped on rank 1 is 10.0000, promised 1.0000 (10.0000, clipped at 1)"]


def test_without_a_threshold_nothing_may_be_clipped() -> None:
    assert clipping_differences(ranks(1.2, 1.6, tried_norm=None), 0.0) == []
    (difference,) = clipping_differences(ranks(0.6, 0.8, tried_norm=None), 0.0)
    assert difference["found"] == "1.0000"


def test_what_is_kept_of_the_norms_is_whether_there_was_anything_to_clip() -> None:
    assert [without_norms(ranks(1.0, told=told), 1.0)[0]["clipped"] for told in (2.0, 0.5, None)] == [True, False, None]
    assert without_norms(ranks(1.0), 0.0) == [{"rank": 0, "sharding": "full_shard", "clipped": False}]


class OneParameter:
    """A Trainer as far as its gradient norm goes."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.AdamW([self.parameter])
        self.model_wrapped = torch.nn.ParameterList([self.parameter])
        self.args = SimpleNamespace(max_grad_norm=1.0, fp16=False)

    def _clip_grad_norm(self, model: Any) -> Any:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def _get_grad_norm(self, model: Any, grad_norm: Any) -> Any:
        del model
        return grad_norm

    def step(self) -> None:
        self.parameter.grad = torch.tensor([3.0, 4.0])
        self._get_grad_norm(self.model_wrapped, self._clip_grad_norm(self.model_wrapped))
        self.optimizer.step()


def test_both_norms_are_read_from_one_step_alone() -> None:
    trainer, norms = OneParameter(), GradientNorms()
    norms.watch(trainer)
    trainer.step()
    norms.close()
    read = dict(norms.facts)
    assert read["grad_norm"] == pytest.approx(5.0)
    assert read["optimizer_norm"] == pytest.approx(1.0)
    assert read["tried_norm"] == pytest.approx(1.0)
    trainer.step()
    assert norms.facts == read


# -- activation checkpointing


@pytest.fixture
def watch() -> Iterator[Recomputation]:
    found = Recomputation()
    found.watch()
    yield found
    found.close()


class Block(torch.nn.Module):
    def __init__(self, *, recomputes: bool, flagged: bool) -> None:
        super().__init__()
        self.inner, self.recomputes, self.gradient_checkpointing = torch.nn.Linear(2, 2), recomputes, flagged

    def forward(self, values: torch.Tensor) -> Any:
        values = checkpoint(self.inner, values, use_reentrant=False) if self.recomputes else self.inner(values)
        return values.sigmoid()


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_recomputation_is_what_backward_does(watch: Recomputation, recomputes: bool, flagged: bool) -> None:
    block = Block(recomputes=recomputes, flagged=flagged)
    block(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert watch.seen is recomputes
    assert recomputes_activations(block, watch.seen) is recomputes


def test_flags_hold_where_nobody_looked_or_nothing_in_them_is_trained() -> None:
    block = Block(recomputes=True, flagged=True)
    assert recomputes_activations(block, None)
    assert not recomputes_activations(block, False)
    block.requires_grad_(False)
    assert recomputes_activations(block, False)

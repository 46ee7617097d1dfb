"""How a loss is divided for accumulation is read from its graph: what is an average, or not known, gives no warning."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div, mse_loss

from toolkit.observe.verify.loss_scale import scale_warning

LABELS = torch.tensor([0, 1, 2, 0])


def mean(logits: Tensor) -> Tensor:
    return cross_entropy(logits, LABELS)


def total(logits: Tensor) -> Tensor:
    return cross_entropy(logits, LABELS, reduction="sum")


def distilled(logits: Tensor) -> Tensor:
    return kl_div(logits.log_softmax(-1), torch.full((4, 4), 0.25), reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: mean(x) / 4, "again by accelerate's `backward`"),
        (lambda x: (mean(x) / 4).float().reshape(()), "again by accelerate's `backward`"),
        (lambda x: (0.5 * mean(x) + 0.5 * distilled(x)) / 4, "again by accelerate's `backward`"),
        (mean, ""),
        (lambda x: mean(x) / 8, ""),
        (lambda x: total(x) / 4, ""),  # a batch of 4 rows
        (lambda x: (x.square().sum(-1) * 2).sum() / 4, ""),
        (lambda x: x.square().sum(-1).nanmean(), ""),  # torch divides a sum by 4 rows
        (lambda x: x.exp().amax() / 4, ""),  # not known
        (lambda x: sum(mean(x * n) for n in range(1, 5)) / 4, ""),  # the average of 4 terms
    ],
)
def test_a_loss_that_a_loop_divides_for_accelerate_too(loss: Callable[[Tensor], Tensor], said: str) -> None:
    logits = torch.arange(16.0).reshape(4, 4).requires_grad_()
    warned = scale_warning(loss(logits), 4, by_accelerate=True)
    assert (said in warned) if said else warned == ""
    assert scale_warning(loss(logits), 1, by_accelerate=True) == ""


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (mean, "nothing divides the loss"),
        (lambda x: 0.3 * mean(x) + 0.7 * distilled(x), "nothing divides the loss"),
        (lambda x: binary_cross_entropy_with_logits(x, torch.ones(4, 4)), "nothing divides the loss"),
        (lambda x: (total(x) / 3) * 2, "nothing divides the loss"),  # labels of this micro-batch alone
        (lambda x: mean(x) / 2 / 2, "again by the Trainer"),
        (lambda x: mean(x) / 2, ""),
        (lambda x: mean(x) * 0.5, ""),
        (lambda x: total(x) / torch.tensor(10), ""),  # the labels of all micro-batches
        (lambda x: total(x) / torch.tensor(10) + 0.1 * x.mean(), ""),
        (total, ""),
        (lambda x: x.exp().amax(), ""),  # not known
    ],
)
def test_a_loss_that_a_trainer_leaves_to_its_model(loss: Callable[[Tensor], Tensor], said: str) -> None:
    logits = torch.arange(16.0).reshape(4, 4).requires_grad_()
    warned = scale_warning(loss(logits), 2, by_accelerate=False, items=torch.tensor(10))
    assert (said in warned) if said else warned == ""
    if "nothing" in said:
        assert scale_warning(loss(logits), 2, by_accelerate=False) == ""  # the Trainer has counted no labels


@pytest.mark.parametrize("loss", [lambda x: mse_loss(x, torch.ones(4, 4)), lambda x: (x - 1).square().mean()])
def test_half_a_squared_error_is_no_division_for_two_steps(loss: Callable[[Tensor], Tensor]) -> None:
    logits = torch.arange(16.0).reshape(4, 4).requires_grad_()
    assert scale_warning(loss(logits) / 2, 2, by_accelerate=True) == ""
    assert "again by accelerate" in scale_warning(loss(logits) / 2 / 2, 2, by_accelerate=True)
    assert "again by accelerate" in scale_warning(loss(logits) / 4, 4, by_accelerate=True)

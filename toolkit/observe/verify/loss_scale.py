"""Read how often the first loss is divided by the accumulation steps, from what autograd has saved of it.

A loss that is divided by the script and by the library trains with gradients that are too small by a factor that
nobody asked for; one that nothing divides, with their sum. Training does not fail, and clipping or Adam may hide it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Nodes that change no value: casts of autocast, views, and what DDP puts around outputs.
_SAME_VALUE = ("ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone", "_DDPSink")
_MEAN_OF_BATCH, _SUM_OF_BATCH = 1, 2  # ATen's `Reduction`, as loss nodes save it


def scale_warning(loss: Any, steps: int, *, by_accelerate: bool, items: Any = None) -> str:
    """Return a line for a loss that goes into `accelerator.backward`; empty where it is divided once, or not known.

    `steps` are the accumulation steps, by which accelerate divides it once more where it is `by_accelerate`; `items`
    are the labels of all of them, which a Trainer has counted for its model.
    """
    if steps < 2:
        return ""
    name = f"gradient_accumulation_steps ({steps})"
    if (times := divisions(loss, steps) + by_accelerate) > 1:
        library = "accelerate's `backward`" if by_accelerate else "the Trainer"
        return f"warning: the loss is divided by {name} by the script, and again by {library}: leave out the script's"
    whole = (
        () if items is None else (float(items), float(items) / (dist.get_world_size() if dist.is_initialized() else 1))
    )
    if times or items is None or not is_mean_of_batch(loss, steps, *whole):
        return ""
    return (
        f"warning: the loss is a mean over each micro-batch, and nothing divides it by {name}, so that gradients are"
        f" {steps} times as large: divide it by `num_items_in_batch`, or `trainer.model_accepts_loss_kwargs = False`"
        " lets the Trainer divide by the steps"
    )


def divisions(loss: Any, steps: int) -> int:
    """Return how often a loss is divided by `steps` in its last operations, an average of as many terms left out.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> divisions(weight.mean() / 4 / 4, 4), divisions((weight.mean() + weight.max()) / 2, 2), divisions(weight[0], 2)
    (2, 0, 0)
    """
    node, times = getattr(loss, "grad_fn", None), 0
    while node is not None:
        if node.name() == "DivBackward0" and _other(node) == steps:
            times += 1
        elif not node.name().startswith(_SAME_VALUE):
            break
        node = next(_inputs(node), None)
    average = node is not None and (_is_sum(node) or len(list(_terms(node))) == steps)
    return max(0, times - average)


def is_mean_of_batch(loss: Any, *wholes: float) -> bool:
    """Return True if a loss is certainly the mean over one micro-batch, or a sum of such means.

    It is not where a term is divided by one of `wholes`, the items and the steps of all accumulation steps, or by what
    is not known here.
    """
    node = getattr(loss, "grad_fn", None)
    return node is not None and all(_is_mean(term, wholes) for term in _terms(node))


def _is_mean(node: Any, wholes: tuple[float, ...]) -> bool:
    name = node.name()
    if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN_OF_BATCH:
        return True
    factor = _other(node)
    if name == "DivBackward0" and factor is not None and factor not in wholes:
        below = next(_inputs(node), None)
        return below is not None and (_is_sum(below) or all(_is_mean(term, wholes) for term in _terms(below)))
    if name == "MulBackward0" and factor is not None and all(abs(factor * whole - 1) > 1e-6 for whole in wholes):
        return all(_is_mean(term, wholes) for each in _inputs(node) for term in _terms(each))
    return False


def _is_sum(node: Any) -> bool:
    return node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == _SUM_OF_BATCH


def _terms(node: Any) -> Iterator[Any]:
    """Yield what a node adds, itself where it adds nothing; casts and views of a term are left out."""
    if node.name().startswith((*_SAME_VALUE, "AddBackward")):
        for each in _inputs(node):
            yield from _terms(each)
    else:
        yield node


def _inputs(node: Any) -> Iterator[Any]:
    return (each for each, _ in node.next_functions if each is not None)


def _other(node: Any) -> float | None:
    """The number that a node divides or multiplies by; None where it is a tensor of several, or trained."""
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, torch.Tensor) and other.numel() == 1 and not other.requires_grad else None

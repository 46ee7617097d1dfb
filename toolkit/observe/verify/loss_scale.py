"""Read from what autograd has saved of a loss how often it is divided by the accumulation steps: twice, or never."""

from typing import Any

import torch
import torch.distributed as dist

# Nodes that change no value: casts of autocast, views, and what DDP puts around outputs.
_SAME_VALUE = ("ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone", "_DDPSink")
_MEAN, _SUM = 1, 2  # ATen's `Reduction`, as loss nodes save it


def scale_warning(loss: Any, steps: int, *, by_accelerate: bool, items: Any = None) -> str:
    """Return a line for a loss that `steps` divide twice, once `by_accelerate`, or never; empty if that is not known.

    `items` are the labels of all accumulation steps, which a Trainer has counted for its model.
    """
    name, times = f"gradient_accumulation_steps ({steps})", _divisions(loss.grad_fn, steps) + by_accelerate
    if steps > 1 < times:
        library = "accelerate's `backward`" if by_accelerate else "the Trainer"
        return f"warning: the loss is divided by {name} by the script, and again by {library}: leave out the script's"
    if steps == 1 or times or items is None:
        return ""
    of_rank = float(items) / (dist.get_world_size() if dist.is_initialized() else 1)
    return (
        f"warning: nothing divides the loss, a mean over each micro-batch, by {name}: divide it by `num_items_in_batch`"
        ", or let the Trainer divide, `trainer.model_accepts_loss_kwargs = False`"
    ) * _is_mean(loss.grad_fn, (steps, float(items), of_rank))


def _divisions(node: Any, steps: int) -> int:
    """Count the last divisions of a mean by `steps`, but not one that averages as many terms or halves a square."""
    times = 0
    while node is not None and (
        (divides := node.name() == "DivBackward0" and _other(node) == steps) or node.name().startswith(_SAME_VALUE)
    ):
        node, times = next(iter(_inputs(node)), None), times + divides
    terms = [] if node is None else _terms(node)
    names = {each.name() for term in terms for each in (term, *_inputs(term))}
    averages = len(terms) == steps or (steps == 2 and names & {"MseLossBackward0", "PowBackward0"})
    return max(0, times - bool(terms and (averages or not _is_mean(node, ()))))


def _is_mean(node: Any, wholes: tuple[float, ...]) -> bool:
    """True for a sum of what are certainly means over one micro-batch: no term is divided by one of `wholes`."""
    for term in _terms(node):
        name, factor, inputs = term.name(), _other(term), _inputs(term)
        is_mean = name.startswith("MeanBackward") or getattr(term, "_saved_reduction", None) == _MEAN
        if name == "DivBackward0" and factor is not None and factor not in wholes:
            is_sum = inputs[0].name().startswith(("SumBackward", "NansumBackward"))
            is_sum |= getattr(inputs[0], "_saved_reduction", None) == _SUM
            is_mean = is_sum or _is_mean(inputs[0], wholes)
        elif name == "MulBackward0" and factor is not None and all(abs(factor * each - 1) > 1e-6 for each in wholes):
            is_mean = all(_is_mean(each, wholes) for each in inputs)
        if not is_mean:
            return False
    return True


def _terms(node: Any) -> list[Any]:
    """What a node adds, itself where it adds nothing; casts and views are left out."""
    passes = node.name().startswith(("AddBackward", "SubBackward", "NegBackward", *_SAME_VALUE))
    return [term for each in _inputs(node) for term in _terms(each)] if passes else [node]


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _other(node: Any) -> float | None:
    """The number that a node divides or multiplies by; None where it is a tensor of several."""
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, torch.Tensor) and other.numel() == 1 else None

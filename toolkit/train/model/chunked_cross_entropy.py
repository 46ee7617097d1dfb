"""Cross entropy of a language-model head, a chunk of tokens at a time: the full logits never exist.

A chunk's logits, loss and gradients are computed together in the forward, so that the head's three matrix products run
once, as without chunks; backward only scales the gradients. Those of the head are added up in fp32 over the chunks.

torch's `linear_cross_entropy` (2.13) works the same way for a plain linear head, but adds up a bf16 head's gradient in
bf16 and takes neither soft-capped logits nor label smoothing nor a head with adapters; Liger's needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScale:
    """How a model changes the logits of its head: a factor (Granite, Cohere), a soft cap (Gemma 2), or nothing.

    >>> LogitScale(slope=0.5)(torch.tensor([4.0]))
    tensor([2.])
    """

    slope: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale the logits in place."""
        if self.cap is not None:
            return logits.mul_(self.slope / self.cap).tanh_().mul_(self.cap)
        return logits if self.slope == 1.0 else logits.mul_(self.slope)

    def scale_gradient(self, gradient: torch.Tensor, scaled: torch.Tensor | None) -> None:
        """Multiply the gradient of scaled logits by the derivative; the logits are needed with a cap only."""
        if self.cap is not None:
            assert scaled is not None
            gradient.mul_(scaled.div_(self.cap).square_().neg_().add_(1.0))
        if self.slope != 1.0:
            gradient.mul_(self.slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """How the loss is computed."""

    chunk_tokens: int
    scale: LogitScale = LogitScale()
    label_smoothing: float = 0.0


class GradientSum:
    """A parameter's gradient, added up over chunks in fp32; a single chunk's is kept as it is."""

    def __init__(self, parameter: torch.Tensor, *, num_chunks: int) -> None:
        self.parameter = parameter
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.value = torch.zeros_like(parameter, dtype=wide) if num_chunks != 1 else None

    def add(self, gradient: torch.Tensor) -> None:
        """Add the gradient of one chunk."""
        if self.value is None:
            self.value = gradient
        else:
            self.value.add_(gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add `left @ right`; on a GPU without rounding the product to bf16 first."""
        if self.value is None:
            self.value = left @ right
        elif self.value.dtype == left.dtype:
            self.value.addmm_(left, right)
        elif self.value.is_cuda and self.value.dtype == torch.float32:
            torch.addmm(self.value, left, right, out_dtype=torch.float32, out=self.value)
        else:
            self.value.add_(left @ right)

    def total(self) -> torch.Tensor:
        """Return the sum in the parameter's dtype."""
        assert self.value is not None
        return self.value.to(self.parameter.dtype)


class LinearHead:
    """A linear layer `(weight, bias)`: its logits, and the gradients of input, weight and bias."""

    def __init__(self, parameters: Sequence[torch.Tensor | None], sums: Sequence[GradientSum | None]) -> None:
        weight, bias = parameters
        assert weight is not None
        device = weight.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.of_weight, self.of_bias = sums

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden.to(self.dtype)
        return torch.nn.functional.linear(self.hidden, self.weight, self.bias)  # autocast finds nothing to cast

    def add_gradients(self, gradient: torch.Tensor, *, of_hidden: bool) -> torch.Tensor | None:
        if self.of_weight is not None:
            self.of_weight.add_product(gradient.T, self.hidden)
        if self.of_bias is not None:
            self.of_bias.add(gradient.sum(0))
        return gradient @ self.weight if of_hidden else None


class AnyHead:
    """A head by its forward function, with adapters for example: the gradients are autograd's."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        parameters: Sequence[torch.Tensor],
        sums: Sequence[GradientSum | None],
    ) -> None:
        self.forward, self.parameters, self.sums = forward, parameters, sums

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self.hidden = hidden.detach().requires_grad_()
            self.output = self.forward(self.hidden)
        return self.output.detach().clone()

    def add_gradients(self, gradient: torch.Tensor, *, of_hidden: bool) -> torch.Tensor | None:
        found = torch.autograd.grad(self.output, [self.hidden, *self.parameters], gradient)
        del self.output
        for total, each in zip(self.sums, found[1:], strict=True):
            if total is not None:
                total.add(each)
        return found[0] if of_hidden else None


MakeHead = Callable[[Sequence[Any], Sequence[GradientSum | None]], LinearHead | AnyHead]


def chunked_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    make_head: MakeHead,
    parameters: Sequence[torch.Tensor | None],
    options: LossOptions,
) -> torch.Tensor:
    """Return the sum of the cross entropy at some positions; `hidden` is (tokens, size).

    `parameters` are the head's, as `make_head` takes them. The result can be backpropagated once.
    """
    total: torch.Tensor = _ChunkedCrossEntropy.apply(
        hidden, labels, positions, make_head, options, torch.is_grad_enabled(), *parameters
    )
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        make_head: MakeHead,
        options: LossOptions,
        with_gradients: bool,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        chunks = positions.split(options.chunk_tokens)
        needed = [with_gradients and needs for needs in ctx.needs_input_grad]
        sums = [
            GradientSum(parameter, num_chunks=len(chunks)) if needs and parameter is not None else None
            for parameter, needs in zip(parameters, needed[6:], strict=True)
        ]
        head = make_head(parameters, sums)
        of_hidden = torch.zeros_like(hidden) if needed[0] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in chunks:
            loss, gradient = loss_and_gradient(
                head.logits(hidden[chunk]), labels[chunk], options, with_gradient=any(needed)
            )
            total = total + loss
            if gradient is None:
                continue
            of_chunk = head.add_gradients(gradient, of_hidden=of_hidden is not None)
            del gradient  # before the next chunk's logits
            if of_hidden is not None and of_chunk is not None:
                of_hidden[chunk] = of_chunk.to(of_hidden.dtype)  # autocast computes in bf16, of an fp32 input
        ctx.gradients = (of_hidden, *(None if each is None else each.total() for each in sums))
        return total

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward only")
        gradients, ctx.gradients = ctx.gradients, None
        of_hidden, *of_parameters = (None if each is None else each.mul_(of_loss) for each in gradients)
        return of_hidden, None, None, None, None, None, *of_parameters


def loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, options: LossOptions, *, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the summed loss of one chunk and the gradient of its logits, which it overwrites.

    With denominator Z = sum(exp(z)), a token's loss is log Z - z_label and its gradient softmax(z) - one_hot(label).
    """
    smoothing, index = options.label_smoothing, labels.unsqueeze(-1)
    scores = options.scale(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    capped = scores.clone() if with_gradient and options.scale.cap is not None else None
    scores.sub_(scores.amax(-1, keepdim=True))
    expected = (1 - smoothing) * scores.gather(-1, index)
    if smoothing:
        expected += smoothing * scores.mean(-1, keepdim=True)
    denominator = scores.exp_().sum(-1, keepdim=True)
    loss = (denominator.log() - expected).sum()
    if not with_gradient:
        return loss, None
    gradient = scores.div_(denominator)
    if smoothing:
        gradient.sub_(smoothing / logits.shape[-1])
    gradient.scatter_add_(-1, index, gradient.new_full(index.shape, smoothing - 1))
    options.scale.scale_gradient(gradient, capped)
    return loss, gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)

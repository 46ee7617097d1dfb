"""Cross entropy of a language-model head, a chunk of tokens at a time: the full logits never exist.

A chunk's logits, loss and gradients are computed together in the forward, so that the head's three matrix products run
once, as without chunks; backward only scales the gradients. Those of the head are added up in fp32 over the chunks.
torch's `linear_cross_entropy` (2.13) works the same way for a plain linear head, but adds up a bf16 head's gradient in
bf16 and takes neither soft-capped logits nor label smoothing; Liger's needs a GPU.
"""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast

from toolkit.engines.tensors import without_adapters
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.observe.batches import IGNORED
from toolkit.record.reading import RankReading
from toolkit.train.data.collation import SUPERVISED_POSITIONS, Collator, next_labels, supervised_positions


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

    def multiply_by_derivative(self, gradient: torch.Tensor, scaled: torch.Tensor | None) -> None:
        """Turn the gradient of scaled logits into that of logits; `scaled` is needed with a cap only."""
        if self.cap is not None and scaled is not None:
            gradient.mul_(scaled.div_(self.cap).square_().neg_().add_(1.0))
        if self.slope != 1.0:
            gradient.mul_(self.slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    chunk_tokens: int
    scale: LogitScale = LogitScale()
    label_smoothing: float = 0.0


def chunked_cross_entropy(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
) -> torch.Tensor:
    """Return the sum at `positions`, to be backpropagated once; `hidden` is (tokens, size), `weight` (words, size)."""
    return _ChunkedCrossEntropy.apply(hidden, labels, positions, weight, bias, options, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LossOptions,
        with_gradients: bool,
    ) -> torch.Tensor:
        chunks = positions.split(options.chunk_tokens)
        of_hidden, _, _, of_weight, of_bias, *_ = (with_gradients and needs for needs in ctx.needs_input_grad)
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        hidden_gradient = torch.zeros_like(hidden) if of_hidden else None
        weight_gradient: torch.Tensor | None = None
        bias_gradient: torch.Tensor | None = None
        if of_weight and len(chunks) != 1:  # the gradient of a single chunk is kept as it is
            weight_gradient = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in chunks:
            inputs = hidden[chunk].to(dtype)
            logits = torch.nn.functional.linear(inputs, matrix, offset)  # autocast finds nothing to cast
            needed = of_hidden or of_weight or of_bias
            loss, gradient = loss_and_gradient(logits, labels[chunk], options, with_gradient=needed)
            total = total + loss
            if gradient is None:
                continue
            if of_weight:
                weight_gradient = sum_with_product(weight_gradient, gradient.T, inputs)
            if of_bias:
                summed = gradient.sum(0).to(torch.promote_types(gradient.dtype, torch.float32))
                bias_gradient = summed if bias_gradient is None else bias_gradient.add_(summed)
            if hidden_gradient is not None:
                # autocast computes in bf16, of an fp32 input
                hidden_gradient[chunk] = (gradient @ matrix).to(hidden_gradient.dtype)
            del logits, gradient  # before the next chunk's logits
        pairs = ((weight_gradient, weight), (bias_gradient, bias))
        own = (None if sums is None or of is None else sums.to(of.dtype) for sums, of in pairs)
        ctx.gradients = (hidden_gradient, *own)
        return total

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward only")
        gradients, ctx.gradients = ctx.gradients, None
        of_hidden, of_weight, of_bias = (None if each is None else each.mul_(of_loss) for each in gradients)
        return of_hidden, None, None, of_weight, of_bias, None, None


def sum_with_product(value: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add `left @ right` to the value in place; on a GPU without rounding the product to bf16 first."""
    if value is None:
        return left @ right
    if value.dtype == left.dtype:
        return value.addmm_(left, right)
    if value.is_cuda and value.dtype == torch.float32:
        return torch.addmm(value, left, right, out_dtype=torch.float32, out=value)
    return value.add_(left @ right)


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
    options.scale.multiply_by_derivative(gradient, capped)
    return loss, gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


class UnknownHead(Exception):
    """The model's loss is computed from more than the logits of a linear head, scaled or capped."""


class ChunkedLoss:
    """The chunked loss of one model of transformers, in effect as long as the model lives.

    The model's forward gives the labels and its head's forward computes the loss. Everything between and after them
    stays the architecture's own: position handling, the router's auxiliary loss, outputs. The head is called once, as a
    module, so that ZeRO-3 gathers its weight and every engine's hooks see one forward.
    """

    def __init__(self, plain: Any, *, chunk_tokens: int, label_smoothing: float = 0.0) -> None:
        """Change forward and loss of `plain`, which has no wrappers; or raise UnknownHead, and change nothing."""
        self.scale = read_logit_scale(plain)
        self.chunk_tokens, self.label_smoothing = chunk_tokens, label_smoothing
        self.num_losses = 0  # losses computed so far
        self._compute: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Computes the loss of hidden states, during a forward with labels."""
        self._loss: torch.Tensor | None = None
        self._head, self._inner = plain.get_output_embeddings(), inner_head(plain)
        model_forward, head_forward, full_loss = plain.forward, self._inner.forward, plain.loss_function

        @functools.wraps(model_forward)  # the Trainer reads from the signature that it takes `num_items_in_batch`
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            positions = kwargs.pop(SUPERVISED_POSITIONS, None)
            if kwargs.get("labels") is None:
                return model_forward(*args, **kwargs)
            smoothing = self.label_smoothing if model.training else 0.0
            given = (next_labels(kwargs), positions, kwargs.get("num_items_in_batch"))
            self._compute = functools.partial(self._loss_of, *given, label_smoothing=smoothing)
            # Registered now, it runs after the hooks of every engine and takes what they return.
            hook = self._head.register_forward_hook(self._take_loss)
            try:
                return model_forward(*args, **kwargs)
            finally:
                hook.remove()
                self._compute = self._loss = None

        def return_loss(*args: Any, **kwargs: Any) -> Any:
            return full_loss(*args, **kwargs) if self._loss is None else self._loss

        plain.forward = types.MethodType(forward, plain)
        self._inner.forward = lambda hidden: (self._compute or head_forward)(hidden)
        plain.loss_function, plain.chunked_loss = return_loss, self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _loss_of(
        self, labels: torch.Tensor, positions: torch.Tensor | None, items: Any, hidden: torch.Tensor, **how: float
    ) -> torch.Tensor:
        """`labels` are flattened; `positions` are those that are supervised, from the collator."""
        labels = labels.to(hidden.device)
        if positions is None:  # fake tensors have no values: all positions are the most that there can be
            fake = isinstance(labels, FakeTensor)
            positions = torch.arange(len(labels)) if fake else supervised_positions(labels)
        options = LossOptions(chunk_tokens=self.chunk_tokens, scale=self.scale, **how)
        weight, bias = self._inner.weight, self._inner.bias  # read now: engines replace them between two calls
        total = chunked_cross_entropy(hidden.flatten(0, -2), labels, positions, weight, bias, options)
        self.num_losses += 1
        if items is None:
            count = (labels != IGNORED).sum()  # none: nan with a gradient of 0, as torch's mean
            return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
        return total / (items.to(total.device) if isinstance(items, torch.Tensor) else items)

    def _take_loss(self, _head: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        self._loss = output
        return inputs[0].new_zeros((*inputs[0].shape[:-1], 0), requires_grad=False)


def apply_loss(trainer: Any, arguments: ModelArguments) -> None:
    """Give the model the chunked loss if `--loss` allows. Raises ToolkitError where `chunked` is impossible."""
    training, loss = trainer.args, arguments.loss
    if loss == "full" or (loss == "auto" and training.use_liger_kernel):
        return
    plain = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    try:
        ChunkedLoss(plain, chunk_tokens=arguments.loss_chunk_tokens, label_smoothing=training.label_smoothing_factor)
    except UnknownHead as error:
        if loss == "chunked":
            raise ToolkitError(f"--loss chunked: {error}", hint="leave `--loss` out") from error
        if training.process_index == 0:
            print(f"the loss is computed from the full logits: {error}", flush=True)
    else:
        trainer.label_smoother = None  # it would compute the full logits; the chunked loss smooths labels itself
        # Ranks that divide each row find the supervised positions in their own part of it.
        if isinstance(trainer.data_collator, Collator) and trainer.data_collator.pieces == 1:
            trainer.data_collator.adds_positions = True


def read_loss(model: Any) -> RankReading:
    """Return which loss the live model computed: `chunked` only if it really did."""
    plain = without_adapters(model)
    chunked = getattr(plain, "chunked_loss", None)
    if chunked is not None and chunked.num_losses:
        return RankReading.of(loss="chunked", loss_chunk_tokens=chunked.chunk_tokens)
    forward = getattr(plain.forward, "__func__", plain.forward)
    is_liger = "liger" in str(getattr(inspect.unwrap(forward), "__module__", ""))
    return RankReading.of(loss="liger" if is_liger else "full", loss_chunk_tokens=None)


def inner_head(plain: Any) -> Any:
    """Return the module that multiplies: the head, or peft's trained copy of it (`modules_to_save`)."""
    head = plain.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


# -- what a model does with its logits

# Logits to see how a model changes them. The first gives the slope, the second the cap, the rest verify both.
SLOPE_PROBE, CAP_PROBE = 2.0**-30, 2.0**60
PROBES = (SLOPE_PROBE, CAP_PROBE, 0.0, 1.0, -1.0, 7.0, -30.0, 30.0, 55.0, -200.0)


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output with every field that an architecture may read."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Replacement:
    """Returns one value whatever it is given, and has the settings of a module."""

    weight = torch.zeros((), dtype=torch.float64)

    def __init__(self, value: Any, replaced: Any) -> None:
        self.value, self.replaced = value, replaced

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        setting = getattr(self.replaced, name)
        if not isinstance(setting, torch.nn.Module):
            return setting
        if name == "decoder":  # OPT's head calls it in the backbone's place
            return _Replacement(self.value, setting)
        raise AttributeError(name)


def read_logit_scale(plain: Any) -> LogitScale:
    """Return what the model does with its head's logits before the loss, seen by giving it logits of one token.

    Backbone and head are left out, so no weight is read. Raises UnknownHead for anything but a factor and a soft cap,
    for a head that is not linear or has adapters, and for a loss other than transformers' own.
    """
    name, head = type(plain).__name__, plain.get_output_embeddings()
    if getattr(plain, "loss_function", None) is not ForCausalLMLoss:
        raise UnknownHead(f"{name} has a loss function of its own")
    if head is None or type(inner_head(plain)).forward is not torch.nn.Linear.forward:
        raise UnknownHead(f"the head of {name} is not a linear layer, or has adapters")
    vocab_size = int(plain.config.get_text_config().vocab_size)
    given = torch.tensor(PROBES, dtype=torch.float64).repeat(vocab_size // len(PROBES) + 1)[:vocab_size]
    token, label = torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1), dtype=torch.int64)
    seen: list[torch.Tensor] = []

    def capture(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if torch.equal(labels, label):
            seen.append(logits.detach().flatten().double().cpu())
        return torch.zeros(())

    hidden = _Hidden(last_hidden_state=torch.zeros(1, 1, 1, dtype=torch.float64))
    values = {head: given.view(1, 1, -1), plain.base_model: hidden}
    replaced = {child: _Replacement(values[each], each) for child, each in plain._modules.items() if each in values}
    options = {"attention_mask": torch.ones_like(token), "use_cache": False, "output_router_logits": False}
    plain.loss_function = capture
    try:
        with patch.dict(plain._modules, replaced), torch.no_grad():
            plain.forward(input_ids=token, labels=label, **options)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownHead(f"{name} cannot be asked what it does with its logits") from error
    finally:
        del plain._loss_function
    if len(seen) != 1:
        raise UnknownHead(f"{name} does not compute one loss from its head's logits")
    if seen[0].shape == given.shape:
        slope, largest = float(seen[0][0]) / SLOPE_PROBE, float(seen[0][1])
        scale = LogitScale(slope=slope, cap=largest if abs(largest) < 2.0**40 else None)
        if torch.allclose(seen[0], scale(given), rtol=1e-6, atol=1e-12):
            return scale
    raise UnknownHead(f"{name} does more with its logits than scaling and capping them")

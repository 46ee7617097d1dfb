"""The chunked loss in a model of transformers: its forward gives the labels, its head's forward computes the loss.

Everything between and after them stays the architecture's own: position handling, the router's auxiliary loss, outputs.
The head is called once, as a module, so that ZeRO-3 gathers its weight and every engine's hooks see one forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.observe.attest.tensors import without_adapters
from toolkit.observe.batches import IGNORED
from toolkit.train.data.collation import (
    SUPERVISED_POSITIONS,
    Collator,
    next_labels,
    supervised_positions,
)
from toolkit.train.model.chunked_cross_entropy import (
    AnyHead,
    LinearHead,
    LogitScale,
    LossOptions,
    chunked_cross_entropy,
)

# Logits to see how a model changes them. The first gives the slope, the second the cap, the rest verify both.
SLOPE_PROBE, CAP_PROBE = 2.0**-30, 2.0**60
PROBES = (SLOPE_PROBE, CAP_PROBE, 0.0, 1.0, -1.0, 7.0, -30.0, 30.0, 55.0, -200.0)


class UnknownHead(Exception):
    """The model computes its loss from more than its head's logits, scaled or capped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Targets:
    labels: torch.Tensor
    """The token after each position that the head sees, flattened."""
    positions: torch.Tensor | None
    """Indices of those that are supervised, from the collator; None: to be read from the labels."""
    num_items: torch.Tensor | int | None
    label_smoothing: float


class ChunkedLoss:
    """The chunked loss of one model, in effect as long as the model lives."""

    def __init__(self, plain: Any, *, chunk_tokens: int, label_smoothing: float = 0.0) -> None:
        """Change the model's forward, its head's and its loss function; `plain` has no wrappers.

        Raises UnknownHead, and changes nothing, for a model whose loss cannot be computed this way.
        """
        self.scale = read_logit_scale(plain)
        self.chunk_tokens, self.label_smoothing = chunk_tokens, label_smoothing
        self.num_losses = 0
        """Losses computed so far."""
        self._targets: _Targets | None = None
        self._loss: torch.Tensor | None = None
        self._head, self._inner = plain.get_output_embeddings(), inner_head(plain)
        self._model_forward, self._head_forward = plain.forward, self._inner.forward
        self._full_loss = plain.loss_function
        plain.forward = types.MethodType(self._signed_forward(), plain)
        self._inner.forward = self._forward_head
        plain.loss_function = self._return_loss
        plain.chunked_loss = self

    def _signed_forward(self) -> Any:
        """The signature stays: the Trainer reads from it that the model takes `num_items_in_batch`."""

        @functools.wraps(self._model_forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            positions = kwargs.pop(SUPERVISED_POSITIONS, None)
            if kwargs.get("labels") is None:
                return self._model_forward(*args, **kwargs)
            self._targets = _Targets(
                labels=next_labels(kwargs),
                positions=positions,
                num_items=kwargs.get("num_items_in_batch"),
                label_smoothing=self.label_smoothing if model.training else 0.0,
            )
            # Registered now, it runs after the hooks of every engine and takes what they return.
            hook = self._head.register_forward_hook(self._take_loss)
            try:
                return self._model_forward(*args, **kwargs)
            finally:
                hook.remove()
                self._targets = self._loss = None

        return forward

    def _forward_head(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        targets = self._targets
        result: torch.Tensor = (
            self._head_forward(hidden, *args, **kwargs) if targets is None else self._compute(hidden, targets)
        )
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute(self, hidden: torch.Tensor, targets: _Targets) -> torch.Tensor:
        labels, positions = targets.labels.to(hidden.device), targets.positions
        if positions is None:
            # Fake tensors have no values: all positions are the most that there can be.
            fake = isinstance(labels, FakeTensor)
            positions = torch.arange(len(labels)) if fake else supervised_positions(labels)
        options = LossOptions(chunk_tokens=self.chunk_tokens, scale=self.scale, label_smoothing=targets.label_smoothing)
        total = chunked_cross_entropy(hidden.flatten(0, -2), labels, positions, *self._make_head(), options)
        self.num_losses += 1
        items = targets.num_items
        if items is None:
            return total / (labels != IGNORED).sum()  # nan without any, as torch's mean
        return total / (items.to(total.device) if isinstance(items, torch.Tensor) else items)

    def _make_head(self) -> tuple[Any, Sequence[torch.Tensor | None]]:
        """Read the parameters now: engines replace them between two calls."""
        if is_linear(self._inner):
            return LinearHead, (self._inner.weight, self._inner.bias)
        trained = [parameter for parameter in self._inner.parameters() if parameter.requires_grad]
        return functools.partial(AnyHead, self._head_forward), trained

    def _take_loss(self, _head: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Keep the loss; the model's forward continues with the logits of an empty vocabulary."""
        self._loss = output
        return inputs[0].new_zeros((*inputs[0].shape[:-1], 0), requires_grad=False)

    def _return_loss(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self._full_loss(logits, labels, *args, **kwargs) if self._loss is None else self._loss
        return loss


def apply_loss(trainer: Any, arguments: ModelArguments) -> None:
    """Give the Trainer's model the chunked loss, unless `--loss` is `full` or something else computes it.

    Raises ToolkitError for `chunked` where the model does not allow it; with `auto` a line says so.
    """
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
        return
    if isinstance(trainer.data_collator, Collator):
        trainer.data_collator.adds_positions = True
    trainer.label_smoother = None  # it would compute the full logits; the chunked loss smooths labels itself


def read_loss(model: Any) -> dict[str, Any]:
    """Return which loss the live model computed: `chunked` only if it really did."""
    plain = without_adapters(model)
    chunked = getattr(plain, "chunked_loss", None)
    if chunked is not None and chunked.num_losses:
        return {"loss": "chunked", "loss_chunk_tokens": chunked.chunk_tokens}
    forward = getattr(plain.forward, "__func__", plain.forward)
    is_liger = "liger" in str(getattr(inspect.unwrap(forward), "__module__", ""))
    return {"loss": "liger" if is_liger else "full", "loss_chunk_tokens": None}


def inner_head(plain: Any) -> Any:
    """Return the module that multiplies: the head, or peft's trained copy of it (`modules_to_save`)."""
    head = plain.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def is_linear(head: Any) -> bool:
    """Return True for a linear layer without adapters or quantisation; its own forward may have been replaced."""
    return type(head).forward is torch.nn.Linear.forward


def read_logit_scale(plain: Any) -> LogitScale:
    """Return what the model does with its head's logits before the loss, seen by giving it logits.

    Backbone and head are left out, so no weight is read. Raises UnknownHead for anything but a factor and a soft cap,
    and for a loss other than transformers' own.
    """
    name = type(plain).__name__
    if getattr(plain, "loss_function", None) is not ForCausalLMLoss:
        raise UnknownHead(f"{name} has a loss function of its own")
    head = plain.get_output_embeddings()
    if head is None:
        raise UnknownHead(f"{name} has no output embeddings")
    if not is_linear(inner_head(plain)) and any(hasattr(p, "ds_id") for p in head.parameters()):
        raise UnknownHead(f"the head of {name} has adapters, whose parts ZeRO-3 gathers one by one")
    vocab_size = int(plain.config.get_text_config().vocab_size)
    logits = torch.tensor(PROBES, dtype=torch.float64).repeat(vocab_size // len(PROBES) + 1)[:vocab_size]
    seen = _seen_by_loss(plain, head, logits)
    scale = _fitted(seen)
    expected = scale(logits.clone())
    if seen.shape != logits.shape or not torch.allclose(seen, expected, rtol=1e-6, atol=1e-12):
        raise UnknownHead(f"{name} does more with its logits than scaling and capping them")
    return scale


def _fitted(seen: torch.Tensor) -> LogitScale:
    if len(seen) < len(PROBES):
        return LogitScale()
    slope, largest = float(seen[0]) / SLOPE_PROBE, float(seen[1])
    return LogitScale(slope=slope, cap=largest if abs(largest) < 2.0**40 else None)


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output with every field that an architecture may read."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Replacement(torch.nn.Module):  # type: ignore[misc]
    """A module that returns one value whatever it is given, and has the settings of another."""

    def __init__(self, value: Any, replaced: Any) -> None:
        super().__init__()
        self.value, self.replaced = value, [replaced]
        self.weight = torch.zeros((), dtype=torch.float64)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        setting = getattr(self.__dict__["replaced"][0], name)
        if isinstance(setting, torch.nn.Module):
            raise AttributeError(name)
        return setting


def _seen_by_loss(plain: Any, head: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return what arrives at the loss function of one token whose head returns these logits."""
    seen: list[torch.Tensor] = []

    def capture(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if torch.equal(labels, label):
            seen.append(logits.detach().flatten().double().cpu())
        return torch.zeros(())

    token, label = torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1), dtype=torch.int64)
    hidden = _Hidden(last_hidden_state=torch.zeros(1, 1, 1, dtype=torch.float64))
    options = {"attention_mask": torch.ones_like(token), "use_cache": False, "output_router_logits": False}
    with _replaced(plain, {head: logits.view(1, 1, -1), plain.base_model: hidden}):
        plain.loss_function = capture
        try:
            with torch.no_grad():
                plain.forward(input_ids=token, labels=label, **options)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnknownHead(f"{type(plain).__name__} cannot be asked what it does with its logits") from error
        finally:
            del plain._loss_function
    if len(seen) != 1:
        raise UnknownHead(f"{type(plain).__name__} does not compute one loss from its head's logits")
    return seen[0]


@contextlib.contextmanager
def _replaced(plain: Any, values: dict[Any, Any]) -> Iterator[None]:
    """Let the model's children return these values; its `_modules` are put back afterwards."""
    before = dict(plain._modules)
    for name, child in before.items():
        if child in values:
            plain._modules[name] = _Replacement(values[child], child)
    try:
        yield
    finally:
        plain._modules.update(before)

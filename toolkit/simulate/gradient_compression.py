"""Gradient compression with error feedback: the bytes that a worker passes to a collective, and the mean that arrives.

What a method does not send is added to the worker's next gradient (Seide et al. 2014; Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847), so it is late and not lost.

    >>> parse_compression("top_k:0.01").payload_bytes([(100, 100)])
    800
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import ToolkitError, did_you_mean
from toolkit.plan.collectives import Collective

if TYPE_CHECKING:
    import numpy

    from toolkit.simulate.small_training import Array

Shape = tuple[int, ...]

VALUE_BYTES = 4  # gradients are fp32, as DDP reduces those of fp32 master weights
INDEX_BYTES = 4
# Elements that share a scale: one outlier decides the scale of a whole tensor otherwise.
BLOCK = 512
# torch's PowerSGD hook compresses a matrix only if that halves it (`min_compression_rate`).
LEAST_POWER_SGD_RATIO = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Method:
    amount: str
    """Meaning of the number after the colon."""
    low: float
    high: float
    whole: bool
    collective: str
    """`all_reduce` where payloads of several workers can be added up, otherwise `all_gather`."""


METHODS: dict[str, _Method] = {
    "none": _Method(amount="", low=0, high=0, whole=True, collective="all_reduce"),
    # Stich et al. 2018, https://arxiv.org/abs/1809.07599
    "top_k": _Method(amount="fraction of the elements", low=1e-6, high=1, whole=False, collective="all_gather"),
    # All workers choose the same elements, by a common seed, so that no index is sent.
    "random_k": _Method(amount="fraction of the elements", low=1e-6, high=1, whole=False, collective="all_reduce"),
    # 1 bit: Seide et al. 2014. More: uniform levels as QSGD's (https://arxiv.org/abs/1610.02132), rounded to nearest
    "quantize": _Method(amount="bits per element", low=1, high=8, whole=True, collective="all_gather"),
    # Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    "power_sgd": _Method(amount="rank", low=1, high=1024, whole=True, collective="all_reduce"),
}
EXAMPLES = {"top_k": "top_k:0.01", "random_k": "random_k:0.01", "quantize": "quantize:4", "power_sgd": "power_sgd:2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """A method and its fraction, bits or rank."""

    name: str
    amount: float = 0

    @property
    def label(self) -> str:
        """The text that `parse_compression` reads."""
        return self.name if self.name == "none" else f"{self.name}:{self.amount:g}"

    def payload_bytes(self, shapes: Sequence[Shape]) -> int:
        """Return the bytes that one worker passes to the collective in a step."""
        elements = sum(map(math.prod, shapes))
        if self.name in ("top_k", "random_k"):
            return math.ceil(self.amount * elements) * (VALUE_BYTES + (INDEX_BYTES if self.name == "top_k" else 0))
        if self.name == "quantize":
            return math.ceil(elements * self.amount / 8) + VALUE_BYTES * math.ceil(elements / BLOCK)
        if self.name == "power_sgd":
            return VALUE_BYTES * sum(power_sgd_elements(shape, int(self.amount)) for shape in shapes)
        return VALUE_BYTES * elements

    def collective(self, shapes: Sequence[Shape], *, workers: int) -> Collective:
        """Return the collective that a step sends."""
        name, payload = METHODS[self.name].collective, self.payload_bytes(shapes)
        complete = payload if name == "all_reduce" else workers * payload
        return Collective(name=name, purpose="gradients", payload_bytes=complete, group_size=workers)


def parse_compression(text: str) -> Compression:
    """Read `none`, or a method with its amount, as in `top_k:0.01`. Raises ToolkitError for anything else."""
    name, colon, amount = text.partition(":")
    method = METHODS.get(name)
    if method is None:
        raise ToolkitError(
            f"unknown compression {name!r}; known: {', '.join(METHODS)}", hint=did_you_mean(name, METHODS)
        )
    if name == "none":
        if colon:
            raise ToolkitError(f"--compression {text}: none has no number", hint="`--compression none`")
        return Compression(name=name)
    value = _number(amount)
    if value is None or not method.low <= value <= method.high or (method.whole and value != int(value)):
        kind = "a whole number" if method.whole else "a number"
        raise ToolkitError(
            f"--compression {text}: expected {kind} from {method.low:g} to {method.high:g} ({method.amount})",
            hint=f"`--compression {EXAMPLES[name]}`",
        )
    return Compression(name=name, amount=value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def power_sgd_elements(shape: Shape, rank: int) -> int:
    """Return the elements that PowerSGD sends of one tensor: two factors, or all of it where they save too little.

    >>> power_sgd_elements((64, 100), 2), power_sgd_elements((64,), 2)
    (328, 64)
    """
    elements = math.prod(shape)
    rows, columns = shape[0], elements // shape[0]
    rank = min(rank, rows, columns)
    factors = (rows + columns) * rank
    return factors if len(shape) > 1 and factors * LEAST_POWER_SGD_RATIO < elements else elements


class ErrorFeedback:
    """What each worker has not sent yet, and the mean over workers of what it sends."""

    def __init__(self, compression: Compression, *, seed: int) -> None:
        import numpy

        self.compression = compression
        self.generator = numpy.random.default_rng(seed)
        self.unsent: tuple[Any, ...] = ()
        self.factors: dict[int, Array] = {}
        """PowerSGD's right factor of each layer, where the next step's power iteration begins."""

    def mean(self, gradients: Sequence[Array]) -> tuple[Array, ...]:
        """Compress each worker's gradients, by layer of shape (workers, rows, columns), and return the mean sent."""
        if self.compression.name == "none":
            return tuple(gradient.mean(axis=0) for gradient in gradients)
        corrected = [layer + rest for layer, rest in zip(gradients, self.unsent or [0] * len(gradients), strict=True)]
        if self.compression.name == "power_sgd":
            sent = [self._factored(number, layer) for number, layer in enumerate(corrected)]
        else:
            sent = _by_layer(self._sent(_flat(corrected)), corrected)
        self.unsent = tuple(layer - part for layer, part in zip(corrected, sent, strict=True))
        return tuple(part.mean(axis=0) for part in sent)

    def _sent(self, flat: Array) -> Array:
        """What each worker sends, in full shape (workers, elements)."""
        if self.compression.name == "quantize":
            return quantized(flat, bits=int(self.compression.amount))
        count = math.ceil(self.compression.amount * flat.shape[1])
        if self.compression.name == "top_k":
            return largest(flat, count)
        return _at(flat, self.generator.choice(flat.shape[1], size=count, replace=False)[None, :])

    def _factored(self, number: int, layer: Array) -> Array:
        """One step of a power iteration on the mean over workers; every worker sends the same approximation."""
        import numpy

        rank = min(int(self.compression.amount), *layer.shape[1:])
        if power_sgd_elements(layer.shape[1:], rank) == layer[0].size:
            return layer
        if number not in self.factors:
            self.factors[number] = self.generator.normal(size=(layer.shape[2], rank)).astype(layer.dtype)
        mean = layer.mean(axis=0)
        left, _ = numpy.linalg.qr(mean @ self.factors[number])
        self.factors[number] = mean.T @ left
        return numpy.broadcast_to(left @ self.factors[number].T, layer.shape)


def largest(flat: Array, count: int) -> Array:
    """Return each row with only its `count` elements of largest magnitude."""
    import numpy

    return _at(flat, numpy.argpartition(-abs(flat), count - 1, axis=1)[:, :count])


def quantized(flat: Array, *, bits: int) -> Array:
    """Return each row rounded to `bits` per element, by blocks of `BLOCK`.

    One bit is the sign times the block's mean magnitude; more are multiples of the block's largest magnitude.
    """
    import numpy

    rows, elements = flat.shape
    padded = numpy.zeros((rows, -(-elements // BLOCK), BLOCK), dtype=flat.dtype)
    padded.reshape(rows, -1)[:, :elements] = flat
    sizes = numpy.full(padded.shape[1], BLOCK)
    sizes[-1] = elements - BLOCK * (len(sizes) - 1)
    if bits == 1:
        scale = (abs(padded).sum(axis=2) / sizes)[..., None]
        rounded = numpy.where(padded < 0, -scale, scale)
    else:
        levels = 2 ** (bits - 1) - 1
        scale = abs(padded).max(axis=2, keepdims=True) / levels
        rounded = numpy.rint(padded / numpy.where(scale == 0, 1, scale)) * scale
    found: Array = rounded.reshape(rows, -1)[:, :elements].astype(flat.dtype)
    return found


def _at(flat: Array, index: numpy.ndarray[Any, Any]) -> Array:
    import numpy

    sent = numpy.zeros_like(flat)
    index = numpy.broadcast_to(index, (len(flat), index.shape[1]))
    numpy.put_along_axis(sent, index, numpy.take_along_axis(flat, index, axis=1), axis=1)
    return sent


def _flat(layers: Sequence[Array]) -> Array:
    import numpy

    return numpy.concatenate([layer.reshape(len(layer), -1) for layer in layers], axis=1)


def _by_layer(flat: Array, like: Sequence[Array]) -> list[Array]:
    import numpy

    ends = numpy.cumsum([layer[0].size for layer in like])[:-1]
    return [part.reshape(layer.shape) for part, layer in zip(numpy.split(flat, ends, axis=1), like, strict=True)]

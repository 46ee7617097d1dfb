"""Values of fake tensors, for programs that read some: known, made up, or an error that names the line.

    answers = ValueAnswers()
    with on_fake_tensors(memory, engine="none"), answers:
        answers.know(fake_batch, batch)
        ...
    answers.made_up                     # {"1.0 for a number read at trl/trainer/dpo_trainer.py:1545": 1, ...}

What follows from known tensors alone is computed beside the fake ones, on tensors that are small: masks, lengths and
positions of a batch have their true values. What follows from weights has none; an answer is made up where programs
read such values to log them.
"""

import contextlib
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.errors import ToolkitError

aten = torch.ops.aten
LARGEST_KNOWN = 2**22  # elements; hidden states and logits are larger, and follow from weights anyway
READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Errors of torch 2.13 for what reads memory without an operator: `.numpy()`, `.tolist()`, `.data_ptr()`.
READS_MEMORY = ("tensor subclasses", "access data pointer", "doesn't have storage", "data_ptr")
WITHOUT_TRACE = "leave --fake-tensors out: this rank is then rehearsed with real tensors"
# Frames of these are not where a program reads a value.
LIBRARY = Path(torch.__file__).parent
TOOLKIT = Path(__file__).parents[1]


class ValueAnswers(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that answers what reads values. Enter it last."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()  # the values of fake tensors that follow from the batch alone
        self.made_up: Counter[str] = Counter()  # how often each answer was made up, by what and where

    def know(self, fake: torch.Tensor, values: torch.Tensor) -> None:
        """Give a fake tensor values."""
        if values.numel() <= LARGEST_KNOWN:
            with _disable_current_modes():
                self.known[fake] = values.detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor first: its operations on local shards arrive here again
        try:
            result = func(*args, **kwargs)
        except READS_VALUES:
            answer = MADE_UP.get(func)
            computed, values = self._compute(func, args, kwargs)
            if computed:
                return tree_map_only(torch.Tensor, self._fake, values)
            if answer is None:
                raise
            what, result = answer(self, *args, **kwargs)
            if what:
                self.made_up[f"{what} at {_reader(sys._getframe(1))}"] += 1
            return result
        self._follow(func, args, kwargs, result)
        return result

    def _fake(self, values: torch.Tensor) -> torch.Tensor:
        fake = torch.empty(values.shape, dtype=values.dtype)
        self.know(fake, values)
        return fake

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, None if they are not known."""
        if isinstance(tensor, FakeTensor):
            return self.known.get(tensor)
        return tensor if tensor.numel() <= LARGEST_KNOWN and tensor.device.type == "cpu" else None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Return whether the operator's values are known, and the values."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_arbitrary = "empty" in func.__name__ or torch.Tag.nondeterministic_seeded in func.tags
        if is_arbitrary or func.namespace != "aten" or any(self.values(tensor) is None for tensor in tensors):
            return False, None
        # An operator that fails on the values (a kernel of another device) leaves them unknown.
        with _disable_current_modes(), contextlib.suppress(RuntimeError, NotImplementedError):
            known_args, known_kwargs = tree_map_only(torch.Tensor, self.values, (args, kwargs))
            return True, func(*known_args, **known_kwargs)
        return False, None

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        fakes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        computed, values = False, None
        if fakes and all(fake.numel() <= LARGEST_KNOWN and fake.device.type == "cpu" for fake in fakes):
            computed, values = self._compute(func, args, kwargs)
        if computed:
            reals = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            for fake, real in zip(fakes, reals, strict=True):
                self.known[fake] = real
        elif func._schema.is_mutable:
            self.forget(tree_leaves((args, kwargs)))

    def forget(self, changed: Iterable[Any]) -> None:
        """Forget the values of tensors that were overwritten with unknown ones, and of their views."""
        fakes = [leaf for leaf in changed if isinstance(leaf, FakeTensor) and leaf in self.known]
        storages = {fake.untyped_storage()._cdata for fake in fakes}
        for fake in [fake for fake in self.known if fake.untyped_storage()._cdata in storages]:
            del self.known[fake]


# -- answers that are made up, where the values follow from weights


def _scalar(answers: ValueAnswers, tensor: Any) -> tuple[str, Any]:
    del answers
    if tensor.dtype.is_floating_point:
        return "1.0 for a number read", 1.0
    return ("True for a condition read", True) if tensor.dtype == torch.bool else ("1 for a whole number read", 1)


def _everywhere(answers: ValueAnswers, mask: Any) -> tuple[str, Any]:
    del answers
    return "all elements where a mask selects", mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _masked(answers: ValueAnswers, tensor: Any, mask: Any) -> tuple[str, Any]:
    whole = torch.broadcast_shapes(tensor.shape, mask.shape)
    return _indexed(answers, tensor.expand(whole), [mask if mask.shape == whole else mask.expand(whole)])


def _indexed(answers: ValueAnswers, tensor: Any, indices: Iterable[Any]) -> tuple[str, Any]:
    """Index by what masks select: at their true positions if they are known."""
    what, positions = "", []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        computed, selected = answers._compute(aten.nonzero.default, (index,), {})
        if not computed:
            what, selected = _everywhere(answers, index)
        positions += (answers._fake(selected) if computed else selected).unbind(1)
    return what, aten.index.Tensor(tensor, positions)


MADE_UP: dict[Any, Callable[..., tuple[str, Any]]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.nonzero.default: _everywhere,
    aten.masked_select.default: _masked,
    aten.index.Tensor: _indexed,
}


# -- where


def _place(file: str, line: int) -> str:
    path = Path(file)
    parts = path.parts
    shown = Path(*parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else path
    return f"{shown}:{line}"


def _is_reader(file: str) -> bool:
    path = Path(file)
    return not (file.startswith("<") or path.is_relative_to(LIBRARY) or path.is_relative_to(TOOLKIT))


def _reader(frame: FrameType | None) -> str:
    while frame is not None and not _is_reader(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown line" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


def unanswered(error: BaseException) -> ToolkitError | None:
    """Return the error for what reads values that fake tensors do not have, with its line; None for other errors."""
    reads_memory = isinstance(error, (RuntimeError, TypeError)) and any(word in str(error) for word in READS_MEMORY)
    if not isinstance(error, READS_VALUES) and not reads_memory:
        return None
    func = getattr(error, "func", None)
    what = f"{func} reads values" if func is not None else "this line reads values"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_reader(frame.filename)]
    place, text = "an unknown line", ""
    if frames:
        place = _place(frames[-1].filename, frames[-1].lineno or 0)
        text = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    message = f"{place}: {what} that fake tensors do not have" + (f": `{text[:120]}`" if text else "")
    return ToolkitError(message, hint=WITHOUT_TRACE)

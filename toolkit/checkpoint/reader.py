"""One interface to any engine's checkpoint: fp32 weights and Adam moments, one parameter at a time.

`hf_export.open_checkpoint` returns it. Parameter names are those of the training model; adapters keep peft's
`.default.`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.checkpoint.inspect import Layout
from toolkit.engines.safe_loading import torch_load
from toolkit.errors import ToolkitError

MOMENTS = ("exp_avg", "exp_avg_sq")
# A mapped page counts as this process's memory until its mapping is dropped.
MAPPED_BYTES = 64 * 2**20
_LARGEST_STEP = 2**53
Read = TypeVar("Read")


class CheckpointReader:
    """Reads tensors of any engine's checkpoint on request, and keeps none of them.

    The readers of the engines have the same methods, and follow the structures that their libraries write. In a damaged
    file any step of that can fail: here an error names the checkpoint and what was read.
    """

    def __init__(self, layout: Layout, open_reader: Callable[[], Any]) -> None:
        self.layout = layout
        self._reader = self._read("its states", open_reader)
        self.hyperparameters: list[dict[str, Any]] = self._reader.hyperparameters
        """Of each parameter group, without the parameters; empty without optimizer states."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every saved weight."""
        return self._read("the shapes of its weights", self._reader.shapes)

    def optimized(self) -> list[str]:
        """Return the names of the parameters that have optimizer states."""
        return self._read("the names of its optimizer states", self._reader.optimized)

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight that the optimizer updates (fp32 under every preset)."""
        return self._read(name, lambda: self._reader.weight(name))

    def moment(self, name: str, state: str) -> torch.Tensor:
        """Return `exp_avg` or `exp_avg_sq`, in the weight's shape. Raises ToolkitError if the optimizer is not Adam."""

        def read() -> Any:
            try:
                return self._reader.moment(name, state)
            except KeyError:
                raise ToolkitError(
                    f"{self.layout.path} has no {state} for {name}: only Adam and AdamW in fp32 are converted",
                    hint="resume it with the preset and the number of processes that it was saved with",
                ) from None

        return self._read(f"{state} of {name}", read)

    def optimizer_step(self) -> float:
        """Return Adam's own step count."""
        step: float = self._read("the optimizer's step", self._reader.optimizer_step)
        if not (0 <= step <= _LARGEST_STEP and step == int(step)):
            raise ToolkitError(f"{self.layout.path}: the optimizer's step is {step}, expected a count")
        return step

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _read(self, what: str, read: Callable[[], Read]) -> Read:
        try:
            return read()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise ToolkitError(
                f"{self.layout.path} is damaged: {what[:80]} cannot be read ({why})", hint="copy or download it again"
            ) from error


def listed(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def without_parameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyperparameters of torch's parameter groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def group_hyperparameters(reader: CheckpointReader, position: int, groups: list[list[str]]) -> dict[str, object]:
    """Return the values of one of the Trainer's parameter groups; DeepSpeed drops a group without parameters."""
    saved, filled = reader.hyperparameters, [index for index, names in enumerate(groups) if names]
    if not saved:
        raise ToolkitError(f"{reader.layout.path} has no parameter groups of an optimizer")
    if len(saved) == len(groups):
        return saved[position]
    if position not in filled:
        return saved[0] | {"weight_decay": 0.0}
    return saved[filled.index(position) if len(saved) == len(filled) else 0]


class MappedFiles:
    """Files of `torch.save`, memory-mapped, and unmapped together once `MAPPED_BYTES` were read from them."""

    def __init__(self, *, trust_pickle: bool = False) -> None:
        self.read_bytes, self.load = 0, cache(partial(torch_load, trust_pickle=trust_pickle))

    def __getitem__(self, path: Path) -> Any:
        return self.load(path)

    def copy(self, tensor: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a copy of a mapped tensor, and count its bytes as read. Raises ValueError for another shape."""
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise ValueError(f"{str(getattr(tensor, 'shape', tensor))[:80]}, expected a tensor of {list(shape)}")
        self.read_bytes += tensor.nbytes
        copied: torch.Tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copied

    def release(self) -> None:
        """Unmap the files if enough was read. No view of them may be alive."""
        if self.read_bytes >= MAPPED_BYTES:
            self.close()

    def close(self) -> None:
        """Unmap the files."""
        self.load.cache_clear()
        self.read_bytes = 0
        gc.collect()

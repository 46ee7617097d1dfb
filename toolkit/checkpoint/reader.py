"""One interface to any engine's checkpoint: fp32 weights and Adam moments, one parameter at a time.

`engines.open_checkpoint` returns the reader of a checkpoint's engine. Parameter names are those of the training model;
adapters keep peft's `.default.`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.inspect import Layout
from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import torch_load

MOMENTS = ("exp_avg", "exp_avg_sq")
# A mapped page counts as this process's memory until its mapping is dropped.
MAPPED_BYTES = 64 * 2**20
_LARGEST_STEP = 2**53


class CheckpointReader:
    """Reads tensors of any engine's checkpoint on request, and keeps none of them.

    The readers of the engines have the same methods, and follow the structures that their libraries write. In a damaged
    file any step of that can fail: here an error names the checkpoint and what was read.
    """

    def __init__(self, layout: Layout, open_reader: Callable[[], Any]) -> None:
        self.layout = layout
        with self._reading("its states"):
            self._reader = open_reader()
            self.hyperparameters: list[dict[str, Any]] = self._reader.hyperparameters
            """Of each parameter group, without the parameters; empty without optimizer states."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every saved weight."""
        with self._reading("the shapes of its weights"):
            shapes: dict[str, tuple[int, ...]] = self._reader.shapes()
        return shapes

    def optimized(self) -> list[str]:
        """Return the names of the parameters that have optimizer states."""
        with self._reading("the names of its optimizer states"):
            names: list[str] = self._reader.optimized()
        return names

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight that the optimizer updates (fp32 under every preset)."""
        with self._reading(name):
            weight: torch.Tensor = self._reader.weight(name)
        return weight

    def moment(self, name: str, state: str) -> torch.Tensor:
        """Return `exp_avg` or `exp_avg_sq`, in the weight's shape. Raises ToolkitError if the optimizer is not Adam."""
        with self._reading(f"{state} of {name}"):
            try:
                moment: torch.Tensor = self._reader.moment(name, state)
            except KeyError:
                raise ToolkitError(
                    f"{self.layout.path} has no {state} for {name}: only Adam and AdamW in fp32 are converted",
                    hint="resume it with the preset and the number of processes that it was saved with",
                ) from None
        return moment

    def optimizer_step(self) -> float:
        """Return Adam's own step count."""
        with self._reading("the optimizer's step"):
            step: float = self._reader.optimizer_step()
        if not (0 <= step <= _LARGEST_STEP and step == int(step)):
            raise ToolkitError(f"{self.layout.path}: the optimizer's step is {step}, expected a count")
        return step

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
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
    saved = reader.hyperparameters
    if not saved:
        raise ToolkitError(f"{reader.layout.path} has no parameter groups of an optimizer")
    if len(saved) == len(groups):
        return saved[position]
    filled = [index for index, names in enumerate(groups) if names]
    group = dict(saved[filled.index(position)] if position in filled and len(saved) == len(filled) else saved[0])
    return group if position in filled else group | {"weight_decay": 0.0}


class MappedFiles:
    """Files of `torch.save`, memory-mapped, and unmapped together once `MAPPED_BYTES` were read from them."""

    def __init__(self, *, trust_pickle: bool = False) -> None:
        self.read_bytes, self.trust_pickle = 0, trust_pickle
        self.loaded: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self.loaded:
            self.loaded[path] = torch_load(path, trust_pickle=self.trust_pickle)
        return self.loaded[path]

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
        self.loaded.clear()
        self.read_bytes = 0
        gc.collect()

"""One interface to any engine's checkpoint: fp32 weights and Adam moments, one parameter at a time.

`engines.open_checkpoint` returns the reader of a checkpoint's engine. Parameter names are those of the training model;
adapters keep peft's `.default.`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from toolkit.checkpoint.detection import Layout
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import torch_load

MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_STEP = 2**53

# A mapped page counts as this process's memory until its mapping is dropped.
MAPPED_BYTES = 64 * 2**20


class CheckpointReader(Protocol):
    """Reads tensors on request and keeps none of them."""

    layout: Layout
    hyperparameters: list[dict[str, Any]]
    """Hyperparameters of each parameter group, without the parameters; empty without optimizer states."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every saved weight."""

    def optimized(self) -> list[str]:
        """Return the names of the parameters that have optimizer states."""

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight that the optimizer updates (fp32 under every preset)."""

    def moment(self, name: str, state: str) -> torch.Tensor:
        """Return `exp_avg` or `exp_avg_sq`, in the weight's shape. Raises KeyError if there is none."""

    def optimizer_step(self) -> float:
        """Return Adam's own step count."""

    def close(self) -> None:
        """Close the files."""


class MissingState(ToolkitError):
    """The optimizer is not Adam: it has no such state."""


class CheckedReader:
    """A reader whose checkpoint may hold anything: what it returns is checked, and what it raises names the checkpoint.

    The readers of the engines follow the structures that their libraries write; in a file that was changed, any step of
    that can fail.
    """

    def __init__(self, path: Path, open_reader: Callable[[], CheckpointReader]) -> None:
        self._path = path
        with self._reading("its states"):
            self._reader = open_reader()
            self.layout = self._reader.layout
            self.hyperparameters = self._reader.hyperparameters
        for group in self.hyperparameters:
            self._check_group(group)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        with self._reading("the shapes of its weights"):
            return self._reader.shapes()

    def optimized(self) -> list[str]:
        with self._reading("the names of its optimizer states"):
            return [str(name) for name in self._reader.optimized()]

    def weight(self, name: str) -> torch.Tensor:
        with self._reading(name):
            return self._reader.weight(name)

    def moment(self, name: str, state: str) -> torch.Tensor:
        with self._reading(f"{state} of {name}"):
            try:
                return self._reader.moment(name, state)
            except KeyError:
                raise MissingState(f"{self._path} has no {state} for {name}") from None

    def optimizer_step(self) -> float:
        with self._reading("the optimizer's step"):
            step = self._reader.optimizer_step()
        if not (0 <= step <= _LARGEST_STEP and step == int(step)):
            raise ToolkitError(f"{self._path}: the optimizer's step is {step}, expected a count")
        return step

    def close(self) -> None:
        self._reader.close()

    def _check_group(self, group: Any) -> None:
        if not isinstance(group, dict):
            raise ToolkitError(f"{self._path}: a parameter group is {repr(group)[:80]}, expected keys and values")
        for name in ("lr", "eps", "weight_decay"):
            if not isinstance(group.get(name, 0.0), int | float | torch.Tensor):
                raise ToolkitError(f"{self._path}: {name} is {repr(group[name])[:80]}, expected a number")

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise ToolkitError(
                f"{self._path} is damaged: {what[:80]} cannot be read ({why})", hint="copy or download it again"
            ) from error


def check_names(reader: CheckpointReader, model: MetaModel) -> None:
    """Raise ToolkitError unless the checkpoint has every weight of the model, in its shape."""
    saved, expected = reader.shapes(), model.shapes
    missing = [name for name in expected if name not in saved]
    if missing:
        raise ToolkitError(f"{reader.layout.path} lacks {listed(missing)}")
    for name, shape in expected.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {reader.layout.path} has shape {saved[name]}, the model's is {shape}")


def listed(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def group_hyperparameters(reader: CheckpointReader, position: int, groups: list[list[str]]) -> dict[str, object]:
    """Return the hyperparameters of one of the Trainer's parameter groups (`groups`: the names in each).

    DeepSpeed drops a group without parameters, torch keeps it.
    """
    saved = reader.hyperparameters
    if not saved:
        raise ToolkitError(f"{reader.layout.path} has no parameter groups of an optimizer")
    if len(saved) == len(groups):
        return saved[position]
    filled = [index for index, names in enumerate(groups) if names]
    group = dict(saved[filled.index(position)] if position in filled and len(saved) == len(filled) else saved[0])
    return group if position in filled else group | {"weight_decay": 0.0}


class MappedFiles:
    """Files of `torch.save`, memory-mapped, and unmapped together once `mapped_bytes` were read from them."""

    def __init__(self, mapped_bytes: int = MAPPED_BYTES, *, trust_pickle: bool = False) -> None:
        self.mapped_bytes, self.read_bytes, self.trust_pickle = mapped_bytes, 0, trust_pickle
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
        if self.read_bytes >= self.mapped_bytes:
            self.close()

    def close(self) -> None:
        """Unmap the files."""
        self.loaded.clear()
        self.read_bytes = 0
        gc.collect()

"""The reader and the writer of each engine's checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from toolkit.checkpoint.dcp_checkpoint import AtLoadReader, DcpReader, write_at_load, write_dcp
from toolkit.checkpoint.deepspeed_checkpoint import DeepSpeedReader, write_universal
from toolkit.checkpoint.hf_checkpoint import PlainReader, write_plain
from toolkit.checkpoint.inspect import check_readable, detect
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import CheckpointReader, listed
from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import check_checkpoint

WRITERS: dict[str, Callable[[Path, CheckpointReader, MetaModel, list[list[str]]], None]] = {
    **{"deepspeed": write_universal, "fsdp2": write_dcp, "at_load": write_at_load},
    **{"ddp": write_plain, "none": write_plain},
}
"""By engine of the preset that resumes: write weights and optimizer states, given the names in each parameter group."""
_READERS: dict[str, Callable[..., CheckpointReader]] = {
    **{"deepspeed": DeepSpeedReader, "fsdp2": DcpReader, "at_load": AtLoadReader},
    **{"plain": PlainReader, "pipeline": PlainReader},
}
_LARGEST_STEP = 2**53


def open_checkpoint(path: Path, model: MetaModel, *, trust_pickle: bool = False) -> CheckpointReader:
    """Return the reader of a checkpoint. `model` names the states that DDP numbers.

    Raises ToolkitError for a pickle that would run something (unless it is trusted), for a converted DeepSpeed
    checkpoint, for numbered states that cannot be named, and for a weight of the model that is missing or misshapen.
    """
    check_readable(path)
    if not trust_pickle:
        check_checkpoint(path)
    reader = _CheckedReader(path, model, trust_pickle=trust_pickle)
    saved = reader.shapes()
    missing = [name for name in model.shapes if name not in saved]
    if missing:
        raise ToolkitError(f"{path} lacks {listed(missing)}")
    for name, shape in model.shapes.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {path} has shape {saved[name]}, the model's is {shape}")
    return reader


class _CheckedReader:
    """A reader whose errors name the checkpoint.

    The readers of the engines follow the structures that their libraries write; in a file that is damaged, any step of
    that can fail.
    """

    def __init__(self, path: Path, model: MetaModel, *, trust_pickle: bool) -> None:
        self.layout = detect(path)
        with self._reading("its states"):
            self._reader = _READERS[self.layout.engine](self.layout, model, trust_pickle=trust_pickle)
            self.hyperparameters = self._reader.hyperparameters

    def shapes(self) -> dict[str, tuple[int, ...]]:
        with self._reading("the shapes of its weights"):
            return self._reader.shapes()

    def optimized(self) -> list[str]:
        with self._reading("the names of its optimizer states"):
            return self._reader.optimized()

    def weight(self, name: str) -> torch.Tensor:
        with self._reading(name):
            return self._reader.weight(name)

    def moment(self, name: str, state: str) -> torch.Tensor:
        with self._reading(f"{state} of {name}"):
            try:
                return self._reader.moment(name, state)
            except KeyError:
                raise ToolkitError(
                    f"{self.layout.path} has no {state} for {name}: only Adam and AdamW in fp32 are converted",
                    hint="resume it with the preset and the number of processes that it was saved with",
                ) from None

    def optimizer_step(self) -> float:
        with self._reading("the optimizer's step"):
            step = self._reader.optimizer_step()
        if not (0 <= step <= _LARGEST_STEP and step == int(step)):
            raise ToolkitError(f"{self.layout.path}: the optimizer's step is {step}, expected a count")
        return step

    def close(self) -> None:
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

"""The parts of a Trainer that a rehearsal replaces: step timer, attestation, and what the other ranks would have sent.

The readings of the live objects are those of a run. What depends on other ranks is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.observe.attest.attestation import Attestation
from toolkit.observe.attest.differences import Difference, Values, byte_limit_differences, differences
from toolkit.observe.timer import StepTimer
from toolkit.rehearse.stand_ins import fill_shards, register_local_reduction
from toolkit.train.trainer import TrainerParts

MEANINGLESS_COLUMNS = ("loss", "grad_norm", "local_grad_norm", "grad_norm_ranks")

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
Peaks = dict[str, int]


class RehearsedAttestation(Attestation):
    """Verifies one rank's readings; sums over ranks and full weights cannot be read."""

    def hash_weights(self, model: Any) -> str | None:
        del model
        return None  # gathering would fill in what other ranks hold

    def read_before_training(self) -> Values:
        return {"packing": None}  # it would compute with gathered weights, which no other rank has sent

    def expected_values(self) -> Values:
        return {name: value for name, value in super().expected_values().items() if name != "packing_mask_bytes"}

    def differences(self, expected: Values, ranks: list[Values], norms: list[Values]) -> list[Difference]:
        del norms  # this rank's share alone
        return differences(expected, ranks) or byte_limit_differences(ranks)


class PhasePeaks:
    """The allocator's peaks of `load`, `forward`, `backward` and `step`; empty on a CPU, which has no allocator.

    The statistics are the host's, so nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.phase = "load"
        self.peaks: dict[str, Peaks] = {}

    def enter(self, phase: str) -> None:
        """End the current phase, and begin this one with what is allocated now."""
        if self.cuda:
            self._record()
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def by_phase(self) -> dict[str, Peaks]:
        """Return `peak_allocated_bytes` and `peak_reserved_bytes` of every phase, the current one included."""
        if self.cuda:
            self._record()
        return {phase: dict(peaks) for phase, peaks in self.peaks.items()}

    def highest(self) -> Peaks:
        """Return the peaks over all phases; empty on a CPU."""
        phases = self.by_phase().values()
        return {name: max(peaks[name] for peaks in phases) for name in PEAKS} if phases else {}

    def _record(self) -> None:
        sizes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        before = self.peaks.get(self.phase, {})
        self.peaks[self.phase] = {name: max(size, before.get(name, 0)) for name, size in zip(PEAKS, sizes, strict=True)}


class RehearsedTimer(StepTimer):
    """Writes rows that are marked as rehearsed and have no loss; reads the allocator's peaks by phase too."""

    def __init__(self, *args: Any, device: torch.device, **kwargs: Any) -> None:
        super().__init__(*args, device=device, **kwargs)
        self.peaks = PhasePeaks(device)

    def add_batch(self, *args: Any) -> None:
        self.peaks.enter("forward")
        super().add_batch(*args)

    def enter_backward(self) -> None:
        super().enter_backward()
        self.peaks.enter("backward")

    def add_loss(self, loss: torch.Tensor) -> None:
        self.peaks.enter("step")
        super().add_loss(loss)

    def read_memory(self) -> dict[str, Any]:
        # The allocator's own peaks begin again with each phase.
        return super().read_memory() | self.peaks.highest()

    def _row(self, number: int, step: Any) -> dict[str, Any]:
        row = super()._row(number, step)
        return row | dict.fromkeys(MEANINGLESS_COLUMNS) | {"rehearsed": True}

    def _check_finite(self, row: dict[str, Any], step: Any) -> None:
        del row, step  # a loss that is not finite says nothing about the job

    def _print(self, row: dict[str, Any]) -> None:
        print(f"step {row['step']}/{self.max_steps} rehearsed  {row['seconds']:.2f} s of compute", flush=True)

    def on_log(self, *_: Any, **__: Any) -> None:
        self.restart_clock()


class FakeOtherRanks(TrainerCallback):  # type: ignore[misc]
    """Gives the wrapped model what the other ranks would have sent before the first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        register_local_reduction(self.trainer.model_wrapped)
        if not hasattr(self.trainer.model_wrapped, "zero_optimization_stage"):
            fill_shards(self.trainer.model_wrapped)


REHEARSAL_PARTS = TrainerParts(
    timer=RehearsedTimer, attestation=RehearsedAttestation, callbacks=lambda trainer: [FakeOtherRanks(trainer)]
)

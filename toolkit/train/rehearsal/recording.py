"""What a rehearsal records: the attestation of one rank, steps without losses, and its part of run.json.

The readings of the live objects are those of a run. What other ranks would have said is left out and said to be.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from transformers import TrainerCallback

from toolkit.errors import AttestationFailed
from toolkit.runs import status
from toolkit.runs.arguments import ModelArguments
from toolkit.runs.folder import RunFolder, write_json
from toolkit.runs.rehearsals import CANNOT_TELL, Rehearsed
from toolkit.runs.steps import read_rows
from toolkit.train.attest.attestation import Attestation, attestation, attested_line
from toolkit.train.attest.check import describe, differences, limit_differences
from toolkit.train.attest.readings import Facts
from toolkit.train.failure import Progress
from toolkit.train.meter import Meter
from toolkit.train.rehearsal.inputs import has_local_weights
from toolkit.train.rehearsal.phase_peaks import PhasePeaks
from toolkit.train.rehearsal.stage import fill_shards, let_ddp_reduce

MEANINGLESS = ("loss", "grad_norm", "local_grad_norm", "grad_norm_ranks")
PARTS = ("parameter", "gradient", "optimizer")


class RehearsedAttestation(Attestation):
    """One rank's readings against the promise; sums over ranks and whole weights are not there to be read."""

    def _digest(self, plain: Any) -> str | None:
        del plain
        return None  # gathering would fill in what other ranks hold

    def _conclude(self, own: Facts) -> None:
        promised = self._promised()
        found = differences(promised, [own]) or limit_differences([own])
        write_json(self.path, attestation(self.promise.preset, promised, [own], found))
        assert self.promise.preset is not None
        if found:
            raise AttestationFailed(
                f"the rehearsal is not what the preset promises: {describe(found[0])}",
                hint=f"all values are in {self.path}",
            )
        print(f"rank {own['rank']} {attested_line(self.promise.preset, own)}", flush=True)


class RehearsedMeter(Meter):
    """Rows of a rehearsal say so, and hold no loss; its peaks are told by phase too."""

    def __init__(self, *args: Any, device: Any, **kwargs: Any) -> None:
        super().__init__(*args, device=device, **kwargs)
        self.peaks = PhasePeaks(device)

    def _memory(self) -> dict[str, int | None]:
        held: dict[str, int | None] = super()._memory()
        return held | self.peaks.highest()

    def _row(self, number: int, step: Any) -> dict[str, Any]:
        row = super()._row(number, step)
        return row | dict.fromkeys(MEANINGLESS) | {"rehearsed": True}

    def _check_finite(self, row: dict[str, Any], step: Any) -> None:
        del row, step  # what is not a number here says nothing of the job

    def _print(self, row: dict[str, Any]) -> None:
        print(f"step {row['step']}/{self.max_steps} rehearsed  {row['seconds']:.2f} s of compute", flush=True)

    def on_log(self, *_: Any, **__: Any) -> None:
        self.restart_clock()


class FakeWorld(TrainerCallback):  # type: ignore[misc]
    """What the wrapped model needs where nobody answers."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        let_ddp_reduce(self.trainer.model_wrapped)
        if not hasattr(self.trainer.model_wrapped, "zero_optimization_stage"):
            fill_shards(self.trainer.model_wrapped)


def close_rehearsal(
    folder: RunFolder, rehearsed: Rehearsed, trainer: Any, model: ModelArguments, progress: Progress
) -> None:
    """run.json's `rehearsal`: what this rank held, and what was not told."""
    own = next(c.own for c in trainer.callback_handler.callbacks if isinstance(c, RehearsedAttestation))
    rows = read_rows(folder.rank_rows(rehearsed.rank))
    facts = rehearsed_facts(rehearsed, own, rows, untimed_steps=model.untimed_steps)
    facts["phase_peaks"] = trainer.meter.peaks.told()
    _complete(folder, facts | {"random_weights": not has_local_weights(model)}, progress)


def close_trace(folder: RunFolder, rehearsed: Rehearsed, facts: Facts, progress: Progress) -> None:
    """The same of a rehearsal on fake tensors."""
    _complete(folder, asdict(rehearsed) | facts | {"random_weights": True}, progress)


def _complete(folder: RunFolder, facts: Facts, progress: Progress) -> None:
    progress.enter("end")
    folder.update_run(
        status=status.COMPLETED,
        exit_code=0,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        phases=progress.phases,
        rehearsal=facts,
    )


def rehearsed_facts(rehearsed: Rehearsed, own: Facts, rows: list[Facts], *, untimed_steps: int) -> Facts:
    """Bytes of rank r of N, as read back after its first step."""
    peaks = {
        name: max((row[name] for row in rows if row[name] is not None), default=None)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
    }
    timed = [row["seconds"] for row in rows[untimed_steps:]]
    return {
        **asdict(rehearsed),
        "steps": len(rows),
        **{f"{part}_bytes": own[f"{part}_bytes"] for part in PARTS},
        "num_params": own["num_params"],
        "num_trainable_params": own["num_trainable_params"],
        **peaks,
        # On a CPU fp32 arithmetic says nothing of a GPU's step.
        "compute_step_seconds": statistics.median(timed) if timed and own["device"].startswith("cuda") else None,
        "not_told": list(CANNOT_TELL),
    }

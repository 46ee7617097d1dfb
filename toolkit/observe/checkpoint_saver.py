"""The Trainer's saves as complete-or-absent checkpoints, in this thread or in the background, with a record of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from toolkit.observe.attest.readings import RankReading
from toolkit.observe.background_save import BackgroundSaver, SaveRecord
from toolkit.observe.manifest import (
    describe_checkpoint,
    fingerprint,
    leave_out_tied_weights,
    manifest_facts,
)
from toolkit.observe.parts import ObserverParts
from toolkit.record.checkpoints import checkpoint_files, saving_folder


class CheckpointSaver:
    """Saves what one rank has of each checkpoint. `reading` returns what the rank read back after its first step."""

    def __init__(
        self,
        trainer: Any,
        parts: ObserverParts,
        *,
        reading: Callable[[], RankReading | None],
        in_background: bool = False,
    ) -> None:
        self.trainer, self.parts, self.reading = trainer, parts, reading
        self.staging: Path | None = None
        """Where a checkpoint is being written; None while none is."""
        self.saves: list[SaveRecord] = []
        """Each save of this run, for run.json; rank 0's have their sizes."""
        timeout = timedelta(seconds=trainer.args.ddp_timeout)
        self.background = BackgroundSaver(trainer.model, timeout=timeout) if in_background else None

    def save(self, write: Callable[[], None], *, entered: float) -> None:
        """Save a checkpoint, or begin to: `write` is the Trainer's own save. Collective.

        Raises Diverged where the weights are lost: those are not written.
        """
        waited = 0.0 if self.background is None else self.background.wait()
        preset, reading, step = self.parts.expected.preset, self.reading(), self.trainer.state.global_step
        assert reading is not None
        name = None if preset is None else preset.name
        facts = manifest_facts(self.trainer, reading, preset=name, more=self.parts.manifest())
        record = SaveRecord(kind="checkpoint", step=step, waited_seconds=waited)
        began, wrapped = time.monotonic(), self.trainer.model_wrapped
        if hasattr(wrapped, "zero_optimization_stage") and "module_state_dict" not in vars(wrapped):
            leave_out_tied_weights(wrapped)
        self.staging = saving_folder(Path(self.trainer.args.output_dir), step)
        with contextlib.nullcontext() if self.background is None else self.background.deferred_writes():
            write()
        self.parts.save_states(self.staging / f"checkpoint-{step}")
        staging, self.staging = self.staging, None
        saved = describe_checkpoint(self.trainer, staging, facts)
        if self.background is not None:
            self.background.start(saved, record, began=began)
        else:
            saved.complete()
            if self.trainer.args.process_index == 0:
                record.complete(checkpoint_files(saved.checkpoint), began=began, writing_began=began)
        self.saves.append(record)
        record.stall_seconds += time.monotonic() - entered

    def finish(self) -> None:
        """Wait for a save in the background: the best checkpoint may be loaded next, and older ones removed."""
        if self.background is not None:
            waited = self.background.wait()
            if self.saves:
                self.saves[-1].stall_seconds += waited

    def note_save(self, kind: str, files: Iterable[Path], began: float) -> None:
        """Record how long a save took and the bytes of its files; rank 0 counts what all ranks wrote."""
        record = SaveRecord(kind=kind, step=self.trainer.state.global_step, stall_seconds=time.monotonic() - began)
        record.complete(files, began=began, writing_began=began)
        self.saves.append(record)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the live model's logits for fixed tokens. Collective; raises Diverged where they are not finite."""
        return fingerprint(self.trainer, self.reading())

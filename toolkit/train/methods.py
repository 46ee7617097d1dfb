"""The methods of one run that need the live Trainer: communication hook, profile, snapshot, and what is asked of them.

methods = Methods(trainer, arguments, folder)    # before train()
methods.write_facts()                            # after it
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from toolkit.runs.folder import RunFolder
from toolkit.train.arguments import Arguments
from toolkit.train.attest.attestation import Attestation
from toolkit.train.attest.tensors import uncompiled
from toolkit.train.comm_hooks import HookInForce, register_hook
from toolkit.train.profiling import MemorySnapshot, Profiler
from toolkit.train.switches import asked_facts


class Methods:
    """Registers what was asked for, tells the attestation, and writes into run.json what came of it."""

    def __init__(self, trainer: Any, arguments: Arguments, folder: RunFolder) -> None:
        self.trainer, self.folder, (model, _, training) = trainer, folder, arguments
        attestation = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Attestation))
        attestation.asked |= asked_facts(model, training, recompute=training.recompute_by_engine)
        self.hook = CommunicationHook(trainer, model)
        trainer.add_callback(self.hook)
        self.profiler: Profiler | None = None
        if model.profile_steps is not None:
            self.profiler = Profiler(trainer, model.profile_steps, folder.path / "profile")
            trainer.add_callback(self.profiler)
        if model.memory_snapshot:
            trainer.add_callback(MemorySnapshot(folder.path / "profile", rank=training.process_index))

    def write_facts(self) -> None:
        """Every rank calls it; rank 0 writes."""
        facts: dict[str, Any] = {}
        if self.hook.hook is not None:
            facts["ddp_comm_hook"] = self.hook.hook.facts()
        if self.profiler is not None:
            facts["profile"] = self.profiler.tables()
        if facts and self.trainer.args.process_index == 0:
            self.folder.update_run(**facts)


class CommunicationHook(TrainerCallback):  # type: ignore[misc]
    """Registers the hook once DDP wraps the model, and closes its books at each step."""

    def __init__(self, trainer: Any, model: Any) -> None:
        self.trainer, self.model = trainer, model
        self.hook: HookInForce | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.hook = register_hook(uncompiled(self.trainer.model_wrapped), self.model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.hook is not None:
            self.hook.end_step()

"""Resume from DeepSpeed's universal layout, which the Trainer has no argument for, and finish what it leaves out.

A checkpoint that `toolkit checkpoint convert` made for a DeepSpeed preset says `"universal": true` in its manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from toolkit.runs.checkpoints import read_checkpoint


def prepare_universal(trainer: Any, checkpoint: str | Path | None) -> None:
    """Before `train`: tell DeepSpeed to load the universal layout, if that is what the checkpoint is."""
    if checkpoint is None or not (read_checkpoint(Path(checkpoint)).manifest or {}).get("universal"):
        return
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
    trainer.add_callback(AfterUniversal(trainer))


class AfterUniversal(TrainerCallback):  # type: ignore[misc]
    """Once loaded: later loads are of DeepSpeed's own layout again, and Adam counts its steps as before."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self.trainer.model_wrapped
        engine._config.load_universal_checkpoint = False
        separate_steps(engine.optimizer.optimizer)


def separate_steps(optimizer: Any) -> None:
    """Give every parameter a step count of its own, of the kind and on the device that the optimizer makes.

    DeepSpeed 0.19.8 hands one tensor to all groups of ZeRO-3: torch's Adam would count each step once a group.
    """
    counts_in_integers = type(optimizer).__name__ == "DeepSpeedCPUAdam"
    fused = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for parameter, state in optimizer.state.items():
        if "step" not in state:
            continue
        step = float(state["step"])
        on_device = fused.get(id(parameter), any(g.get("fused") for g in optimizer.param_groups))
        device = parameter.device if on_device else torch.device("cpu")
        state["step"] = int(step) if counts_in_integers else torch.tensor(step, dtype=torch.float32, device=device)

"""The checkpoint a run resumes from, and DeepSpeed's universal layout, which the Trainer has no argument for.

A checkpoint that `toolkit checkpoint convert` made for a DeepSpeed preset has `"universal": true` in its manifest.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.files.model_weights import read_weights
from toolkit.files.safe_loading import check_checkpoint, load_only_known_classes
from toolkit.run import checkpoints
from toolkit.run.checkpoints import Checkpoint, check_resume_settings, check_same_layout
from toolkit.run.dataset_checks import streaming_buffer_size
from toolkit.train.arguments import Arguments
from toolkit.train.launch_context import LaunchContext

MUST_STAY = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "max_steps")


def find_checkpoint(arguments: Arguments, launch: LaunchContext) -> Checkpoint | None:
    """Return the checkpoint that `--resume_from_checkpoint` names; None for a run that starts at step 0.

    Raises ToolkitError for one that is damaged, whose pickles would run something, that has another layout, or whose
    data order would not continue.
    """
    training = arguments.training
    checkpoint = _read_on_rank_0(training, verified=launch.folder_prepared, trust_pickle=arguments.model.trust_pickle)
    if checkpoint is None:
        return None
    if launch.preset is not None:
        check_same_layout(
            checkpoint,
            **{name: getattr(launch.preset, name) for name in ("engine", "sharding", "sharded_at_load")},
            world_size=training.world_size,
            layout=arguments.layout,
        )
    check_resume_settings(
        checkpoint,
        **{name: getattr(training, name) for name in MUST_STAY},
        optim=str(getattr(training.optim, "value", training.optim)),
        streaming_buffer_size=streaming_buffer_size(asdict(arguments.data)),
        dataset_weights=arguments.data.dataset_weights or [],
        data_parallel_size=arguments.data_parallel_size,
    )
    if training.process_index == 0:
        print(f"resume: from {checkpoint.path}, after step {checkpoint.step}", flush=True)
    return checkpoint


def _read_on_rank_0(training: Any, *, verified: bool, trust_pickle: bool) -> Checkpoint | None:
    """Read all bytes on one rank only. `verified`: the launcher has read a named checkpoint already."""
    given = training.resume_from_checkpoint
    if given in (None, "", False) or str(given).lower() in ("false", "none"):
        return None
    found = [_find(str(given), Path(training.output_dir), verified) if training.process_index == 0 else None]
    if not trust_pickle:
        if found[0] is not None:
            check_checkpoint(found[0].path)
        load_only_known_classes(deepspeed=training.deepspeed_plugin is not None)
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    checkpoint: Checkpoint | None = found[0]
    return checkpoint


def _find(given: str, output_dir: Path, verified: bool) -> Checkpoint | None:
    if given.lower() not in checkpoints.LATEST_WORDS:
        return (
            checkpoints.read_checkpoint(Path(given)) if verified else checkpoints.read_complete_checkpoint(Path(given))
        )
    checkpoints.remove_unfinished(output_dir)
    latest = checkpoints.latest_complete(output_dir)
    if latest is None:
        print(f"resume: no complete checkpoint is in {output_dir}; training starts from step 0", flush=True)
    return latest


def load_converted(model: Any, folder: Path) -> None:
    """Load the weights that a folder stores in other pieces than the live model holds, such as single experts.

    The Trainer resumes with `load_state_dict(..., strict=False)` (transformers 5.23, `_load_from_checkpoint`), without
    the conversion of `from_pretrained`: a mixture would keep the experts of the model that training started from.
    """
    stored = read_weights(folder)
    absent = {name: parameter for name, parameter in model.named_parameters() if name not in stored}
    if not absent:
        return
    converted = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, parameter in absent.items():
        parameter.data.copy_(converted[name])


def is_universal(checkpoint: Checkpoint | None) -> bool:
    """Return True for a checkpoint in DeepSpeed's universal layout."""
    return checkpoint is not None and checkpoint.manifest is not None and checkpoint.manifest.universal


class UniversalCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Makes DeepSpeed load the universal layout once, and restores what that leaves out."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {"load_universal": True}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self.trainer.model_wrapped
        engine._config.load_universal_checkpoint = False  # later loads are of DeepSpeed's own layout
        separate_step_counts(engine.optimizer.optimizer)


def separate_step_counts(optimizer: Any) -> None:
    """Give every parameter a step count of its own, of the type and on the device that the optimizer makes.

    DeepSpeed 0.19.8 gives one tensor to all groups of ZeRO-3: torch's Adam would count each step once per group.
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

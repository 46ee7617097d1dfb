"""The checkpoint a run resumes from, and DeepSpeed's universal layout, which the Trainer has no argument for.

A checkpoint that `toolkit checkpoint convert` made for a DeepSpeed preset has `"universal": true` in its manifest.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from toolkit.files.model_weights import read_weights
from toolkit.files.safe_loading import check_checkpoint, load_only_known_classes
from toolkit.launch.resume_conversion import ResumingRun, checkpoint_to_convert, convert_checkpoint
from toolkit.observe.progress import Progress
from toolkit.observe.signals import join_store
from toolkit.presets import Preset
from toolkit.record.checkpoints import (
    LATEST_WORDS,
    Checkpoint,
    latest_complete,
    read_checkpoint,
    read_complete_checkpoint,
    remove_unfinished,
)
from toolkit.record.resume_checks import check_resume_settings, check_same_layout
from toolkit.train.arguments import Arguments
from toolkit.train.launch_context import LaunchContext

# A conversion reads and writes the whole checkpoint; no collective may wait for it.
CONVERSION_LIMIT = timedelta(days=1)


def find_checkpoint(arguments: Arguments, launch: LaunchContext, progress: Progress) -> Checkpoint | None:
    """Return the checkpoint that `--resume_from_checkpoint` names; None for a run that starts at step 0.

    Rank 0 reads all bytes, and converts a checkpoint whose shards do not fit; the others wait, in no collective.

    Raises ToolkitError for one that is damaged, whose pickles would run something, that cannot be converted, or whose
    data order would not continue.
    """
    training = arguments.training
    if not arguments.job.resumes:
        return None
    if not arguments.job.trust_pickle:
        load_only_known_classes(deepspeed=training.deepspeed_plugin is not None)
    found = [_prepared_by_rank_0(arguments, launch, progress)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    checkpoint = found[0]
    if checkpoint is None:
        return None
    if launch.preset is not None:
        run = _resuming_run(arguments, launch.preset)
        check_same_layout(checkpoint, run.layout)
    check_resume_settings(
        checkpoint,
        global_batch_size=arguments.global_batch_size,
        seed=training.seed,
        max_steps=training.max_steps,
        optim=str(getattr(training.optim, "value", training.optim)),
        streaming_buffer_size=arguments.job.shuffle_buffer_size,
        dataset_weights=list(arguments.job.dataset_weights),
        data_parallel_size=arguments.data_parallel_size,
        order_of_ranks=arguments.job.order_of_ranks,
        pipeline_chunks=None if arguments.pipeline is None else arguments.pipeline.chunks,
    )
    if training.process_index == 0:
        print(f"resume: from {checkpoint.path}, after step {checkpoint.step}", flush=True)
    return checkpoint


def _prepared_by_rank_0(arguments: Arguments, launch: LaunchContext, progress: Progress) -> Checkpoint | None:
    """Prepare the checkpoint on rank 0, while the others wait for as long as that takes; None on the others."""
    if not dist.is_initialized():
        return _prepare(arguments, launch)
    store = join_store(CONVERSION_LIMIT, progress)
    if arguments.training.process_index != 0:
        store.wait(["checkpoint"])
        return None
    checkpoint = _prepare(arguments, launch)
    store.set("checkpoint", "ready")
    return checkpoint


def _prepare(arguments: Arguments, launch: LaunchContext) -> Checkpoint | None:
    """Find the checkpoint, check its pickles, and convert it where its shards do not fit the run."""
    training = arguments.training
    given, output_dir = str(training.resume_from_checkpoint), Path(training.output_dir)
    checkpoint = _find(given, output_dir, verified=launch.folder_prepared)
    if checkpoint is None:
        return None
    if launch.preset is not None:
        run = _resuming_run(arguments, launch.preset)
        if (other := checkpoint_to_convert(checkpoint, run)) is not None:
            checkpoint = read_checkpoint(convert_checkpoint(other, run, on_message=_print_at_once))
    if not arguments.job.trust_pickle:
        check_checkpoint(checkpoint.path)
    return checkpoint


def _resuming_run(arguments: Arguments, preset: Preset) -> ResumingRun:
    training = arguments.training
    return ResumingRun(
        preset=preset,
        num_processes=training.world_size,
        output_dir=Path(training.output_dir),
        global_batch_size=arguments.global_batch_size,
        degrees=arguments.job.degrees,
        trust_pickle=arguments.job.trust_pickle,
    )


def _print_at_once(line: str) -> None:
    print(line, flush=True)


def _find(given: str, output_dir: Path, *, verified: bool) -> Checkpoint | None:
    """`verified`: the launcher has read a named checkpoint already."""
    if given.lower() not in LATEST_WORDS:
        return read_checkpoint(Path(given)) if verified else read_complete_checkpoint(Path(given))
    remove_unfinished(output_dir)
    latest = latest_complete(output_dir)
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

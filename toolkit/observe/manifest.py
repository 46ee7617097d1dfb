"""Make the Trainer's checkpoints complete or absent: a manifest with checksums, and a fingerprint of the live model.

The Trainer writes into `.saving-checkpoint-STEP`; every rank then hashes its share of the files, rank 0 writes the
manifest, and the folder is renamed. A save that is killed leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import rotate_checkpoints

from toolkit.observe.attest.readings import RankReading
from toolkit.observe.compiler_events import uncompiled_forward
from toolkit.observe.failure_report import Diverged
from toolkit.record import checkpoints

FINGERPRINT_TOKENS = 16
FINGERPRINT_LOGITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFolder:
    """One rank's view of a checkpoint that is in its temporary folder, and of what it takes to complete it."""

    folder: Path
    """`.saving-checkpoint-STEP/checkpoint-STEP`."""
    checkpoint: Path
    facts: dict[str, Any]
    """The manifest without its files."""
    rank: int
    world_size: int
    save_total_limit: int | None
    best_checkpoint: str | None

    def complete(self, group: Any = None) -> None:
        """Turn the folder into `checkpoint-STEP` once all ranks have written theirs. Collective in the process group.

        The checksums are of what is read back from the disk, each rank its share of the files.
        """
        _barrier(group)
        entries = _all_entries(self.folder, rank=self.rank, world_size=self.world_size, group=group)
        if self.rank == 0:
            checkpoints.commit_checkpoint(self.folder, self.checkpoint, {**self.facts, "files": entries})
            self.folder.parent.rmdir()
            rotate_checkpoints(
                output_dir=str(self.checkpoint.parent),
                save_total_limit=self.save_total_limit,
                best_model_checkpoint=self.best_checkpoint,
            )
        _barrier(group)


def describe_checkpoint(trainer: Any, staging: Path, facts: dict[str, Any]) -> SavedFolder:
    """Write the small files that the Trainer leaves out, and return what completes the checkpoint. Collective.

    `staging` is where the Trainer wrote the checkpoint's folder; `facts` is the manifest without its files.
    """
    name = f"checkpoint-{trainer.state.global_step}"
    written = staging / name
    _barrier()  # every rank has made the folder
    if trainer.args.process_index == 0:
        describe_shards(trainer, written)
        (written / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
    if trainer.state.best_global_step:
        _name_best_checkpoint(trainer, written)
    return SavedFolder(
        folder=written,
        checkpoint=Path(trainer.args.output_dir) / name,
        facts=facts,
        rank=trainer.args.process_index,
        world_size=trainer.args.world_size,
        save_total_limit=trainer.args.save_total_limit,
        best_checkpoint=trainer.state.best_model_checkpoint,
    )


def describe_shards(trainer: Any, folder: Path) -> None:
    """Save configuration and tokenizer next to FSDP's shards, as every other engine does: an export needs them."""
    if not trainer.is_fsdp_enabled:
        return
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    parts = [plain.config, plain.generation_config, trainer.processing_class]
    if hasattr(plain, "peft_config"):
        parts = [*plain.peft_config.values(), trainer.processing_class]
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)


def leave_out_tied_weights(engine: Any) -> None:
    """Leave frozen weights out of DeepSpeed's adapter checkpoints under every one of their names.

    deepspeed 0.19.8 leaves out the first name of a tied weight only, so that the output head, the largest tensor of
    all, would be saved with the adapters (ZeRO-1 and ZeRO-2).
    """
    frozen = [name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    full_state_dict = engine.module_state_dict

    def module_state_dict(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        state = full_state_dict(*args, exclude_frozen_parameters=exclude_frozen_parameters, **kwargs)
        for name in frozen if exclude_frozen_parameters else []:
            state.pop(name, None)
        return state

    engine.module_state_dict = module_state_dict


def _name_best_checkpoint(trainer: Any, written: Path) -> None:
    """Record the best checkpoint by its final name: the Trainer looked for it in the temporary folder of this save.

    Every rank loads its part of a sharded one, so every rank needs the name.
    """
    best = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.best_global_step}"
    trainer.state.best_model_checkpoint = str(best)
    if trainer.args.process_index == 0:
        trainer.state.save_to_json(str(written / "trainer_state.json"))


def _all_entries(folder: Path, *, rank: int, world_size: int, group: Any) -> list[dict[str, Any]]:
    """Return the manifest's entries for all files; each rank reads its share of the bytes."""
    paths = sorted(checkpoints.checkpoint_files(folder), key=lambda path: (-path.stat().st_size, str(path)))
    own = checkpoints.file_entries(folder, paths[rank::world_size])
    if not dist.is_initialized():
        return own
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own, group=group)
    return sorted((entry for entries in gathered for entry in entries), key=lambda entry: str(entry["path"]))


def manifest_facts(
    trainer: Any, reading: RankReading, *, preset: str | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a reader must know before it loads the checkpoint: engine, ranks, sizes, batch, fingerprint.

    `reading` is what this rank read back after its first step; `more` replaces what follows from it.
    """
    training, values = trainer.args, dict(reading)
    ranks = values["world_size"]
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    return {
        "step": trainer.state.global_step,
        "preset": preset,
        **{name: values[name] for name in ("engine", "sharding", "world_size", "compute_dtype")},
        "layout": values["layout"],
        "pipeline_chunks": None,
        "data_parallel_size": ranks,
        "sharded_at_load": trainer.is_distributed_loading_by_transformers,
        **{name: values[name] for name in ("num_params", "num_trainable_params")},
        "adapter": hasattr(plain, "peft_config"),
        "model_name_or_path": plain.config._name_or_path,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "global_batch_size": training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks,
        "optim": str(getattr(training.optim, "value", training.optim)),
        "seed": training.seed,
        "streaming_buffer_size": 0,
        "dataset_weights": [],
        **more,
        "fingerprint": fingerprint(trainer, reading),
    }


def fingerprint(trainer: Any, reading: RankReading | None) -> dict[str, Any] | None:
    """Return `input_ids` and `logits` of the live model for fixed tokens, and how it computes. Collective.

    None where parameters are on an NVMe disk or nothing was trained. Raises Diverged where a logit is not finite, so
    that such weights never replace good ones on the disk.
    """
    if reading is None or reading["offload_param"] == "nvme":
        return None
    input_ids, logits = fixed_token_logits(
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    )
    check_finite(logits, step=trainer.state.global_step)
    how = {"compute_dtype": reading["compute_dtype"], "load_in_4bit": reading["load_in_4bit"]}
    return {"input_ids": input_ids, "logits": logits, **how}


def check_finite(logits: list[float], *, step: int) -> None:
    """Raise Diverged where a logit is not finite.

    The update of a step can ruin the weights while its loss, which was computed before the update, is still finite.
    """
    bad = sum(not math.isfinite(logit) for logit in logits)
    if bad:
        raise Diverged(
            f"the weights after step {step} are lost, and not saved: of their {len(logits)} logits for fixed tokens"
            f" {bad} are NaN or infinite",
            hint="lower `--learning_rate`",
        )


def fixed_token_logits(plain: Any) -> tuple[list[int], list[float]]:
    """Return fixed tokens and the model's logits for them: the first 64 of the last position.

    Collective under a sharded model. No random number is drawn, so that training continues as it would without.
    """
    vocabulary = plain.config.get_text_config().vocab_size
    input_ids = [1 + 7919 * index % (vocabulary - 1) for index in range(FINGERPRINT_TOKENS)]
    was_training = plain.training
    plain.eval()
    with torch.no_grad(), uncompiled_forward():
        logits = plain(input_ids=torch.tensor([input_ids], device=_device(plain))).logits[0, -1, :FINGERPRINT_LOGITS]
    plain.train(was_training)
    return input_ids, logits.float().tolist()


def _device(plain: Any) -> torch.device:
    """Return where the model computes; offloaded parameters are elsewhere."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else plain.device


def _barrier(group: Any = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)

"""Checkpoints as the Trainer writes them, made complete or not there; and which of them a run resumes from.

The Trainer writes into `.saving-checkpoint-STEP`; every rank then hashes its share of the files, rank 0 writes the
manifest, and the folder gets its name. A save that is killed leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import rotate_checkpoints

from toolkit.runs import checkpoints
from toolkit.runs.checkpoints import Checkpoint, Manifest
from toolkit.train.failure import Diverged

FINGERPRINT_TOKENS = 16
FINGERPRINT_LOGITS = 64


def finish_checkpoint(trainer: Any, staging: Path, facts: Manifest) -> None:
    """Turn what the Trainer wrote under `staging` into `checkpoint-STEP`; every rank must call it.

    `facts` are the manifest's, without its files.
    """
    name = f"checkpoint-{trainer.state.global_step}"
    written, checkpoint = staging / name, Path(trainer.args.output_dir) / name
    _barrier()  # every rank's files are written
    if trainer.args.process_index == 0:
        describe_shards(trainer, written)
        (written / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
    if trainer.args.process_index == 0 and trainer.state.best_global_step:
        _name_best_checkpoint(trainer, written)
    _barrier()
    entries = _all_entries(written, rank=trainer.args.process_index, world_size=trainer.args.world_size)
    if trainer.args.process_index == 0:
        checkpoints.complete(written, checkpoint, {**facts, "files": entries})
        staging.rmdir()
        rotate_checkpoints(
            output_dir=trainer.args.output_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
        )
    _barrier()


def describe_shards(trainer: Any, folder: Path) -> None:
    """Configuration and tokenizer beside FSDP's shards, as every other engine saves them: one can export them alone."""
    if not trainer.is_fsdp_enabled:
        return
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    described = [plain.config, plain.generation_config, trainer.processing_class]
    if hasattr(plain, "peft_config"):
        described = [*plain.peft_config.values(), trainer.processing_class]
    for part in described:
        if part is not None:
            part.save_pretrained(folder)


def leave_out_tied_weights(engine: Any) -> None:
    """Frozen weights stay out of DeepSpeed's checkpoints of adapters under each of their names.

    deepspeed 0.19.8 leaves out the first name of a tied weight only, so the output head, the largest tensor of all,
    was saved with the adapters (ZeRO-1 and ZeRO-2).
    """
    frozen = [name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    whole = engine.module_state_dict

    def module_state_dict(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        state = whole(*args, exclude_frozen_parameters=exclude_frozen_parameters, **kwargs)
        for name in frozen if exclude_frozen_parameters else []:
            state.pop(name, None)
        return state

    engine.module_state_dict = module_state_dict


def _name_best_checkpoint(trainer: Any, written: Path) -> None:
    """By its final name: the Trainer looked for it in the folder that it was given for this save."""
    best = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.best_global_step}"
    trainer.state.best_model_checkpoint = str(best)
    trainer.state.save_to_json(str(written / "trainer_state.json"))


def _all_entries(folder: Path, *, rank: int, world_size: int) -> list[dict[str, Any]]:
    """The manifest's lines for all files; each rank reads its share of the bytes."""
    paths = sorted(checkpoints.files_of(folder), key=lambda path: (-path.stat().st_size, str(path)))
    own = checkpoints.file_entries(folder, paths[rank::world_size])
    if not dist.is_initialized():
        return own
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own)
    return sorted((entry for entries in gathered for entry in entries), key=lambda entry: str(entry["path"]))


def manifest_facts(trainer: Any, attested: dict[str, Any], *, preset: str | None) -> Manifest:
    """What a reader must know before it loads anything: engine, ranks, sizes, batch, and the live model's logits."""
    training = trainer.args
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    return {
        "step": trainer.state.global_step,
        "preset": preset,
        **{name: attested[name] for name in ("engine", "sharding", "world_size", "compute_dtype")},
        **{name: attested[name] for name in ("num_params", "num_trainable_params")},
        "adapter": hasattr(plain, "peft_config"),
        "model_name_or_path": plain.config._name_or_path,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "seed": training.seed,
        "streaming_buffer_size": getattr(trainer.train_dataset, "buffer_size", 0),
        "fingerprint": live_answer(trainer, attested),
    }


def live_answer(trainer: Any, attested: dict[str, Any]) -> dict[str, Any] | None:
    """The fingerprint of the model as it is now; None where parameters lie on an NVMe disk or nothing was trained.

    Raises Diverged where it is no number, so that such weights never take the place of good ones on the disk.
    """
    if not attested or attested["offload_param"] == "nvme":
        return None
    answer = fingerprint(trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False))
    check_finite(answer["logits"], step=trainer.state.global_step)
    return answer | {"compute_dtype": attested["compute_dtype"]}


def check_finite(logits: list[float], *, step: int) -> None:
    """The update of a step can ruin the weights while its loss, which was computed before, is still a number."""
    bad = sum(not math.isfinite(logit) for logit in logits)
    if bad:
        raise Diverged(
            f"the weights after step {step} are lost, and not saved: of their {len(logits)} logits for fixed tokens"
            f" {bad} are NaN or infinite",
            hint="lower `--learning_rate`",
        )


def fingerprint(plain: Any) -> dict[str, Any]:
    """Logits of the live model for fixed tokens: the first 64 of the last position. Collective under a sharded model.

    No random number is drawn, so that training goes on as if nothing had been asked.
    """
    vocabulary = plain.config.get_text_config().vocab_size
    input_ids = [1 + 7919 * index % (vocabulary - 1) for index in range(FINGERPRINT_TOKENS)]
    was_training = plain.training
    plain.eval()
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([input_ids], device=_device(plain))).logits[0, -1, :FINGERPRINT_LOGITS]
    plain.train(was_training)
    return {"input_ids": input_ids, "logits": logits.float().tolist()}


def _device(plain: Any) -> torch.device:
    """Where the model computes; offloaded parameters lie elsewhere."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else plain.device


def resume_point(training: Any, *, verified: bool) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` means; None for a run from its first step.

    `verified`: the launcher has read every byte of a named one already. Raises ToolkitError for one that is damaged.
    """
    asked = training.resume_from_checkpoint
    if asked in (None, "", False) or str(asked).lower() in ("false", "none"):
        return None
    found = [_find(str(asked), Path(training.output_dir), verified) if training.process_index == 0 else None]
    if dist.is_initialized():  # one rank reads all the bytes; the others believe it
        dist.broadcast_object_list(found)
    checkpoint: Checkpoint | None = found[0]
    return checkpoint


def _find(asked: str, output_dir: Path, verified: bool) -> Checkpoint | None:
    if asked.lower() not in checkpoints.LATEST_WORDS:
        return checkpoints.read_checkpoint(Path(asked)) if verified else checkpoints.check_named(Path(asked))
    checkpoints.remove_unfinished(output_dir)
    found = checkpoints.latest_complete(output_dir)
    if found is None:
        print(f"resume: no complete checkpoint is in {output_dir}; training starts from step 0", flush=True)
    return found


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

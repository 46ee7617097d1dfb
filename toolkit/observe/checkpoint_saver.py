"""The Trainer's saves as complete-or-absent checkpoints: a manifest with checksums, and the live model's fingerprint.

The Trainer writes into `.saving-checkpoint-STEP`; every rank then hashes its share of the files, rank 0 writes the
manifest, and the folder is renamed. A save that is killed leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from toolkit.models.nf4 import as_in_training
from toolkit.observe.attest.readings import RankReading
from toolkit.observe.background_save import BackgroundSaver, SavedFolder, barrier
from toolkit.observe.compiler_events import uncompiled_forward
from toolkit.observe.failure_report import Diverged
from toolkit.observe.parts import ObserverParts
from toolkit.record.checkpoints import checkpoint_files, saving_folder
from toolkit.record.run_files import SaveRecord

FINGERPRINT_TOKENS = 16
FINGERPRINT_LOGITS = 64


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


def describe_checkpoint(trainer: Any, staging: Path, facts: dict[str, Any]) -> SavedFolder:
    """Write the small files that the Trainer leaves out, and return what completes the checkpoint. Collective.

    `staging` is where the Trainer wrote the checkpoint's folder; `facts` is the manifest without its files.
    """
    name = f"checkpoint-{trainer.state.global_step}"
    written = staging / name
    barrier()  # every rank has made the folder
    if trainer.args.process_index == 0:
        describe_shards(trainer, written)
        (written / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
    if trainer.state.best_global_step:
        # The Trainer looked for it in the temporary folder of this save. Every rank loads its part of a sharded one.
        best = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.best_global_step}"
        trainer.state.best_model_checkpoint = str(best)
        if trainer.args.process_index == 0:
            trainer.state.save_to_json(str(written / "trainer_state.json"))
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
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    with as_in_training(plain) as four_bit_matmul:
        input_ids, logits = fixed_token_logits(plain)
    check_finite(logits, step=trainer.state.global_step)
    how = {name: reading[name] for name in ("compute_dtype", "load_in_4bit")} | {"four_bit_matmul": four_bit_matmul}
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
    # where the model computes; offloaded parameters are elsewhere
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else plain.device
    with torch.no_grad(), uncompiled_forward():
        logits = plain(input_ids=torch.tensor([input_ids], device=device)).logits[0, -1, :FINGERPRINT_LOGITS]
    plain.train(was_training)
    return input_ids, logits.float().tolist()

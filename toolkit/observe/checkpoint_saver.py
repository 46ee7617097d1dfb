"""The Trainer's saves as complete-or-absent checkpoints: a manifest of all files, and the live model's fingerprint.

The Trainer writes into `.saving-checkpoint-STEP`; each node then puts its files on the disk, rank 0 writes the manifest
with their sizes, and the folder is renamed. A save that is killed leaves nothing that looks like a checkpoint.
Checksums follow while training goes on: a thread of rank 0 reads the files back.

With `--async_save` training stands still only while what is to be written is copied to host memory, and a thread does
the rest. The copy, torch's staging buffer, is allocated by the first save and used again by each later one, so a second
save first waits for the one before. The thread's collectives have a process group of their own: on the training group
they would mix with those of the steps.
"""

import atexit
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import modeling_utils
from transformers.trainer_utils import rotate_checkpoints

from toolkit.engines.live_engine import live_engine
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import SavedTensor, write_file
from toolkit.models.nf4 import as_in_training
from toolkit.observe.failure_report import Diverged
from toolkit.observe.observed_run import barrier, gather_from_ranks
from toolkit.observe.parts import ObserverParts
from toolkit.observe.verify.verification import Verification
from toolkit.record.checkpoints import add_checksums, checkpoint_files, commit_checkpoint, file_entries, saving_folder
from toolkit.record.run_files import SaveRecord

FINGERPRINT_TOKENS = 16
FINGERPRINT_LOGITS = 64


class CheckpointSaver:
    """Saves what one rank has of each checkpoint."""

    def __init__(
        self, trainer: Any, parts: ObserverParts, verification: Verification, *, in_background: bool = False
    ) -> None:
        self.trainer, self.parts, self.verification = trainer, parts, verification
        self.staging: Path | None = None
        """Where a checkpoint is being written; None while none is."""
        self.saves: list[SaveRecord] = []
        """Each save of this run, for run.json; rank 0's have their sizes."""
        timeout = timedelta(seconds=trainer.args.ddp_timeout)
        self.background = BackgroundSaver(trainer.model, timeout=timeout) if in_background else None
        self.hashing: threading.Thread | None = None
        """Adds the checksums of the last checkpoint."""

    def save(self, write: Callable[[], None], *, entered: float) -> None:
        """Save a checkpoint, or begin to: `write` is the Trainer's own save. Collective.

        Raises Diverged where the weights are lost, AttestationFailed where they differ between ranks: none is written.
        """
        waited = 0.0 if self.background is None else self.background.wait()
        self.verification.check_replicas(self.trainer.state.global_step)
        trainer, facts = self.trainer, self._manifest_facts()
        step = trainer.state.global_step
        record, began = SaveRecord(kind="checkpoint", step=step, waited_seconds=waited), time.monotonic()
        live_engine(trainer.model_wrapped).leave_out_tied_weights()
        self.staging = saving_folder(Path(trainer.args.output_dir), step)
        folder = self.staging / f"checkpoint-{step}"
        with contextlib.nullcontext() if self.background is None else self.background.deferred_writes():
            write()
        self.parts.save_states(folder)
        self.staging = None
        self._describe(folder)
        best = trainer.state.best_model_checkpoint

        def complete(group: Any, writing_began: float) -> None:
            size = self._complete(folder, facts, best, group)
            if trainer.args.process_index == 0:
                record.complete(size, began=began, writing_began=writing_began)
                self._start_hashing(Path(trainer.args.output_dir) / folder.name)

        if self.background is None:
            complete(None, began)
        else:
            self.background.start(complete)
        self.saves.append(record)
        record.stall_seconds += time.monotonic() - entered

    def _describe(self, folder: Path) -> None:
        """Write the small files that the Trainer leaves out. Collective."""
        trainer, writes = self.trainer, self.trainer.args.process_index == 0
        barrier()  # every rank has made the folder
        if writes and trainer.is_fsdp_enabled:  # an export needs them, and every other engine saves them
            plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
            configs = (getattr(plain, "config", None), getattr(plain, "generation_config", None))
            if configs[0] is not None and not hasattr(plain, "peft_config"):  # as `save_pretrained` of the model does
                configs[0].architectures = [type(plain).__name__.removeprefix("FSDP")]
            own = getattr(plain, "peft_config", {}).values() or configs
            for part in (*own, trainer.processing_class):
                if part is not None:
                    part.save_pretrained(folder)
        if writes:
            (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
        if trainer.state.best_global_step:
            # the Trainer looked for it in the temporary folder; every rank loads its part of a sharded one
            best = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.best_global_step}"
            trainer.state.best_model_checkpoint = str(best)
            if writes:
                trainer.state.save_to_json(str(folder / "trainer_state.json"))

    def _complete(self, folder: Path, facts: dict[str, Any], best_checkpoint: str | None, group: Any) -> int:
        """Make it `checkpoint-STEP`, with every file on the disk, and return its bytes. Collective."""
        args = self.trainer.args
        checkpoint = Path(args.output_dir) / folder.name
        barrier(group)
        # A network file system may show a node the files of another one late, or in an earlier size.
        paths = checkpoint_files(folder) if args.local_process_index == 0 else []
        listed = itertools.chain(*gather_from_ranks(file_entries(folder, paths), group=group))
        largest = {entry["path"]: entry for entry in sorted(listed, key=lambda entry: int(entry["bytes"]))}
        files = sorted(largest.values(), key=lambda entry: str(entry["path"]))
        if args.process_index == 0:
            if self.hashing is not None:  # of a checkpoint that may be removed now
                self.hashing.join()
            commit_checkpoint(folder, checkpoint, {**facts, "files": files})
            folder.parent.rmdir()
            limit = args.save_total_limit
            rotate_checkpoints(args.output_dir, save_total_limit=limit, best_model_checkpoint=best_checkpoint)
        barrier(group)
        return sum(entry["bytes"] for entry in files)

    def _start_hashing(self, checkpoint: Path) -> None:
        def add() -> None:
            with contextlib.suppress(OSError, ToolkitError):  # somebody has removed it
                add_checksums(checkpoint)

        self.hashing = threading.Thread(target=add, name="checkpoint-checksums", daemon=True)
        self.hashing.start()
        atexit.register(self.hashing.join)  # a run that completes leaves no checkpoint without

    def finish(self) -> None:
        """Wait for a save in the background: the best checkpoint may be loaded next, and older ones removed."""
        waited = 0.0 if self.background is None else self.background.wait()
        if self.saves:
            self.saves[-1].stall_seconds += waited

    def note_save(self, kind: str, files: Iterable[Path], began: float) -> None:
        record = SaveRecord(kind=kind, step=self.trainer.state.global_step, stall_seconds=time.monotonic() - began)
        record.complete(sum(path.stat().st_size for path in files), began=began, writing_began=began)
        self.saves.append(record)

    def _manifest_facts(self) -> dict[str, Any]:
        """Return what a reader must know before it loads the checkpoint: engine, ranks, sizes, batch, fingerprint."""
        reading = self.verification.reading
        assert reading is not None
        trainer, training, preset = self.trainer, self.trainer.args, self.parts.expected.preset
        batch = training.per_device_train_batch_size * training.gradient_accumulation_steps
        plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        read = ("engine", "sharding", "world_size", "compute_dtype", "layout", "num_params", "num_trainable_params")
        return {
            "step": trainer.state.global_step,
            "preset": None if preset is None else preset.name,
            **{name: getattr(reading, name) for name in read},
            "pipeline_chunks": None,
            "data_parallel_size": reading.world_size,
            "sharded_at_load": trainer.is_distributed_loading_by_transformers,
            "adapter": hasattr(plain, "peft_config"),
            "model_name_or_path": getattr(getattr(plain, "config", None), "_name_or_path", None),
            "per_device_train_batch_size": training.per_device_train_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "global_batch_size": batch * training.world_size,
            "optim": str(getattr(training.optim, "value", training.optim)),
            "seed": training.seed,
            "streaming_buffer_size": 0,
            "dataset_weights": [],
            **self.parts.manifest(),
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> dict[str, Any] | None:
        """Return fixed tokens, the live model's first logits at the last one, and how it computes. Collective.

        None where parameters are on an NVMe disk or nothing was trained. Raises Diverged where a logit is not finite:
        the update of a step can ruin the weights while its loss, computed before it, is still finite.
        """
        reading, trainer = self.verification.reading, self.trainer
        if reading is None or reading.offload_param == "nvme":
            return None
        plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
        # The head of a pipeline is in its last stage, and all ranks have the logits.
        has_head = hasattr(plain, "num_params_of_all_stages") or (
            getattr(plain, "get_output_embeddings", lambda: None)() is not None
        )
        if not has_head or getattr(plain.config, "is_encoder_decoder", False):
            return None  # no causal language model
        vocabulary, was_training = plain.config.get_text_config().vocab_size, plain.training
        input_ids = [1 + 7919 * index % (vocabulary - 1) for index in range(FINGERPRINT_TOKENS)]
        # where the model computes; offloaded parameters are elsewhere
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else plain.device
        plain.eval()
        # No random number is drawn, so that training continues as it would without; the shapes are not a batch's.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), as_in_training(plain) as four_bit_matmul:
            found = plain(input_ids=torch.tensor([input_ids], device=device)).logits[0, -1, :FINGERPRINT_LOGITS]
        plain.train(was_training)
        logits = found.float().tolist()
        if bad := sum(not math.isfinite(logit) for logit in logits):
            raise Diverged(
                f"the weights after step {trainer.state.global_step} are lost, and not saved: of their {len(logits)}"
                f" logits for fixed tokens {bad} are NaN or infinite",
                hint="lower `--learning_rate`",
            )
        return {
            "input_ids": input_ids,
            "logits": logits,
            "compute_dtype": reading.compute_dtype,
            "load_in_4bit": reading.load_in_4bit,
            "four_bit_matmul": four_bit_matmul,
        }


class BackgroundSaver:
    """Writes one rank's checkpoints in a thread, one at a time. Made by every rank at the same place. Collective."""

    def __init__(self, model: torch.nn.Module, *, timeout: timedelta) -> None:
        """`timeout` is how long a rank waits for the others to finish writing."""
        self.model = model
        self.group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(  # shared memory is for another process
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self.stager = DefaultStager(options)
        self.writes: list[Callable[[Any], None]] = []
        """Each writes one file or folder, given the process group of the thread."""
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def deferred_writes(self) -> Iterator[None]:
        """Copy what the libraries would write to distributed checkpoints and safetensors files, and write it later.

        They are given the same values as without; only the two functions that write are replaced meanwhile. What the
        ranks hold in full is not gathered but passed on, and copied, since the model trains on.
        """
        held = (getattr(tensor, "_local_tensor", tensor) for tensor in self.model.state_dict().values())
        live = {tensor.untyped_storage().data_ptr() for tensor in held}

        def save(state_dict: dict[str, Any], **how: Any) -> None:
            staged = self.stager.stage(state_dict)
            self.writes.append(lambda group: dcp_save(staged, process_group=group, **how))

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in live else tensor.detach()

        def save_file(tensors: dict[str, torch.Tensor], filename: str, **_: Any) -> None:
            saved = [
                SavedTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=copied(tensor).cpu)
                for name, tensor in tensors.items()
            ]
            self.writes.append(lambda _group: write_file(Path(filename), saved))

        dcp_save, save_at_once = dcp.save, modeling_utils.safe_save_file
        dcp.save, modeling_utils.safe_save_file = save, save_file
        try:
            yield
        finally:
            dcp.save, modeling_utils.safe_save_file = dcp_save, save_at_once

    def start(self, complete: Callable[[Any, float], None]) -> None:
        """Begin to write what was deferred, then call `complete` with the thread's group and when writing began."""
        assert self.thread is None
        writes, self.writes = self.writes, []

        def write_all() -> None:
            began = time.monotonic()
            try:
                for write in writes:
                    write(self.group)
                complete(self.group, began)
            except BaseException as error:  # torch's `CheckpointException` is no Exception
                self.error = error

        self.thread = threading.Thread(target=write_all, name="checkpoint-writer", daemon=True)
        self.thread.start()

    def wait(self) -> float:
        """Wait until no checkpoint is being written, and return the seconds that took. Raises what the thread did."""
        began = time.monotonic()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.raise_if_failed()
        return time.monotonic() - began

    def raise_if_failed(self) -> None:
        """Raise what went wrong in the thread, such as a full disk; training must not continue unsaved."""
        if self.error is not None:
            raise self.error

    def finish_after_failure(self) -> None:
        """Let the checkpoint be completed that is being written while training failed: it is good, and the newest."""
        if self.thread is not None and self.thread.is_alive():
            print("training failed while a checkpoint was being written: completing it first", flush=True)
            self.thread.join()

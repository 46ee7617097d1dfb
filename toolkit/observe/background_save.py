"""Write a checkpoint in a thread while training continues (`--async_save`).

    with background.deferred_writes():      # the Trainer saves as ever: its large writes are copied to host memory
        super()._save_checkpoint(...)
    background.start(saved_folder, record)  # a thread writes the copies, checks them and renames the folder
    background.wait()                       # before the next save, and at the end of training

Training stands still for the copy alone. The copy, torch's staging buffer, is allocated by the first save and used
again by each later one, so a second save first waits for the one before. The thread's collectives have a process group
of their own: on the training group they would mix with those of the steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import modeling_utils
from transformers.trainer_utils import rotate_checkpoints

from toolkit.files.model_weights import SavedTensor, write_file
from toolkit.record.checkpoints import checkpoint_files, commit_checkpoint, file_entries
from toolkit.record.run_files import SaveRecord

DeferredWrite = Callable[[Any], None]
"""Writes one file or folder; its argument is the process group of the background thread."""


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
        barrier(group)
        entries = _all_entries(self.folder, rank=self.rank, world_size=self.world_size, group=group)
        if self.rank == 0:
            commit_checkpoint(self.folder, self.checkpoint, {**self.facts, "files": entries})
            self.folder.parent.rmdir()
            rotate_checkpoints(
                output_dir=str(self.checkpoint.parent),
                save_total_limit=self.save_total_limit,
                best_model_checkpoint=self.best_checkpoint,
            )
        barrier(group)


def _all_entries(folder: Path, *, rank: int, world_size: int, group: Any) -> list[dict[str, Any]]:
    """Return the manifest's entries for all files; each rank reads its share of the bytes."""
    paths = sorted(checkpoint_files(folder), key=lambda path: (-path.stat().st_size, str(path)))
    own = file_entries(folder, paths[rank::world_size])
    if not dist.is_initialized():
        return own
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own, group=group)
    return sorted((entry for entries in gathered for entry in entries), key=lambda entry: str(entry["path"]))


def barrier(group: Any = None) -> None:
    """Wait for all ranks of the group."""
    if dist.is_initialized():
        dist.barrier(group)


class BackgroundSaver:
    """Writes one rank's checkpoints in a thread, one at a time. Made by every rank at the same place. Collective."""

    def __init__(self, model: torch.nn.Module, *, timeout: timedelta) -> None:
        """`timeout` is how long a rank waits for the others to finish writing."""
        self.model = model
        self.group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        on_gpu = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,  # the thread has the same memory
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self.writes: list[DeferredWrite] = []
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    @contextmanager
    def deferred_writes(self) -> Iterator[None]:
        """Copy what the libraries would write to distributed checkpoints and safetensors files, and write it later.

        They are given the same values as without; only the two functions that write are replaced meanwhile.
        """
        live = {tensor.untyped_storage().data_ptr() for tensor in map(_local, self.model.state_dict().values())}

        def save(state_dict: dict[str, Any], **how: Any) -> None:
            staged = self.stager.stage(state_dict)
            self.writes.append(lambda group: _write_distributed(staged, group, **how))

        def save_file(tensors: dict[str, torch.Tensor], filename: str, **_: Any) -> None:
            copies = {name: _own_copy(tensor, live) for name, tensor in tensors.items()}
            self.writes.append(lambda _group: _write_safetensors(Path(filename), copies))

        originals = dcp.save, modeling_utils.safe_save_file
        dcp.save, modeling_utils.safe_save_file = save, save_file
        try:
            yield
        finally:
            dcp.save, modeling_utils.safe_save_file = originals

    def start(self, saved: SavedFolder, record: SaveRecord, *, began: float) -> None:
        """Begin to write what was deferred, and to complete the checkpoint."""
        assert self.thread is None
        writes, self.writes = self.writes, []
        self.thread = threading.Thread(
            target=self._write, args=(writes, saved, record, began), name="checkpoint-writer", daemon=True
        )
        self.thread.start()

    def _write(self, writes: list[DeferredWrite], saved: SavedFolder, record: SaveRecord, began: float) -> None:
        writing_began = time.monotonic()
        try:
            for write in writes:
                write(self.group)
            saved.complete(self.group)
            if saved.rank == 0:
                record.complete(checkpoint_files(saved.checkpoint), began=began, writing_began=writing_began)
        except BaseException as error:  # torch's `CheckpointException` is no Exception
            self.error = error

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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _own_copy(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    """Return the tensor, copied if the model trains on: what ranks hold in full is not gathered, but passed on."""
    return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in live else tensor.detach()


def _write_distributed(state: Any, group: Any, *, checkpoint_id: Any = None, **how: Any) -> None:
    dcp.save(state, checkpoint_id=checkpoint_id, process_group=group, **how)


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_file(
        path,
        [
            SavedTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=tensor.cpu)
            for name, tensor in tensors.items()
        ],
    )

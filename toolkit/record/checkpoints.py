"""Checkpoints of a run: their manifest, whether they are complete, and which is the newest.

A checkpoint is `OUTPUT_DIR/checkpoint-STEP/` with `manifest.json`, which lists every other file with its size and, once
it has been read back, its SHA-256. It is written as `.saving-checkpoint-STEP`, the manifest last, and then renamed: an
interrupted save leaves only a `.saving-` folder, which nothing reads. One of the same step is
`.replaced-checkpoint-STEP` meanwhile.
"""

import contextlib
import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from toolkit.errors import ToolkitError
from toolkit.files.documents import Limits, open_file, read_json_object, validate
from toolkit.hardware.disks import free_bytes
from toolkit.parallel.layout import DIMENSIONS
from toolkit.record.columns import Count, PositiveCount
from toolkit.record.folder import RunFolder, content_sha256, write_json
from toolkit.units import gib

if TYPE_CHECKING:
    from io import BufferedReader

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"  # outputs of the live model for fixed tokens, with which an export is verified
# Where transformers' `enable_jit_checkpoint` begins to write; its own resume does not look for it (5.23).
INCOMPLETE_MARK = "checkpoint-is-incomplete.txt"
SAVING_PREFIX, REPLACED_PREFIX = ".saving-", ".replaced-"
# Values of `--resume_from_checkpoint` for the newest complete checkpoint; the Trainer takes a bare flag or `true`.
LATEST_WORDS = ("latest", "last", "true")
AT_LOAD_OPTIMIZER = "optimizer_dcp"  # folder of the optimizer states of a model that was sharded at load
STAGE_OPTIMIZER = "optimizer_stage{rank}.pt"  # optimizer states of the stages on one rank of a pipeline
_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)
# A DeepSpeed checkpoint of 10,000 parameters for any number of ranks has 40,000 files.
_LIMITS = Limits(values=1_000_000, depth=16)
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[Count, Field(lt=2**31)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class FileEntry(_Record):
    path: str  # relative to the checkpoint, and inside of it
    bytes: Count
    sha256: str | None = None  # None until it has been read back, after the save

    @field_validator("path")
    @classmethod
    def _is_inside(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path or max(map(len, parts)) > 255:
            raise ValueError("the name of a file inside the checkpoint")
        return path


class Fingerprint(_Record):
    """The live model's logits for fixed tokens."""

    input_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=4096)]
    logits: Annotated[tuple[Finite, ...], Field(min_length=1, max_length=4096)]
    compute_dtype: str | None = None
    load_in_4bit: bool = False  # True if the base model of an adapter was in 4 bits
    four_bit_matmul: str | None = None  # how 4-bit layers computed: `dequantized` or `packed_bf16`; None without them


class ConvertedFrom(_Record):
    """The checkpoint that a converted one was made from."""

    path: str
    preset: str | None = None
    engine: str | None = None
    world_size: PositiveCount | None = None


class Manifest(_Record):
    """The content of `manifest.json`; keys that are not known here are kept."""

    schema_version: Count = 1
    step: Count  # completed optimizer steps
    preset: str | None = None
    engine: str | None = None
    sharding: str | None = None
    world_size: PositiveCount | None = None
    layout: dict[str, PositiveCount] | None = None  # degrees of parallelism; None for data parallelism alone
    pipeline_chunks: PositiveCount | None = None  # stages on each rank of a pipeline; None without one
    data_parallel_size: PositiveCount | None = None
    sharded_at_load: bool = False
    compute_dtype: str | None = None
    num_params: Count | None = None
    num_trainable_params: Count | None = None
    adapter: bool | None = None
    model_name_or_path: str | None = None
    per_device_train_batch_size: PositiveCount | None = None
    gradient_accumulation_steps: PositiveCount | None = None
    global_batch_size: PositiveCount | None = None
    optim: str | None = None
    seed: int | None = None
    streaming_buffer_size: Count | None = None
    dataset_weights: tuple[Finite, ...] | None = None
    fingerprint: Fingerprint | None = None
    universal: bool = False  # in DeepSpeed's layout for any number of ranks
    converted_from: ConvertedFrom | None = None
    files: tuple[FileEntry, ...]
    sha256: str | None = None

    @field_validator("layout")
    @classmethod
    def _has_known_dimensions(cls, layout: dict[str, int] | None) -> dict[str, int] | None:
        if not set(layout or ()) <= set(DIMENSIONS):
            raise ValueError(f"degrees of {', '.join(DIMENSIONS)}")
        return layout and {name: layout.get(name, 1) for name in DIMENSIONS}  # an older one knows fewer

    @property
    def sequences_per_step(self) -> int | None:
        """Sequences of an optimizer step over all ranks; None where they are not recorded."""
        ranks = self.data_parallel_size or self.world_size
        sizes = (self.per_device_train_batch_size, self.gradient_accumulation_steps, ranks)
        return self.global_batch_size or math.prod(size or 0 for size in sizes) or None


def read_fingerprint(path: Path) -> Fingerprint:
    """Return what was recorded beside a model. Raises ToolkitError."""
    return validate(TypeAdapter(Fingerprint), read_json_object(path, limits=_LIMITS), str(path))


def read_step(trainer_state: Path) -> int:
    """Return the step in the Trainer's own state. Raises ToolkitError."""
    state = read_json_object(trainer_state, allow_nan=True)
    return validate(TypeAdapter(Count), state.get("global_step"), f"{trainer_state}: global_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint folder and its manifest."""

    path: Path
    step: int  # completed optimizer steps
    manifest: Manifest | None  # None where it is missing or cannot be read
    unreadable: str | None = None  # why the manifest cannot be read

    @property
    def bytes(self) -> int | None:
        return None if self.manifest is None else sum(entry.bytes for entry in self.manifest.files)

    def problem(self, deep: bool = False) -> str | None:
        """Return what is missing or damaged, or None for a complete checkpoint. `deep` verifies the checksums too."""
        if not self.path.is_dir():
            return "it does not exist"
        if os.path.lexists(self.path / INCOMPLETE_MARK):
            return f"{INCOMPLETE_MARK} is in it: a just-in-time save of transformers did not finish"
        if self.manifest is None:
            return self.unreadable or f"{MANIFEST} is missing: it was not written completely"
        for entry in self.manifest.files:
            path = self.path / entry.path
            try:
                if not path.is_file():
                    return f"{entry.path} is {'no file' if path.exists() else 'missing'}"
                if (size := path.stat().st_size) != entry.bytes:
                    return f"{entry.path} has {size} bytes, expected {entry.bytes}"
                if deep and entry.sha256 is not None and file_sha256(path) != entry.sha256:
                    return f"{entry.path} is damaged (checksum)"
            except OSError as error:
                return f"{path}: {error.strerror}"
        return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder as a checkpoint; `problem` says if it is one."""
    manifest, unreadable, file = None, None, path / MANIFEST
    if os.path.lexists(file):
        try:
            content = read_json_object(file, limits=_LIMITS)
            manifest = validate(TypeAdapter(Manifest), content, str(file))
            if manifest.sha256 not in (None, content_sha256(content)):
                manifest, unreadable = None, f"{MANIFEST} is damaged (checksum)"
        except ToolkitError as error:
            unreadable = error.message.removeprefix(f"{path}{os.sep}")
    named = _NAME.fullmatch(path.name)
    step = manifest.step if manifest is not None else int(named[1]) if named else 0
    return Checkpoint(path=path, step=step, manifest=manifest, unreadable=unreadable)


def list_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """Return all `checkpoint-STEP` folders, complete or not, newest first; unfinished saves are left out."""
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [read_checkpoint(path) for _, path in sorted(found, reverse=True) if path.is_dir()]


def latest_complete(output_dir: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, by sizes; skipped ones are printed. Nothing may be saving."""
    _restore_replaced(output_dir)
    for checkpoint in list_checkpoints(output_dir):
        if (problem := checkpoint.problem()) is None:
            return checkpoint
        print(f"skipped {checkpoint.path}: {problem}", file=sys.stderr, flush=True)
    return None


def read_complete_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises ToolkitError, naming the one before, if it is not complete."""
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem()
    if problem is None:
        return checkpoint
    older = [other for other in list_checkpoints(path.absolute().parent) if other.step < checkpoint.step]
    before = next((other for other in older if other.problem() is None), None)
    hint = "there is no earlier complete one" if before is None else f"the previous one is complete: `{before.path}`"
    raise ToolkitError(f"checkpoint {path} cannot be used: {problem}", hint=hint)


def saving_folder(output_dir: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return output_dir / f"{SAVING_PREFIX}checkpoint-{step}"


def remove_unfinished(output_dir: Path) -> list[Path]:
    """Remove what interrupted saves have left, and return it; never the only checkpoint of a step."""
    _restore_replaced(output_dir)
    prefixes = (SAVING_PREFIX, REPLACED_PREFIX)
    leftovers = sorted(path for prefix in prefixes for path in output_dir.glob(f"{prefix}checkpoint-*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


def _restore_replaced(output_dir: Path) -> None:
    """Give back their names to checkpoints whose replacement was killed before it had them."""
    for path in output_dir.glob(f"{REPLACED_PREFIX}checkpoint-*"):
        with contextlib.suppress(OSError):  # the new one is there, or another rank was faster
            path.rename(path.with_name(path.name.removeprefix(REPLACED_PREFIX)))


def commit_checkpoint(folder: Path, checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Turn a folder on disk into a checkpoint: write `Manifest`'s keys, move one of that name away, rename."""
    _write_manifest(folder, {"schema_version": SCHEMA_VERSION, **manifest})
    replaced = checkpoint.with_name(f"{REPLACED_PREFIX}{checkpoint.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if checkpoint.exists():
        checkpoint.rename(replaced)
    folder.rename(checkpoint)
    sync(checkpoint.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def add_checksums(checkpoint: Path) -> None:
    """Add SHA-256 to a manifest, by reading back. Raises OSError or ToolkitError for one that is removed."""
    manifest = read_json_object(checkpoint / MANIFEST, limits=_LIMITS)
    for entry in manifest["files"]:
        with contextlib.suppress(ToolkitError):  # on another node's disk
            entry["sha256"] = file_sha256(checkpoint / entry["path"])
    _write_manifest(checkpoint, manifest)


def _write_manifest(folder: Path, content: dict[str, Any]) -> None:
    body, temporary = {key: value for key, value in content.items() if key != "sha256"}, folder / f".{MANIFEST}"
    if folder.is_dir():
        write_json(temporary, body | {"sha256": content_sha256(body)})
    sync(temporary)
    temporary.replace(folder / MANIFEST)
    sync(folder)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return every file of a checkpoint's folder except the manifest, in name order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def file_entries(folder: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the manifest's entries for these files, after writing them to disk (fsync)."""
    entries = []
    for path in paths:
        sync(path)
        entries.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
    return entries


def file_sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's names, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_latest_checkpoint(output_dir: Path) -> str:
    """Return a sentence about the newest complete checkpoint."""
    latest = next((found for found in list_checkpoints(output_dir) if found.problem() is None), None)
    return "there is no complete checkpoint" if latest is None else f"the newest complete one is {latest.path.name}"


def resume_words(folder: RunFolder) -> str:
    """Return how the run in a folder resumes; of a script of the user's own, by the command that run.json has."""
    run = folder.read_run() or {}
    if command := run.get("resume_command"):
        return f"`{command}` resumes"
    option = "--resume` after `toolkit.observe" if "script" in run else "--resume_from_checkpoint latest"
    return f"the same command with `{option}` resumes"


def resume_hint(folder: RunFolder, *, resumed_step: int = 0) -> str:
    """Return how a run that failed resumes, if it can; `resumed_step` is that of another run's checkpoint."""
    output_dir = folder.checkpoints
    if not any(found.problem() is None for found in list_checkpoints(output_dir)):
        if resumed_step:
            return f"the same command resumes from the checkpoint of step {resumed_step} that it names"
        return "there is no complete checkpoint: a restart begins at step 0"
    return f"{resume_words(folder)}: {describe_latest_checkpoint(output_dir)}"


def describe_full_disk(output_dir: Path, who: str, phase: str, step: int) -> tuple[str, str]:
    """Remove incomplete checkpoints, which nothing reads, and return message and hint for a full disk."""
    free = free_bytes(output_dir)
    remove_unfinished(output_dir)
    complete = [found for found in list_checkpoints(output_dir) if found.problem() is None]
    needed = f", a checkpoint needs {gib(complete[0].bytes)}" if complete and complete[0].bytes else ""
    space = f"{gib(free)} free{needed}; {describe_latest_checkpoint(output_dir)}"
    message = f"{who} found the disk of {output_dir} full in phase {phase}, step {step}: {space}"
    how = resume_words(RunFolder(output_dir))
    return message, f"free some space or keep fewer checkpoints (`--save_total_limit 1`); then {how}"

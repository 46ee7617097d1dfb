"""Checkpoints of a run: their manifest, whether they are complete, and which is the newest.

A checkpoint is `OUTPUT_DIR/checkpoint-STEP/` with `manifest.json`, which lists every other file with its size and
SHA-256. It is written as `.saving-checkpoint-STEP`, the manifest last, and then renamed: an interrupted save leaves
only a `.saving-` folder, which nothing reads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files.reading import open_file
from toolkit.parallel.layout import ParallelLayout
from toolkit.presets.optimizers import DEFAULT_OPTIMIZER, same_states
from toolkit.run.folder import write_json
from toolkit.run.manifest_file import FileEntry, Manifest, manifest_sha256, read_manifest

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"  # outputs of the live model for fixed tokens, with which an export is verified
SAVING_PREFIX = ".saving-"
CHUNK_BYTES = 2**20
# Values of `--resume_from_checkpoint` for the newest complete checkpoint; the Trainer takes a bare flag or `true`.
LATEST_WORDS = ("latest", "last", "true")
AT_LOAD_OPTIMIZER = "optimizer_dcp"
"""Folder of the optimizer states of a model that was sharded at load."""
_NAME = re.compile(r"checkpoint-(\d{1,15})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint folder and its manifest."""

    path: Path
    step: int
    """Completed optimizer steps."""
    manifest: Manifest | None
    """None where it is missing or cannot be read."""
    unreadable: str | None = None
    """Why the manifest cannot be read."""

    @property
    def bytes(self) -> int | None:
        """Size of all files in the manifest; None without one."""
        return None if self.manifest is None else sum(entry.bytes for entry in self.manifest.files)

    def problem(self, deep: bool = False) -> str | None:
        """Return what is missing or damaged, or None for a complete checkpoint. `deep` verifies every checksum."""
        if not self.path.is_dir():
            return "it does not exist"
        if self.manifest is None:
            return self.unreadable or f"{MANIFEST} is missing: it was not written completely"
        for entry in self.manifest.files:
            found = file_problem(self.path, entry, deep=deep)
            if found is not None:
                return found
        return None


def file_problem(folder: Path, entry: FileEntry, *, deep: bool) -> str | None:
    """Return what is wrong with one file of a manifest, or None."""
    path = folder / entry.path
    try:
        if not path.is_file():
            return f"{entry.path} is {'no file' if path.exists() else 'missing'}"
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{entry.path} has {size} bytes, expected {entry.bytes}"
        if deep and file_sha256(path) != entry.sha256:
            return f"{entry.path} is damaged (checksum)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder as a checkpoint; `problem` says if it is one."""
    manifest, unreadable = None, None
    if os.path.lexists(path / MANIFEST):
        try:
            manifest, _ = read_manifest(path / MANIFEST)
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


def latest_complete(
    output_dir: Path, deep: bool = True, on_message: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """Return the newest complete checkpoint; each one that is skipped is reported, by default on stderr."""
    for checkpoint in list_checkpoints(output_dir):
        problem = checkpoint.problem(deep=deep)
        if problem is None:
            return checkpoint
        (on_message or _to_stderr)(f"skipped {checkpoint.path}: {problem}")
    return None


def read_complete_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises ToolkitError, naming the one before, if it is not complete."""
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem(deep=True)
    if problem is None:
        return checkpoint
    older = [other for other in list_checkpoints(path.absolute().parent) if other.step < checkpoint.step]
    before = next((other for other in older if other.problem(deep=True) is None), None)
    raise ToolkitError(
        f"checkpoint {path} cannot be used: {problem}",
        hint="there is no earlier complete one" if before is None else f"the previous one is complete: `{before.path}`",
    )


def check_same_layout(
    checkpoint: Checkpoint,
    *,
    engine: str,
    sharding: str,
    world_size: int,
    layout: ParallelLayout | None = None,
    sharded_at_load: bool = False,
) -> None:
    """Raise ToolkitError for a checkpoint of another engine, sharding, world size or layout: its shards do not fit.

    One of a model that was sharded at load fits every other such layout.
    """
    found = checkpoint.manifest
    written: dict[str, Any] = {name: getattr(found, name, None) for name in ("engine", "sharding", "world_size")}
    expected: dict[str, Any] = {"engine": engine, "sharding": sharding, "world_size": world_size}
    at_load = found is not None and found.sharded_at_load
    if at_load and sharded_at_load:
        return
    if at_load or sharded_at_load:
        names = {True: "sharded at load", False: "sharded by its engine"}
        written["model"], expected["model"] = names[at_load], names[sharded_at_load]
    degrees = None if layout is None else layout.degrees()
    if degrees != getattr(found, "layout", None):
        written["layout"], expected["layout"] = _degrees(getattr(found, "layout", None)), _degrees(degrees)
    if "ddp" in (engine, written["engine"]) and world_size == 1 and written["engine"] in ("none", "ddp"):
        expected["engine"] = written["engine"]
    differing = [f"{name} {written[name]}, not {value}" for name, value in expected.items() if written[name] != value]
    if differing:
        raise ToolkitError(
            f"{checkpoint.path} was written with {'; '.join(differing)}: its shards do not fit this run",
            hint=f"resume with `--preset {getattr(found, 'preset', None)}` and"
            f" `--num-processes {written['world_size']}`; or convert it: `toolkit checkpoint convert`",
        )


def _degrees(degrees: Mapping[str, int] | None) -> str:
    return "data parallelism" if degrees is None else str(ParallelLayout(**degrees))


def check_resume_settings(
    checkpoint: Checkpoint,
    *,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int,
    seed: int,
    max_steps: int,
    optim: str = DEFAULT_OPTIMIZER,
    streaming_buffer_size: int = 0,
    dataset_weights: Sequence[float] = (),
    data_parallel_size: int | None = None,
) -> None:
    """Raise ToolkitError for a job that would not resume with the same data or optimizer, or has no steps left.

    `max_steps` of 0 or less means that the run is counted in epochs; `streaming_buffer_size` 0 means not streamed.
    Where another number of groups trains on different rows, the rows of all groups together must be as many.
    """
    divided = getattr(checkpoint.manifest, "data_parallel_size", None)
    if divided is not None and data_parallel_size is not None and divided != data_parallel_size:
        rows = checkpoint.manifest.per_device_train_batch_size * divided  # type: ignore[union-attr]
        if rows != per_device_train_batch_size * data_parallel_size:
            raise ToolkitError(
                f"{checkpoint.path} was trained on {rows} rows per accumulation step, now it would be"
                f" {per_device_train_batch_size * data_parallel_size}: the data would not resume where they stopped",
                hint=f"`--per_device_train_batch_size {max(1, rows // data_parallel_size)}`",
            )
        per_device_train_batch_size = checkpoint.manifest.per_device_train_batch_size  # type: ignore[union-attr, assignment]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "seed": seed,
        "streaming_buffer_size": streaming_buffer_size,
        "dataset_weights": list(dataset_weights),
    }
    for name, now in settings.items():
        then = getattr(checkpoint.manifest, name, None)
        then = list(then) if isinstance(then, tuple) else then
        if then not in (None, now):
            raise ToolkitError(
                f"{checkpoint.path} was trained with --{name} {_words(then)}, now it is {_words(now)}: the data would"
                " not resume where they stopped",
                hint=_same_setting(name, then),
            )
    saved = None if checkpoint.manifest is None else checkpoint.manifest.optim
    if saved is not None and not same_states(saved, optim):
        raise ToolkitError(
            f"{checkpoint.path} has the states of --optim {saved}, with which --optim {optim} cannot continue",
            hint=f"`--optim {saved}`",
        )
    if 0 < max_steps <= checkpoint.step:
        raise ToolkitError(
            f"{checkpoint.path} has {checkpoint.step} steps already, --max_steps is {max_steps}",
            hint=f"`--max_steps {2 * checkpoint.step}`, or another number above {checkpoint.step}, continues",
        )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _same_setting(name: str, then: Any) -> str:
    if name == "streaming_buffer_size":
        return _same_stream(int(then))
    return f"leave `--{name}` out" if then == [] else f"`--{name} {_words(then)}`"


def _same_stream(buffer_size: int) -> str:
    return f"`--streaming true --streaming_buffer_size {buffer_size}`" if buffer_size else "leave `--streaming` out"


def saving_folder(output_dir: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return output_dir / f"{SAVING_PREFIX}checkpoint-{step}"


def remove_unfinished(output_dir: Path) -> list[Path]:
    """Remove what interrupted saves have left, and return it; never a checkpoint."""
    leftovers = sorted(output_dir.glob(f"{SAVING_PREFIX}checkpoint-*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


def commit_checkpoint(folder: Path, checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Turn a folder whose files are all on disk into a checkpoint: write the manifest, then rename the folder.

    `manifest` has the keys of `Manifest`.

    A checkpoint of the same name is moved away first, so that the two are never mixed.
    """
    body = {"schema_version": SCHEMA_VERSION, **manifest}
    write_json(folder / MANIFEST, body | {"sha256": manifest_sha256(body)})
    sync(folder / MANIFEST)
    sync(folder)
    replaced = checkpoint.with_name(f"{SAVING_PREFIX}{checkpoint.name}-replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if checkpoint.exists():
        checkpoint.rename(replaced)
    folder.rename(checkpoint)
    sync(checkpoint.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return every file of a checkpoint's folder except the manifest, in name order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def file_entries(folder: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the manifest's entries for these files, after writing them to disk (fsync)."""
    entries = []
    for path in paths:
        sync(path)
        name = path.relative_to(folder).as_posix()
        entries.append({"path": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
    return entries


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's names, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

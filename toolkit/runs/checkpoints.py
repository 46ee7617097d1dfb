"""Checkpoints of a run: complete, or not there. What is in one, whether it is whole, and which is the newest.

>>> latest_complete(Path("out")).step
8

A checkpoint is `OUTPUT_DIR/checkpoint-STEP/` with `manifest.json`, which names every other file with its size and
SHA-256. It is written as `.saving-checkpoint-STEP`, the manifest last, and then renamed: whatever ended a save
leaves only a `.saving-` folder, which nothing reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.runs.folder import read_json, write_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"  # the live model's answer to fixed tokens, beside a model that it is proved with
SAVING_PREFIX = ".saving-"
CHUNK_BYTES = 2**20
# What `--resume_from_checkpoint` takes for "the newest complete one"; the Trainer itself takes a bare flag or `true`.
LATEST_WORDS = ("latest", "last", "true")
_NAME = re.compile(r"checkpoint-(\d+)")

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One folder, and its manifest as far as it can be read."""

    path: Path
    step: int
    """Optimizer steps that were finished when it was written."""
    manifest: Manifest | None
    """None where there is none, or none that can be read."""

    @property
    def bytes(self) -> int | None:
        """Of all files that the manifest names; None without one."""
        return None if self.manifest is None else sum(int(entry["bytes"]) for entry in self.manifest["files"])

    def problem(self, deep: bool = False) -> str | None:
        """What is incomplete or damaged, by name; None for a whole checkpoint. `deep` reads every byte."""
        if not self.path.is_dir():
            return "it does not exist"
        if self.manifest is None:
            there = (self.path / MANIFEST).exists()
            return f"{MANIFEST} cannot be read" if there else f"{MANIFEST} is missing: it was not written to its end"
        if self.manifest.get("sha256", digest := manifest_sha256(self.manifest)) != digest:
            return f"{MANIFEST} is damaged (checksum)"
        for entry in self.manifest["files"]:
            found = file_problem(self.path, entry, deep=deep)
            if found is not None:
                return found
        return None


def file_problem(folder: Path, entry: dict[str, Any], *, deep: bool) -> str | None:
    """What is wrong with one file of a manifest."""
    path = folder / entry["path"]
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{entry['path']} has {size} bytes, expected {entry['bytes']}"
        if deep and file_sha256(path) != entry["sha256"]:
            return f"{entry['path']} is damaged (checksum)"
    except OSError as error:
        return f"{entry['path']} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """A folder as a checkpoint, whatever it is; ask `problem` next."""
    manifest = read_json(path / MANIFEST)
    if manifest is not None and not _is_manifest(manifest):
        manifest = None
    named = _NAME.fullmatch(path.name)
    step = manifest["step"] if manifest is not None else int(named[1]) if named else 0
    return Checkpoint(path=path, step=int(step), manifest=manifest)


def list_checkpoints(output_dir: Path) -> list[Checkpoint]:
    """All `checkpoint-STEP` folders, complete or not, newest first; what is still being saved is none of them."""
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [read_checkpoint(path) for _, path in sorted(found, reverse=True) if path.is_dir()]


def latest_complete(output_dir: Path, deep: bool = True, say: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint; those that are skipped are named with what is wrong, on stderr."""
    for checkpoint in list_checkpoints(output_dir):
        problem = checkpoint.problem(deep=deep)
        if problem is None:
            return checkpoint
        (say or _to_stderr)(f"skipped {checkpoint.path}: {problem}")
    return None


def check_named(path: Path) -> Checkpoint:
    """A checkpoint that somebody named. Raises ToolkitError, with the one before, if it is not whole."""
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem(deep=True)
    if problem is None:
        return checkpoint
    older = [other for other in list_checkpoints(path.absolute().parent) if other.step < checkpoint.step]
    before = next((other for other in older if other.problem(deep=True) is None), None)
    raise ToolkitError(
        f"checkpoint {path} cannot be used: {problem}",
        hint=f"the one before is complete: `{before.path}`" if before is not None else "no complete one is before it",
    )


def check_same_layout(checkpoint: Checkpoint, *, engine: str, sharding: str, world_size: int) -> None:
    """Refuse a checkpoint that another engine, sharding or number of ranks wrote: its shards are not this run's."""
    manifest = checkpoint.manifest or {}
    asked = {"engine": engine, "sharding": sharding, "world_size": world_size}
    if "ddp" in (engine, manifest.get("engine")) and world_size == 1:
        asked["engine"] = manifest.get("engine") if manifest.get("engine") in ("none", "ddp") else engine
    differing = [
        f"{name} {manifest.get(name)}, not {value}" for name, value in asked.items() if manifest.get(name) != value
    ]
    if differing:
        raise ToolkitError(
            f"{checkpoint.path} was written with {'; '.join(differing)}: its shards do not fit this run",
            hint=f"resume with `--preset {manifest.get('preset')}` and `--num-processes {manifest.get('world_size')}`;"
            " or make it fit: `toolkit checkpoint convert`",
        )


def check_goes_on(
    checkpoint: Checkpoint,
    *,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int,
    seed: int,
    max_steps: int,
    streaming_buffer_size: int = 0,
) -> None:
    """Refuse a job that would not go on with the same data, or has nothing left to do.

    `max_steps` of 0 or less: not known, since the run is counted in epochs. `streaming_buffer_size` 0: not streamed.
    """
    asked = {
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "seed": seed,
        "streaming_buffer_size": streaming_buffer_size,
    }
    for name, now in asked.items():
        then = (checkpoint.manifest or {}).get(name)
        if then not in (None, now):
            raise ToolkitError(
                f"{checkpoint.path} was trained with --{name} {then}, now it is {now}: the data would not go on"
                " where they stopped",
                hint=f"`--{name} {then}`" if name != "streaming_buffer_size" else _same_stream(int(then)),
            )
    if 0 < max_steps <= checkpoint.step:
        raise ToolkitError(
            f"{checkpoint.path} has {checkpoint.step} steps already, --max_steps is {max_steps}",
            hint=f"`--max_steps {2 * checkpoint.step}`, or another number above {checkpoint.step}, goes on",
        )


def _same_stream(buffer_size: int) -> str:
    return f"`--streaming true --streaming_buffer_size {buffer_size}`" if buffer_size else "leave `--streaming` out"


def saving_folder(output_dir: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return output_dir / f"{SAVING_PREFIX}checkpoint-{step}"


def remove_unfinished(output_dir: Path) -> list[Path]:
    """Remove what ended saves have left; never a checkpoint."""
    leftovers = sorted(output_dir.glob(f"{SAVING_PREFIX}checkpoint-*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


def complete(folder: Path, checkpoint: Path, manifest: Manifest) -> None:
    """Turn a folder whose files are all on the disk into a checkpoint: the manifest, then the name.

    A checkpoint of the same name is replaced: it is moved away first, so that no name ever has half of each.
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


def files_of(folder: Path) -> list[Path]:
    """Every file of a checkpoint's folder but its manifest, in name order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def file_entries(folder: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The manifest's lines for these files, once they are on the disk (fsync)."""
    entries = []
    for path in paths:
        sync(path)
        name = path.relative_to(folder).as_posix()
        entries.append({"path": name, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
    return entries


def file_sha256(path: Path) -> str:
    """Of a file's bytes, a MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def manifest_sha256(manifest: Manifest) -> str:
    """Of all other keys, in key order."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """What was written to a file, or which names a folder has, reaches the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_manifest(content: dict[str, Any]) -> bool:
    files = content.get("files")
    if not isinstance(content.get("step"), int) or not isinstance(files, list):
        return False
    return all(isinstance(entry, dict) and {"path", "bytes", "sha256"} <= entry.keys() for entry in files)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

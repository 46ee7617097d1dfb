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
from typing import Any, Self

from toolkit.errors import ToolkitError
from toolkit.files.reading import open_file
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, same_states
from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import DEFAULT_SCHEDULE, INTERLEAVED
from toolkit.presets import Preset
from toolkit.record.folder import write_json
from toolkit.record.manifest_file import FileEntry, Manifest, manifest_sha256, read_manifest

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"  # outputs of the live model for fixed tokens, with which an export is verified
# Where transformers' `enable_jit_checkpoint` begins to write; its own resume does not look for it (5.23).
INCOMPLETE_MARK = "checkpoint-is-incomplete.txt"
SAVING_PREFIX = ".saving-"
CHUNK_BYTES = 2**20
# Values of `--resume_from_checkpoint` for the newest complete checkpoint; the Trainer takes a bare flag or `true`.
LATEST_WORDS = ("latest", "last", "true")
AT_LOAD_OPTIMIZER = "optimizer_dcp"
"""Folder of the optimizer states of a model that was sharded at load."""
STAGE_OPTIMIZER = "optimizer_stage{rank}.pt"
"""Optimizer states of the stages on one rank of a pipeline."""
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
        if os.path.lexists(self.path / INCOMPLETE_MARK):
            return f"{INCOMPLETE_MARK} is in it: a just-in-time save of transformers did not finish"
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


def check_same_layout(checkpoint: Checkpoint, target: TargetLayout) -> None:
    """Raise ToolkitError for a checkpoint whose shards do not fit the run."""
    found = checkpoint.manifest
    differing = [f"{name} {then}, not {now}" for name, (then, now) in target.differences(found).items()]
    if differing:
        raise ToolkitError(
            f"{checkpoint.path} was written with {'; '.join(differing)}: its shards do not fit this run",
            hint=f"resume with `--preset {getattr(found, 'preset', None)}` and"
            f" `--num-processes {getattr(found, 'world_size', None)}`; or convert it: `toolkit checkpoint convert`",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """How the run that resumes holds model and optimizer states."""

    engine: str
    sharding: str
    world_size: int
    layout: ParallelLayout | None = None
    sharded_at_load: bool = False

    @classmethod
    def of(cls, preset: Preset, *, num_processes: int, degrees: Mapping[str, int]) -> Self:
        """Return the layout of a preset with these degrees of parallelism."""
        return cls(
            engine=preset.engine,
            sharding=preset.sharding,
            world_size=num_processes,
            layout=preset.layout(num_processes, degrees),
            sharded_at_load=preset.sharded_at_load,
        )

    def differences(self, found: Manifest | None) -> dict[str, tuple[Any, Any]]:
        """Return what makes a checkpoint not fit, with the values then and now; empty for one that is loaded as it is.

        One of a model that was sharded at load fits every other such layout.
        """
        at_load = found is not None and found.sharded_at_load
        if at_load and self.sharded_at_load:
            return {}
        values: dict[str, tuple[Any, Any]] = {
            name: (getattr(found, name, None), getattr(self, name)) for name in ("engine", "sharding", "world_size")
        }
        if at_load or self.sharded_at_load:
            names = {True: "sharded at load", False: "sharded by its engine"}
            values["model"] = (names[at_load], names[self.sharded_at_load])
        then, now = getattr(found, "layout", None), None if self.layout is None else self.layout.degrees()
        if then != now:
            values["layout"] = (_degrees(then), _degrees(now))
        if found is not None and self._is_whole(found):
            values["engine"] = (self.engine, self.engine)
        if found is not None and then == now and self._fits_any_world_size(found):
            values["world_size"] = (self.world_size, self.world_size)
        return {name: both for name, both in values.items() if both[0] != both[1]}

    def _is_whole(self, found: Manifest) -> bool:
        """True where every rank loads all states from the same files."""
        return {self.engine, found.engine} <= {"none", "ddp"}

    def _fits_any_world_size(self, found: Manifest) -> bool:
        """True where each rank finds its shard by itself: in whole files, in DeepSpeed's universal layout, or in a
        distributed checkpoint of states that have one fp32 number per element of a parameter."""
        if self._is_whole(found):
            return True
        if found.engine == "deepspeed":
            return found.universal
        optimizer = OPTIMIZERS.get(found.optim or "")
        return found.sharding != "hybrid_shard" and optimizer is not None and optimizer.is_fp32_adamw


def _degrees(degrees: Mapping[str, int] | None) -> str:
    return "data parallelism" if degrees is None else str(ParallelLayout(**degrees))


def check_resume_settings(
    checkpoint: Checkpoint,
    *,
    global_batch_size: int,
    seed: int,
    max_steps: int,
    data_parallel_size: int,
    optim: str = DEFAULT_OPTIMIZER,
    streaming_buffer_size: int = 0,
    dataset_weights: Sequence[float] = (),
    order_of_ranks: str | None = None,
    pipeline_chunks: int | None = None,
) -> None:
    """Raise ToolkitError for a job that would not resume with the same data or optimizer, or has no steps left.

    `max_steps` of 0 or less means that the run is counted in epochs; `streaming_buffer_size` 0 means not streamed.
    `order_of_ranks` is the argument by which the rows of a step depend on the number of ranks, if there is one;
    `pipeline_chunks` are the stages on each rank of a pipeline.
    """
    _check_same_stages(checkpoint, pipeline_chunks)
    check_same_batch(checkpoint, global_batch_size)
    _check_same_order(checkpoint, order_of_ranks, data_parallel_size)
    settings: dict[str, Any] = {
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


def check_same_batch(checkpoint: Checkpoint, global_batch_size: int) -> None:
    """Raise ToolkitError for another number of sequences per step: the data resume at the same row only if it stays."""
    then = None if checkpoint.manifest is None else checkpoint.manifest.sequences_per_step
    if then not in (None, global_batch_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained with {then} sequences per step over all ranks, now it is"
            f" {global_batch_size}: the data would not resume where they stopped",
            hint=f"`--global_batch_size {then}`, without `--gradient_accumulation_steps`",
        )


def _check_same_order(checkpoint: Checkpoint, order_of_ranks: str | None, data_parallel_size: int) -> None:
    manifest = checkpoint.manifest
    then = None if manifest is None else manifest.data_parallel_size or manifest.world_size
    if order_of_ranks is not None and then not in (None, data_parallel_size):
        raise ToolkitError(
            f"{checkpoint.path} was trained on {then} data-parallel ranks, now it is {data_parallel_size}, and with"
            f" {order_of_ranks} the rows of a step depend on them: the data would not resume where they stopped",
            hint=f"resume on {then}, or leave `{order_of_ranks}` out",
        )


def _check_same_stages(checkpoint: Checkpoint, pipeline_chunks: int | None) -> None:
    """The optimizer states of a rank are those of its layers; GPipe and 1F1B give each rank the same ones."""
    then = None if checkpoint.manifest is None else checkpoint.manifest.pipeline_chunks
    if then is None or pipeline_chunks is None or then == pipeline_chunks:
        return
    same = DEFAULT_SCHEDULE if then == 1 else f"{INTERLEAVED} --pipeline_chunks {then}"
    counts = f"{_stages(then)} per GPU, not of {_stages(pipeline_chunks)}"
    raise ToolkitError(
        f"{checkpoint.path} has the optimizer states of {counts}: each GPU would hold other layers",
        hint=f"`--pipeline_schedule {same}`, or start from its weights: `--model_name_or_path {checkpoint.path}`",
    )


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"


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

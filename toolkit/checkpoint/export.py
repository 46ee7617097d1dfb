"""Any engine's checkpoint as one Hugging Face folder, streamed: one tensor in memory at a time.

>>> export(Path("out/checkpoint-8"), Path("model"))

Written as `.exporting-NAME` beside the folder and then renamed, so that a folder with that name is whole.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.description import Description, Skeleton, recorded_answer
from toolkit.checkpoint.layout import detect
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.tensors_file import DTYPES, Entry, write_model
from toolkit.checkpoint.weights import check_names, merged_entries, model_entries, name_states
from toolkit.errors import ToolkitError
from toolkit.runs.checkpoints import FINGERPRINT, MANIFEST, read_checkpoint
from toolkit.runs.endings import is_disk_full
from toolkit.runs.folder import write_json
from toolkit.units import gib

DEFAULT_SHARD_BYTES = 5 * 10**9
# Tokenizer and configuration files beside the weights; a generous guess.
SIDE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    num_tensors: int
    bytes: int
    adapter: bool


def export(
    path: Path,
    out: Path,
    *,
    merge_lora: bool = False,
    dtype: str = "float32",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    base_model: str | None = None,
) -> Exported:
    """Write the model (or adapter) of a checkpoint into `out`.

    Raises ToolkitError for a damaged checkpoint, a folder that is not empty, and a disk without room.
    """
    if dtype not in DTYPES:
        raise ToolkitError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_whole(path)
    check_free(out)
    description = Description(path, base_model)
    layout = detect(path)
    _check_merge(description, merge_lora=merge_lora)
    skeleton = Skeleton(description)
    source = open_source(layout.path)
    try:
        name_states(source, skeleton)
        check_names(source, skeleton)
        if merge_lora:
            entries = merged_entries(source, skeleton, description, DTYPES[dtype])
        else:
            entries = model_entries(source, skeleton, DTYPES[dtype])
        check_room(out, sum(entry.bytes for entry in entries) + SIDE_BYTES)
        adapter = description.adapter and not merge_lora
        _write(out, description, entries, adapter=adapter, dtype=dtype, max_shard_bytes=max_shard_bytes)
    finally:
        source.close()
    size = sum(entry.bytes for entry in entries)
    return Exported(folder=out, num_tensors=len(entries), bytes=size, adapter=adapter)


def check_whole(path: Path) -> None:
    """Refuse a checkpoint whose manifest says that it is damaged; one without a manifest cannot be checked."""
    if (path / MANIFEST).exists():
        problem = read_checkpoint(path).problem(deep=True)
        if problem is not None:
            raise ToolkitError(f"{path} is damaged: {problem}", hint=f"`toolkit checkpoint inspect {path.parent}`")


def check_free(out: Path) -> None:
    """Refuse to write over anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ToolkitError(f"{out} is there already and not empty", hint="name a new folder")


def check_room(out: Path, needed: int) -> None:
    """Refuse a disk without room before anything is written."""
    existing = next(path for path in [out, *out.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ToolkitError(
            f"{existing} has {gib(free)} free, {out} needs about {gib(needed)}", hint="name a folder on another disk"
        )


@contextlib.contextmanager
def written_beside(out: Path) -> Iterator[Path]:
    """A clean folder beside `out`, on the same disk, which is to get its name; gone afterwards, whatever happened.

    Raises ToolkitError for a disk that cannot be written.
    """
    temporary = out.absolute().with_name(f".exporting-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except BaseException as error:  # torch's zip writer and its distributed checkpoint raise no OSError
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else "No space left on device"
        raise ToolkitError(
            f"{out} cannot be written: {why}; nothing of it was kept", hint="make room, or name a folder elsewhere"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_into_place(temporary: Path, out: Path) -> None:
    """The finished folder gets its name."""
    if out.exists():
        out.rmdir()  # it is empty
    temporary.rename(out)


def _check_merge(description: Description, *, merge_lora: bool) -> None:
    if merge_lora and not description.adapter:
        raise ToolkitError(f"{description.path} holds a whole model: there is no adapter to merge")
    if merge_lora and description.base_folder is None:
        raise ToolkitError(f"{description.path}: nothing names the base model", hint="`--base-model FOLDER`")


def _write(
    out: Path,
    description: Description,
    entries: Sequence[Entry],
    *,
    adapter: bool,
    dtype: str,
    max_shard_bytes: int,
) -> None:
    with written_beside(out) as temporary:
        limit = sum(entry.bytes for entry in entries) if adapter else max_shard_bytes  # peft reads one file
        write_model(temporary, entries, max_shard_bytes=limit, stem="adapter_model" if adapter else "model")
        for path in description.side_files():
            shutil.copyfile(path, temporary / path.name)
        recorded = recorded_answer(description.path, dtype=dtype)
        if recorded is not None:
            write_json(temporary / FINGERPRINT, recorded)
        if adapter:
            config = description.peft_config()
            config.inference_mode = True
            config.save_pretrained(temporary)
        else:
            config = description.model_config()
            config.dtype, config.use_cache = dtype, True
            config.save_pretrained(temporary)
        move_into_place(temporary, out)

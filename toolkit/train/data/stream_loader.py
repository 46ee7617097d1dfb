"""Data loader of a token stream, and the stream's position in checkpoints.

`record_lane_states` follows the batches of `stream_loader` that are trained on; `write_lane_states` and `resume_stream`
save the positions of their lanes and start from them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.json_files import read_json_object
from toolkit.train.data.packing import TokenRow
from toolkit.train.data.streaming import LANE_STATE, PLACEHOLDER, STREAM_ERROR, BatchShare, LaneState, TokenStream

LANE_STATES = "lane_states"
STATE_FILES = "stream_rank*.json"

Batch = dict[str, Any]
LaneStates = dict[int, LaneState]
"""Lane number to its position."""


def batch_share(training: Any) -> BatchShare:
    """Return this rank's share, from the `TrainingArguments`."""
    return BatchShare(
        rank=training.process_index,
        world_size=training.world_size,
        per_device_train_batch_size=training.train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
    )


class StreamCollator:
    """Adds to a collator what a stream yields beside sequences: lane states, errors and placeholders."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[TokenRow]) -> Batch:
        error = next((row[STREAM_ERROR] for row in rows if STREAM_ERROR in row), None)
        if error is not None:
            return {STREAM_ERROR: error}
        if PLACEHOLDER in rows[0]:
            return {PLACEHOLDER: True}
        states = tuple(row[LANE_STATE] for row in rows)
        batch: Batch = self.collator(
            [{name: value for name, value in row.items() if name != LANE_STATE} for row in rows]
        )
        return batch | {LANE_STATES: _Opaque(states)}


class _Opaque:
    """Hides lane states from accelerate, which moves the contents of known containers to the device."""

    def __init__(self, states: tuple[LaneState, ...]) -> None:
        self.states = states


def stream_loader(stream: TokenStream, collator: Any, training: Any, device: torch.device) -> Any:
    """Return this rank's batches, on its device.

    accelerate is configured for one process, because the lanes are already divided among the ranks.
    """
    loader = torch.utils.data.DataLoader(
        stream,
        batch_size=training.train_batch_size,
        collate_fn=StreamCollator(collator),
        num_workers=training.dataloader_num_workers,
        pin_memory=training.dataloader_pin_memory,
        prefetch_factor=training.dataloader_prefetch_factor,
    )
    return prepare_data_loader(
        loader, device=device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


def record_lane_states(batches: Iterator[Batch], states: LaneStates) -> Iterator[Batch]:
    """Yield the batches as the model takes them, and update `states` with each. Raises the stream's error."""
    for batch in batches:
        if STREAM_ERROR in batch:
            error = batch[STREAM_ERROR]
            if not states:
                raise error
            # The steps so far stay valid: none of them trained on the row or on one after it.
            resume = "fix the row, then `--resume_from_checkpoint latest` resumes from the last checkpoint"
            raise ToolkitError(error.message, hint=resume if error.hint is None else f"{error.hint}; {resume}")
        states.update({state.lane: state for state in batch.pop(LANE_STATES).states})
        yield batch


# -- checkpoints


def write_lane_states(checkpoint: Path, states: LaneStates, *, rank: int, world_size: int) -> None:
    """Write the positions of this rank's lanes; the manifest lists the file like any other."""
    lanes = [asdict(state) for _, state in sorted(states.items())]
    text = json.dumps({"world_size": world_size, "lanes": lanes})
    write_text(checkpoint / STATE_FILES.replace("*", str(rank)), text)


def read_lane_states(checkpoint: Path) -> LaneStates | None:
    """Read the lanes of all ranks that wrote the checkpoint, which may be fewer or more than now.

    Returns None if a rank's file is missing. Raises ToolkitError for a damaged file.
    """
    states: LaneStates = {}
    paths, ranks = list(checkpoint.glob(STATE_FILES)), 0
    for path in paths:
        written = read_json_object(path)
        try:
            ranks = int(written["world_size"])
            for lane in written["lanes"]:
                packs = tuple(tuple(map(int, pack)) for pack in lane["open"])
                states[int(lane["lane"])] = LaneState(lane=int(lane["lane"]), taken=int(lane["taken"]), open=packs)
        except (ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__} {error}"
            raise ToolkitError(f"{path} is damaged: {why[:80]}", hint="resume from an earlier checkpoint") from None
    return states if len(paths) == ranks > 0 else None


def resume_stream(train: Any, checkpoint: Path, *, step: int, training: Any) -> None:
    """Start a stream from the checkpoint's lanes. Without their files it is tokenised again from the beginning."""
    states = read_lane_states(checkpoint) if isinstance(train, TokenStream) else None
    if states is not None:
        train.resume(states, batches=step * training.gradient_accumulation_steps)

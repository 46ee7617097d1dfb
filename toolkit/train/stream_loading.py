"""A stream's way into the Trainer and into its checkpoints.

loader = stream_loader(stream, collator, training, device)
note_lanes(batch, states)                    # what a batch that is trained on says of its lanes
write_lanes(checkpoint, states, rank=0)
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
from toolkit.runs.folder import write_text
from toolkit.train.packing import Row
from toolkit.train.streaming import BLANK, LANE_STATE, STREAM_ERROR, LaneState, Share, TokenStream

LANE_STATES = "lane_states"
LANES_FILES = "stream_rank*.json"

Batch = dict[str, Any]
States = dict[int, LaneState]


def share_of(training: Any) -> Share:
    """As the training arguments say."""
    return Share(
        rank=training.process_index,
        world_size=training.world_size,
        per_device_train_batch_size=training.train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
    )


class StreamCollator:
    """A collator for what a stream gives beside sequences: where their lanes stand, an error, blanks."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Row]) -> Batch:
        error = next((row[STREAM_ERROR] for row in rows if STREAM_ERROR in row), None)
        if error is not None:
            return {STREAM_ERROR: error}
        if BLANK in rows[0]:
            return {BLANK: True}
        states = tuple(row[LANE_STATE] for row in rows)
        batch: Batch = self.collator(
            [{name: value for name, value in row.items() if name != LANE_STATE} for row in rows]
        )
        return batch | {LANE_STATES: LaneStates(states)}


class LaneStates:
    """Opaque to accelerate, which moves what it can look into to a device."""

    def __init__(self, states: tuple[LaneState, ...]) -> None:
        self.states = states


def stream_loader(stream: TokenStream, collator: Any, training: Any, device: torch.device) -> Any:
    """Batches of this rank, on its device. accelerate is told of one process: the lanes are shared out already."""
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


def noting(batches: Iterator[Batch], states: States) -> Iterator[Batch]:
    """The batches as the model takes them, up to the stream's error; `states` follows what is trained on."""
    for batch in batches:
        if STREAM_ERROR in batch:
            raise _with_way_on(batch[STREAM_ERROR], begun=bool(states))
        states.update({state.lane: state for state in batch.pop(LANE_STATES).states})
        yield batch


def _with_way_on(error: ToolkitError, *, begun: bool) -> ToolkitError:
    """What the run has trained so far stays right when the row is mended: no step had it, nor any row behind it."""
    if not begun:
        return error
    on = "mend the row, then `--resume_from_checkpoint latest` goes on from the last checkpoint"
    return ToolkitError(error.message, hint=on if error.hint is None else f"{error.hint}; {on}")


# -- in a checkpoint


def write_lanes(checkpoint: Path, states: States, *, rank: int, world_size: int) -> None:
    """Where this rank's lanes stand; the manifest lists the file as any other."""
    lanes = [asdict(state) for _, state in sorted(states.items())]
    text = json.dumps({"world_size": world_size, "lanes": lanes})
    write_text(checkpoint / LANES_FILES.replace("*", str(rank)), text)


def read_lanes(checkpoint: Path) -> States | None:
    """Of all ranks that wrote the checkpoint: this run may have another number of them. None if a file is missing."""
    states: States = {}
    paths, ranks = list(checkpoint.glob(LANES_FILES)), 0
    for path in paths:
        try:
            written = json.loads(path.read_text())
            ranks, lanes = written["world_size"], written["lanes"]
        except (OSError, ValueError, KeyError) as error:
            raise ToolkitError(f"{path} cannot be read: {error}", hint="resume from the checkpoint before") from None
        for lane in lanes:
            packs = tuple(map(tuple, lane["open"]))
            states[lane["lane"]] = LaneState(lane=lane["lane"], taken=lane["taken"], open=packs)
    return states if len(paths) == ranks > 0 else None


def resume_stream(train: Any, checkpoint: Path, *, step: int, training: Any) -> None:
    """Begin a stream where the checkpoint stands; without its files, it is tokenised again from its beginning."""
    states = read_lanes(checkpoint) if isinstance(train, TokenStream) else None
    if states is not None:
        train.go_on(states, batches=step * training.gradient_accumulation_steps)

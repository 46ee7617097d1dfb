"""A stream of training sequences: rows are read, shuffled, tokenised and packed while they are trained on.

The order of rows follows from the files, the seed and the buffer alone; every rank reads all rows, and deals them in
turn to lanes: as many as a global batch has sequences, times `LANE_GROUPS`. A lane drops its rows without a supervised
token and packs the others. A step trains on the next sequence of each lane of one group, and the groups take turns. So
a rank tokenises the rows of its own lanes only, worker processes divide them by group, and neither the number of ranks
nor that of workers changes what a step trains on.

Each sequence carries the state of its lane after it. A checkpoint records these states; a resumed run reads the rows
before them without tokenising them again.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from accelerate.data_loader import prepare_data_loader

from toolkit.data.data_files import DataSource, iter_rows, numbered, resolve_source
from toolkit.data.formats import columns_of, with_columns
from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import read_json_object
from toolkit.job.dataset_checks import WORKERS, check_rows_fill_a_step
from toolkit.train.data.collation import OpenPacks, TokenRow, joined
from toolkit.train.data.tokenization import RowEncoder, format_of_first_row, load_hub

STREAM_ERROR, LANE_STATE, PLACEHOLDER = "stream_error", "lane_state", "placeholder"
LANE_GROUPS = WORKERS[-1]  # each worker process takes whole groups
# Packs of 1,024 tokens of chitchat conversations are 97.7 % full with 4 open packs per lane, 99.0 % with 8 and 99.6 %
# with 32. But a lane tokenises that many packs before it yields the first.
OPEN_PACKS = 8
STATE_FILES = "stream_rank*.json"


class StreamedRow(NamedTuple):
    """A row as it was read, not checked yet."""

    fields: dict[str, Any]
    place: str | None = None  # in the file, in words; None on the hub, where the order of shards leaves a row no place
    number: int | None = None  # index of the row in a file, from 0; of several data sets, as `numbered`
    source: int = 0  # index of its data set in `--dataset`

    def place_in(self, name: str) -> str:
        """Return the place of the row in the data set `name`, for error messages."""
        return f"{name}: {self.place or f'the row that begins with {str(self.fields)[:80]}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStream:
    """Rows of a file or hub data set, shuffled in a buffer and read lazily."""

    source: DataSource
    data_format: str
    rows: datasets.IterableDataset  # rows in the order of the source
    buffer_size: int
    seed: int

    def epoch(self, number: int, *, repeat: int = 0) -> Iterator[StreamedRow]:
        """Yield every row once, in the order of this epoch and, within it, of this repeat of the data set."""
        is_file = self.source.path is not None
        shards = {"max_buffer_input_shards": 1} if is_file else {}  # otherwise each row passes through a thread
        # Not set_epoch: worker processes would share one epoch. Not iter(rows): it shuffles differently in a worker.
        seed = [self.seed, number, *([repeat] if repeat else [])]
        shuffled = self.rows.shuffle(seed=seed, buffer_size=self.buffer_size, **shards)
        for batch in shuffled.iter(batch_size=1):
            row = {name: values[0] for name, values in batch.items()}
            streamed = StreamedRow(**row) if is_file else StreamedRow(row)
            yield streamed._replace(fields=with_columns(streamed.fields, self.source.columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedRows:
    """Rows of one or several data sets, each shuffled in a buffer of its own.

    With weights, each row is drawn from a data set with the probability of its weight, until every row of every data
    set was there; a data set that ends before begins again, in another order. Without, they follow one another.
    """

    streams: tuple[RowStream, ...]
    weights: tuple[float, ...] | None = None

    def epoch(self, number: int) -> Iterator[StreamedRow]:
        """Yield every row at least once, in the order of this epoch."""
        in_turn = ((source, row) for source, stream in enumerate(self.streams) for row in stream.epoch(number))
        for source, row in in_turn if self.weights is None else self._drawn(number, self.weights):
            index = None if row.number is None else numbered(row.number, source, sources=len(self.streams))
            yield row._replace(source=source, number=index)

    def endless(self, *, at_least: int) -> Iterator[tuple[int, StreamedRow]]:
        """Yield rows with the number of their epoch. Raises ToolkitError after an epoch of less than `at_least`."""
        for epoch in itertools.count():
            rows = 0
            for row in self.epoch(epoch):
                rows += 1
                yield epoch, row
            check_rows_fill_a_step(rows, max(at_least, 1), ", ".join(stream.source.name for stream in self.streams))

    def _drawn(self, epoch: int, weights: tuple[float, ...]) -> Iterator[tuple[int, StreamedRow]]:
        draw, rows = random.Random(f"{self.streams[0].seed} {epoch}"), [stream.epoch(epoch) for stream in self.streams]
        repeats = [0] * len(rows)
        while True:
            source = draw.choices(range(len(rows)), weights)[0]
            if (row := next(rows[source], None)) is None:
                repeats[source] += 1
                if all(repeats):
                    return
                rows[source] = self.streams[source].epoch(epoch, repeat=repeats[source])
                row = next(rows[source])
            yield source, row


def open_stream(source: str | DataSource, split: str, *, buffer_size: int, seed: int) -> RowStream:
    """Open a local file or a hub data set. Only the first row is read, for the format."""
    source = resolve_source(source) if isinstance(source, str) else source
    first: dict[str, Any] | None
    if source.path is not None:
        rows = datasets.IterableDataset.from_generator(_file_rows, gen_kwargs={"path": str(source.path)})
        first = next(iter_rows(source.path))[1]
    else:
        rows = load_hub(source, split, streaming=True)
        first = next(iter(rows), None)
    data_format = format_of_first_row(source, split, first)
    source = replace(source, columns=columns_of(first or {}, source.columns))
    return RowStream(source=source, data_format=data_format, rows=rows, buffer_size=buffer_size, seed=seed)


def _file_rows(path: str) -> Iterator[dict[str, Any]]:
    """Every rank parses every row; only the rank that trains on a row checks its fields."""
    for number, (place, row) in enumerate(iter_rows(Path(path))):
        yield {"fields": row, "place": place, "number": number}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneState:
    """The position of a lane."""

    lane: int
    taken: int = 0  # number of rows that it has taken from those dealt to it
    open: tuple[tuple[int, ...], ...] = ()  # the rows in packs that are not full yet, by their number in the lane


LaneStates = dict[int, LaneState]  # by the number of the lane


class Lanes:
    """Makes the sequences of some lanes, each from its state. Rows dealt to its own lanes are kept until taken."""

    def __init__(self, stream: TokenStream, states: LaneStates) -> None:
        self.stream, self.states = stream, states
        self.names = [each.source.name for each in stream.rows.streams]
        self.rows = enumerate(stream.rows.endless(at_least=stream.global_batch_size))
        self.waiting: dict[int, deque[tuple[int, StreamedRow]]] = {lane: deque() for lane in states}
        self.packs: dict[int, OpenPacks] = {}
        self.dropped: Counter[int] = Counter()  # consecutive rows of a lane without a supervised token
        self.rows_per_epoch: int | None = None  # known once the first epoch is over

    def next(self, lane: int) -> TokenRow:
        """Return one row, or one pack of rows, with the lane's state after it."""
        if self.stream.packing and lane not in self.packs:
            opened, length = self.states[lane].open, self.stream.encoders[0].max_seq_length
            rows = {number: self._next_row(lane) for number in sorted(sum(opened, ()))}
            packs = ([rows[number] for number in pack] for pack in opened)
            self.packs[lane] = OpenPacks(max_seq_length=length, at_most=OPEN_PACKS, packs=packs)
        while True:
            row = self._next_row(lane)
            taken = row[LANE_STATE] + 1
            if not row["supervised"]:
                self.dropped[lane] += 1
                # One epoch's rows may miss a lane.
                if self.rows_per_epoch is not None and self.dropped[lane] >= 10 * self.rows_per_epoch:
                    what = f"{', '.join(self.names)}: no supervised token in {self.dropped[lane]:,} consecutive rows"
                    raise ToolkitError(what, hint="check that the answers are not empty, or raise `--max_seq_length`")
                continue
            self.dropped[lane] = 0
            if not self.stream.packing:
                return row | {LANE_STATE: LaneState(lane=lane, taken=taken)}
            if (full := self.packs[lane].add(row)) is not None:
                numbers = tuple(tuple(row[LANE_STATE] for row in pack) for pack in self.packs[lane].packs)
                return joined(full) | {LANE_STATE: LaneState(lane=lane, taken=taken, open=numbers)}

    def _next_row(self, lane: int) -> TokenRow:
        """Tokens of the next row that the lane still has to train on; `LANE_STATE` holds its number in the lane."""
        while not self.waiting[lane]:
            count, (epoch, dealt) = next(self.rows)
            if epoch == 1 and self.rows_per_epoch is None:
                self.rows_per_epoch = count
            number, receiver = divmod(count, LANE_GROUPS * self.stream.global_batch_size)
            state = self.states.get(receiver)
            if state is not None and (number >= state.taken or any(number in pack for pack in state.open)):
                self.waiting[receiver].append((number, dealt))
        number, row = self.waiting[lane].popleft()
        place = row.place_in(self.names[row.source])
        encoded = self.stream.encoders[row.source].encode_row(row.fields, number=row.number, place=place)
        names = ["input_ids", "labels", "supervised"] + ["row"] * (row.number is not None)
        return {name: encoded[name] for name in names} | {LANE_STATE: number}


class TokenStream(torch.utils.data.IterableDataset[TokenRow]):  # type: ignore[misc]
    """The endless sequences of one rank's micro-batches; in a worker process, of that worker's micro-batches."""

    def __init__(
        self, rows: MixedRows, encoders: Sequence[RowEncoder], training: Any, *, packing: bool = False
    ) -> None:
        self.rows, self.encoders, self.packing = rows, encoders, packing
        self.buffer_size = rows.streams[0].buffer_size
        self.rank, self.world_size = training.process_index, training.world_size
        self.batch_size, self.accumulation = training.train_batch_size, training.gradient_accumulation_steps
        self.global_batch_size = self.world_size * self.batch_size * self.accumulation
        self.start_states: Mapping[int, LaneState] = {}  # start of the lanes that do not start with their first row
        self.skipped_batches = 0
        self.states: LaneStates = {}  # position of each lane of this rank, after what has been trained on

    def resume(self, states: Mapping[int, LaneState], *, batches: int) -> None:
        """Start from a checkpoint's lanes, after placeholders for the micro-batches that a resuming Trainer skips."""
        self.start_states, self.skipped_batches = states, batches
        own = self._states_of(range(LANE_GROUPS * self.accumulation))
        self.states = {lane: state for lane, state in own.items() if lane in states}

    def lanes(self, batch: int) -> list[int]:
        """Return the lanes of a micro-batch: by accumulation step, then by rank, as rows are without streaming."""
        step, accumulation_step = divmod(batch, self.accumulation)
        group = step % LANE_GROUPS * self.global_batch_size
        first = group + (accumulation_step * self.world_size + self.rank) * self.batch_size
        return list(range(first, first + self.batch_size))

    def __iter__(self) -> Iterator[TokenRow]:
        """Yield sequences. Errors are yielded as `STREAM_ERROR`: raised in a worker they would be tracebacks."""
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        lanes = Lanes(self, self._states_of(range(first, LANE_GROUPS * self.accumulation, stride)))
        try:
            for batch in itertools.count(first, stride):
                for lane in self.lanes(batch):
                    yield {PLACEHOLDER: True} if batch < self.skipped_batches else lanes.next(lane)
        except ToolkitError as error:
            yield from itertools.repeat({STREAM_ERROR: error})

    def _states_of(self, batches: Iterable[int]) -> LaneStates:
        lanes = itertools.chain.from_iterable(map(self.lanes, batches))
        return {lane: self.start_states.get(lane, LaneState(lane=lane)) for lane in lanes}


def collate_stream(rows: Sequence[TokenRow], *, collator: Any) -> dict[str, Any]:
    """Collate sequences with their lane states; pass on an error or a placeholder."""
    for row in rows:
        if STREAM_ERROR in row or PLACEHOLDER in row:
            return row
    states = frozenset(row.pop(LANE_STATE) for row in rows)  # accelerate takes lists apart
    return {**collator(rows), LANE_STATE: states}


def stream_loader(stream: TokenStream, collator: Any, training: Any, device: torch.device) -> Any:
    """Return this rank's batches, on its device; for accelerate of one process, since lanes are divided among ranks."""
    loader = torch.utils.data.DataLoader(
        stream,
        batch_size=training.train_batch_size,
        collate_fn=partial(collate_stream, collator=collator),
        num_workers=training.dataloader_num_workers,
        pin_memory=training.dataloader_pin_memory,
        prefetch_factor=training.dataloader_prefetch_factor,
    )
    return prepare_data_loader(
        loader, device=device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


def record_lane_states(batches: Iterator[dict[str, Any]], states: LaneStates) -> Iterator[dict[str, Any]]:
    """Yield the batches as the model takes them, and update `states` with each. Raises the stream's error."""
    for batch in batches:
        if STREAM_ERROR in batch:
            error = batch[STREAM_ERROR]
            if not states:
                raise error
            # The steps so far stay valid: none of them trained on the row or on one after it.
            resume = "fix the row; `--resume_from_checkpoint latest` then resumes from a complete checkpoint, if any"
            raise ToolkitError(error.message, hint=resume if error.hint is None else f"{error.hint}; {resume}")
        states.update({state.lane: state for state in batch.pop(LANE_STATE)})
        yield batch


def write_lane_states(checkpoint: Path, states: LaneStates, *, rank: int, world_size: int) -> None:
    """Write the positions of this rank's lanes; the manifest lists the file like any other."""
    lanes = [asdict(state) for _, state in sorted(states.items())]
    path = checkpoint / STATE_FILES.replace("*", str(rank))
    write_text(path, json.dumps({"world_size": world_size, "lanes": lanes}))


def read_lane_states(checkpoint: Path) -> LaneStates | None:
    """Read the lanes of all ranks that wrote the checkpoint, fewer or more than now; None if a file is missing."""
    written = [read_json_object(path) for path in checkpoint.glob(STATE_FILES)]
    lanes = [lane | {"open": tuple(map(tuple, lane["open"]))} for file in written for lane in file["lanes"]]
    complete = bool(written) and len(written) == written[0]["world_size"]
    return {lane["lane"]: LaneState(**lane) for lane in lanes} if complete else None

"""Sequences of a stream, tokenised and packed while they are trained on, the same for any number of ranks.

    share = Share(rank=0, world_size=2, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    for sequence in TokenStream(rows, encoder, share): ...

The rows are dealt like cards to lanes, as many as a global batch has sequences, times `LANE_GROUPS`. A lane drops its
rows without a supervised token and packs the others. A step trains on the next sequence of each lane of one group,
and the groups take turns. So a rank tokenises the rows of its own lanes only, worker processes share them out by
group, and neither the number of ranks nor that of workers changes what a step trains on.

Each sequence says where its lane stands behind it. A checkpoint keeps that, and a resumed run reads the rows up to
there without tokenising them again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from toolkit.errors import ToolkitError
from toolkit.runs.rows import WORKERS
from toolkit.train.packing import OpenPacks, Row, joined
from toolkit.train.stream_rows import RowStream, StreamedRow
from toolkit.train.tokens import RowEncoder

STREAM_ERROR = "stream_error"
LANE_STATE = "lane_state"
BLANK = "blank"
LANE_GROUPS = WORKERS[-1]
# Packs of 1,024 tokens of chitchat conversations are 97.7 % full with 4 open in a lane, 99.0 % with 8, 99.6 % with 32
# (benchmarks/streaming.py); but a lane tokenises so many before it gives the first one out.
OPEN_PACKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneState:
    """Where a lane stands."""

    lane: int
    taken: int = 0
    """Rows that it has taken of those dealt to it."""
    open: tuple[tuple[int, ...], ...] = ()
    """Of these, by their number in the lane, those in packs that still have room."""

    def needs(self, number: int) -> bool:
        """Whether the lane's row of this number is still to be trained on."""
        return number >= self.taken or any(number in pack for pack in self.open)


class DealtRow(NamedTuple):
    """A row in its lane."""

    number: int
    """In the lane, from 0."""
    row: StreamedRow


class Dealer:
    """Deals the rows to all lanes in turn; what comes for one of its own waits there until it is asked for."""

    def __init__(self, rows: Iterator[tuple[int, StreamedRow]], *, lanes: int, own: Mapping[int, LaneState]) -> None:
        self.rows, self.lanes, self.own = enumerate(rows), lanes, own
        self.waiting: dict[int, deque[DealtRow]] = {lane: deque() for lane in own}
        self.rows_an_epoch: int | None = None
        """Once the first epoch is over."""

    def next_of(self, lane: int) -> DealtRow:
        while not self.waiting[lane]:
            count, (epoch, row) = next(self.rows)
            if epoch == 1 and self.rows_an_epoch is None:
                self.rows_an_epoch = count
            number, to = divmod(count, self.lanes)
            if to in self.own and self.own[to].needs(number):
                self.waiting[to].append(DealtRow(number, row))
        return self.waiting[lane].popleft()


class Lane:
    """The sequences of one lane."""

    def __init__(self, state: LaneState, dealer: Dealer, encoder: RowEncoder, *, name: str, packing: bool) -> None:
        self.number, self.taken, self.dealer, self.encoder, self.name = state.lane, state.taken, dealer, encoder, name
        self.dropped = 0
        """Rows without a supervised token, since the last with one."""
        self.packs = OpenPacks(max_tokens=encoder.max_seq_length, at_most=OPEN_PACKS) if packing else None
        if self.packs is not None:
            again = {number: self._encoded(dealer.next_of(self.number)) for number in sorted(sum(state.open, ()))}
            self.packs.restore([[again[number] for number in pack] for pack in state.open])

    def next(self) -> Row:
        """One row, or one pack of them."""
        while True:
            row = self._supervised()
            if self.packs is None:
                return row | {LANE_STATE: self._state()}
            rows = self.packs.add(row)
            if rows is not None:
                return joined(rows) | {LANE_STATE: self._state()}

    def _state(self) -> LaneState:
        packs = [] if self.packs is None else self.packs.packs
        numbers = tuple(tuple(row[LANE_STATE] for row in pack.rows) for pack in packs)
        return LaneState(lane=self.number, taken=self.taken, open=numbers)

    def _supervised(self) -> Row:
        """The lane's next row that there is something to learn from."""
        while True:
            dealt = self.dealer.next_of(self.number)
            self.taken = dealt.number + 1
            row = self._encoded(dealt)
            self.dropped = 0 if row["supervised"] else self.dropped + 1
            if not self.dropped:
                return row
            self._check_not_endless()

    def _check_not_endless(self) -> None:
        epoch = self.dealer.rows_an_epoch
        if epoch is not None and self.dropped >= 10 * epoch:  # few of few rows may miss a lane now and then
            raise ToolkitError(
                f"{self.name}: no supervised token in {self.dropped:,} rows behind each other",
                hint="check that the answers are not empty, or raise `--max_seq_length`",
            )

    def _encoded(self, dealt: DealtRow) -> Row:
        """The tokens; under `LANE_STATE` the row's number in its lane."""
        row = dealt.row
        encoded = self.encoder.encode_row(row.fields, number=row.number, place=row.where(self.name))
        names = ["input_ids", "labels", "supervised"] + ["row"] * (row.number is not None)
        return {name: encoded[name] for name in names} | {LANE_STATE: dealt.number}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part of every global batch."""

    rank: int
    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.per_device_train_batch_size * self.gradient_accumulation_steps

    def lanes(self, batch: int) -> list[int]:
        """The lanes of this rank's micro-batch of this number, from 0.

        Shared out as where nothing is streamed: micro-step by micro-step, and in each rank by rank.
        """
        step, micro_step = divmod(batch, self.gradient_accumulation_steps)
        group = step % LANE_GROUPS * self.global_batch_size
        first = group + (micro_step * self.world_size + self.rank) * self.per_device_train_batch_size
        return list(range(first, first + self.per_device_train_batch_size))


class TokenStream(torch.utils.data.IterableDataset[Row]):  # type: ignore[misc]
    """The sequences of one rank's batches behind each other, without end; in a worker process, of its batches only."""

    def __init__(self, rows: RowStream, encoder: RowEncoder, share: Share, *, packing: bool = False) -> None:
        self.rows, self.encoder, self.share, self.packing = rows, encoder, share, packing
        self.buffer_size = rows.buffer_size
        self.begin: Mapping[int, LaneState] = {}
        """Where lanes begin that do not begin with their first row."""
        self.blank_batches = 0

    def go_on(self, states: Mapping[int, LaneState], *, batches: int) -> None:
        """Begin where a checkpoint stands, behind blanks for the micro-batches that a resuming Trainer skips."""
        self.begin, self.blank_batches = states, batches

    def own_states(self) -> dict[int, LaneState]:
        """Where this rank's lanes begin, as far as they do not begin with their first row."""
        own = self._own_lanes(range(LANE_GROUPS * self.share.gradient_accumulation_steps))
        return {lane: state for lane, state in own.items() if lane in self.begin}

    def __iter__(self) -> Iterator[Row]:
        """A wrong row is handed on as `STREAM_ERROR`: raised in a worker process, it would come as a traceback."""
        try:
            yield from self._sequences()
        except ToolkitError as error:
            yield from itertools.repeat({STREAM_ERROR: error})

    def _sequences(self) -> Iterator[Row]:
        worker = torch.utils.data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = self._own_lanes(range(first, LANE_GROUPS * self.share.gradient_accumulation_steps, every))
        lanes, batch_size = LANE_GROUPS * self.share.global_batch_size, self.share.global_batch_size
        dealer, at_work = Dealer(self.rows.endless(at_least=batch_size), lanes=lanes, own=own), dict[int, Lane]()
        for batch in itertools.count(first, every):
            for lane in self.share.lanes(batch):
                if batch < self.blank_batches:
                    yield {BLANK: True}
                    continue
                if lane not in at_work:
                    at_work[lane] = Lane(own[lane], dealer, self.encoder, name=self.rows.name, packing=self.packing)
                yield at_work[lane].next()

    def _own_lanes(self, batches: Iterable[int]) -> dict[int, LaneState]:
        lanes = itertools.chain.from_iterable(map(self.share.lanes, batches))
        return {lane: self.begin.get(lane, LaneState(lane=lane)) for lane in lanes}

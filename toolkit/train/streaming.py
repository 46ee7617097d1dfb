"""Sequences of a stream, tokenised and packed while they are trained on, the same for any number of ranks.

    stream = TokenStream(rows, encoder, lanes=8, own=[0, 1])
    for sequence in stream: ...                      # lane 0, lane 1, lane 0, ...

The rows are dealt like cards to as many lanes as a global batch has sequences. A lane drops its rows without a
supervised token and packs the others; step k trains on the k-th sequence of each lane. So a rank tokenises the rows
of its own lanes only, and a step's batch does not depend on how the lanes are shared out among ranks.

Each sequence says where its lane stands behind it. A checkpoint keeps that, and a resumed run reads the rows up to
there without tokenising them again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from toolkit.errors import ToolkitError
from toolkit.train.packing import OpenPacks, Row, joined
from toolkit.train.stream_rows import FIELDS, NUMBER, PlacedRow, RowStream
from toolkit.train.tokens import PLACE, RowEncoder

STREAM_ERROR = "stream_error"
LANE_STATE = "lane_state"
BLANK = "blank"
# On chitchat conversations packs of 1,024 tokens are 99.2 % full with 8 open, 99.5 % with 32; a checkpoint's open packs
# are tokenised again when a run goes on.
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
    epoch: int
    row: PlacedRow


class Dealer:
    """Deals the rows to all lanes in turn; what comes for one of its own waits there until it is asked for."""

    def __init__(self, rows: Iterator[tuple[int, PlacedRow]], *, lanes: int, own: Mapping[int, LaneState]) -> None:
        self.rows, self.lanes, self.own = enumerate(rows), lanes, own
        self.waiting: dict[int, deque[DealtRow]] = {lane: deque() for lane in own}

    def next_of(self, lane: int) -> DealtRow:
        while not self.waiting[lane]:
            count, (epoch, row) = next(self.rows)
            number, to = divmod(count, self.lanes)
            if to in self.own and self.own[to].needs(number):
                self.waiting[to].append(DealtRow(number, epoch, row))
        return self.waiting[lane].popleft()


class Lane:
    """The sequences of one lane."""

    def __init__(self, state: LaneState, dealer: Dealer, encoder: RowEncoder, *, name: str, packing: bool) -> None:
        self.number, self.taken, self.dealer, self.encoder, self.name = state.lane, state.taken, dealer, encoder, name
        self.last_kept_epoch: int | None = None
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
            if row["supervised"]:
                self.last_kept_epoch = dealt.epoch
                return row
            self._check_not_endless(dealt.epoch)

    def _check_not_endless(self, epoch: int) -> None:
        self.last_kept_epoch = epoch if self.last_kept_epoch is None else self.last_kept_epoch
        if epoch > self.last_kept_epoch + 1:
            raise ToolkitError(
                f"{self.name}: no supervised token in any row of a whole epoch",
                hint="check that the answers are not empty, or raise `--max_seq_length`",
            )

    def _encoded(self, dealt: DealtRow) -> Row:
        """The tokens; under `LANE_STATE` the row's number in its lane."""
        row = dealt.row
        encoded = self.encoder.encode_row(row[FIELDS], number=row.get(NUMBER), place=row[PLACE])
        names = ["input_ids", "labels", "supervised"] + [NUMBER] * (NUMBER in row)
        return {name: encoded[name] for name in names} | {LANE_STATE: dealt.number}


class TokenStream(torch.utils.data.IterableDataset[Row]):  # type: ignore[misc]
    """This rank's sequences, without end: its `own` lanes in turn."""

    def __init__(
        self, rows: RowStream, encoder: RowEncoder, *, lanes: int, own: Sequence[int], packing: bool = False
    ) -> None:
        self.rows, self.encoder, self.lanes, self.packing = rows, encoder, lanes, packing
        self.buffer_size = rows.buffer_size
        self.own = {lane: LaneState(lane=lane) for lane in own}
        """Where each of its lanes begins."""
        self.blanks = 0

    def go_on(self, states: Mapping[int, LaneState], *, sequences: int) -> None:
        """Begin where a checkpoint stands, behind blanks for the `sequences` that a resuming Trainer will skip."""
        if self.own.keys() <= states.keys():
            self.own = {lane: states[lane] for lane in self.own}
            self.blanks = sequences

    def __iter__(self) -> Iterator[Row]:
        """A wrong row is handed on as `STREAM_ERROR`: raised in a worker process, it would come as a traceback."""
        yield from itertools.repeat({BLANK: True}, self.blanks)
        try:
            dealer = Dealer(self.rows.endless(at_least=self.lanes), lanes=self.lanes, own=self.own)
            lanes = [
                Lane(state, dealer, self.encoder, name=self.rows.name, packing=self.packing)
                for state in self.own.values()
            ]
            for lane in itertools.cycle(lanes):
                yield lane.next()
        except ToolkitError as error:
            yield from itertools.repeat({STREAM_ERROR: error})

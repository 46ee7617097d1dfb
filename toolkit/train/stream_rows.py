"""Rows in the order of a stream: read as they are asked for, shuffled in a buffer, epoch after epoch.

    stream = read_stream("rows.jsonl", "train", buffer_size=1000, seed=42)
    for epoch, row in stream.endless(at_least=8): ...

The order follows from the file, the seed and the buffer alone; every rank reads it all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from toolkit.data import iter_rows, resolve_source
from toolkit.runs.rows import check_rows_fill_a_step
from toolkit.train.tokens import format_of_first_row, load_hub


class StreamedRow(NamedTuple):
    """A row as it was read, unchecked."""

    fields: dict[str, Any]
    place: str | None
    """In the file, in words; the shards of a hub data set come in an order of their own, so that a row has none."""
    number: int | None
    """From 0 in a file."""

    def where(self, name: str) -> str:
        """For an error in it."""
        return f"{name}: {self.place or f'the row that begins {str(self.fields)[:80]}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStream:
    """Rows shuffled in a buffer; none is read before it is asked for."""

    name: str
    data_format: str
    rows: datasets.IterableDataset
    """In the order of the source."""
    buffer_size: int
    seed: int
    is_file: bool

    def epoch(self, number: int) -> Iterator[StreamedRow]:
        """Every row once, in the order of this epoch."""
        shards = {"max_buffer_input_shards": 1} if self.is_file else {}  # else each row comes through a thread
        # Not set_epoch: worker processes would share one epoch. Not iter(rows): in a worker it shuffles otherwise.
        shuffled = self.rows.shuffle(seed=[self.seed, number], buffer_size=self.buffer_size, **shards)
        for batch in shuffled.iter(batch_size=1):
            row = {name: values[0] for name, values in batch.items()}
            yield StreamedRow(**row) if self.is_file else StreamedRow(row, None, None)

    def endless(self, *, at_least: int) -> Iterator[tuple[int, StreamedRow]]:
        """Each epoch's rows behind those of the one before, with the epoch's number."""
        for epoch in itertools.count():
            rows = 0
            for row in self.epoch(epoch):
                rows += 1
                yield epoch, row
            check_rows_fill_a_step(rows, max(at_least, 1), self.name)


def read_stream(source: str, split: str, *, buffer_size: int, seed: int) -> RowStream:
    """The rows of a local file or of a hub data set; of either only the first is read here."""
    path = resolve_source(source).path
    if path is not None:
        rows = datasets.IterableDataset.from_generator(_file_rows, gen_kwargs={"path": str(path)})
        first: dict[str, Any] | None = next(iter_rows(path))[1]
    else:
        rows = load_hub(source, split, streaming=True)
        first = next(iter(rows), None)
    return RowStream(
        name=source,
        data_format=format_of_first_row(source, split, first),
        rows=rows,
        buffer_size=buffer_size,
        seed=seed,
        is_file=path is not None,
    )


def _file_rows(path: str) -> Iterator[dict[str, Any]]:
    """Every rank parses every row; the one that trains on it looks at its fields."""
    for number, (place, row) in enumerate(iter_rows(Path(path))):
        yield {"fields": row, "place": place, "number": number}

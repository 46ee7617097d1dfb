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
from typing import Any

import datasets

from toolkit.data import checked_rows, detect_format, formats, resolve_source
from toolkit.runs.rows import check_rows_fill_a_step
from toolkit.train.tokens import PLACE, format_of_first_row, load_hub

FIELDS = "fields"
NUMBER = "row"

PlacedRow = dict[str, Any]
"""`fields` that the format reads, and where the row stands: `place` in words, `row` its number from 0 in a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStream:
    """Rows shuffled in a buffer; none is read before it is asked for."""

    name: str
    data_format: str
    rows: datasets.IterableDataset
    buffer_size: int
    is_file: bool

    def epoch(self, number: int) -> Iterator[PlacedRow]:
        """Every row once, in the order of this epoch."""
        self.rows.set_epoch(number)
        for batch in self.rows.iter(batch_size=1):  # iter(rows) shuffles in another order in a worker process
            row = {name: values[0] for name, values in batch.items()}
            yield row if self.is_file else _hub_row(row, self.name, self.data_format)

    def endless(self, *, at_least: int) -> Iterator[tuple[int, PlacedRow]]:
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
        first: dict[str, Any] | None = next(checked_rows(path))[1]
    else:
        rows = load_hub(source, split, streaming=True)
        first = next(iter(rows), None)
    return RowStream(
        name=source,
        data_format=format_of_first_row(source, split, first),
        rows=rows.shuffle(seed=seed, buffer_size=buffer_size),
        buffer_size=buffer_size,
        is_file=path is not None,
    )


def _file_rows(path: str) -> Iterator[PlacedRow]:
    """Every rank reads, and so checks, every row: all of them end at a wrong one."""
    data_format = ""
    for number, (place, row) in enumerate(checked_rows(Path(path))):
        data_format = data_format or detect_format(row)
        yield {FIELDS: formats.format_fields(row, data_format), PLACE: f"{path}: {place}", NUMBER: number}


def _hub_row(row: dict[str, Any], name: str, data_format: str) -> PlacedRow:
    """Shards come in an order of their own, so that a row has no number; its beginning must tell which it is."""
    fields = formats.format_fields(row, data_format)
    return {FIELDS: fields, PLACE: f"{name}: the row that begins {str(fields)[:80]}"}

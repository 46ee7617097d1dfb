"""Read and check a data file row by row; errors name the file, the row and the line.

    >>> resolve_source("HuggingFaceH4/ultrachat_200k").kind
    'hub'

JSON lists, JSONL, CSV and Parquet are all streamed, so checking the first 32 MiB costs the same for any file size.
"""

import codecs
import contextlib
import csv
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from toolkit.data import formats
from toolkit.data.formats import NO_COLUMNS, Columns, Row, check_row, detect_format, field_names
from toolkit.data.text_files import MAX_ROW_BYTES, JsonList, Lines, ReadValue, describe_json_error, error_at, over_limit
from toolkit.errors import OverLimit, ToolkitError, nearest, shown
from toolkit.files.documents import Limits, open_file, parse_yaml, read_text
from toolkit.files.paths import user_path
from toolkit.units import GIB, MIB

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
MAX_LISTED = 20  # names in a message
JSONL_HINT = "a .jsonl file holds one JSON object per line; a .json file may hold a list of objects"
# A folder with this file is a copy of a hub data set, which `datasets` reads like the original.
DATASET_CARD = "README.md"
MAX_CARD_BYTES = 8 * MIB
CARD = Limits(values=200_000, depth=40)  # a data set in 2,000 languages has 20,000 values in its header
# One JSON object around all rows is in memory as a whole.
MAX_OBJECT_BYTES = GIB
PARQUET_BATCH_ROWS = 32
CHECKED_BYTES = 32 * MIB  # of a file, before a run

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """The `path` of a local file, or the `name` of a hub data set: its id, or a folder that holds a copy of it."""

    kind: Literal["file", "hub"]
    name: str
    path: Path | None = None
    config: str | None = None  # configuration of a hub data set; None for its only one
    columns: Columns = field(default_factory=dict, hash=False)  # what `--column` names; not all may be its own


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCheck:
    """A file whose checked rows are valid."""

    format: str
    rows: int  # number of checked rows: all rows if `complete`
    complete: bool


def is_hub_id(source: str) -> bool:
    """Return True if it reads as `owner/name`, and not as a data file in a folder."""
    return _HUB_ID.fullmatch(source) is not None and not source.lower().endswith(SUFFIXES)


def resolve_sources(
    names: Sequence[str], *, config: str | None = None, option: str = "dataset", columns: Columns | None = None
) -> list[DataSource]:
    """Return what `--dataset` names, with `--column` and the configuration of those from the hub. Downloads nothing.

    Raises ToolkitError for what `resolve_source` refuses, for the same data twice, and for a configuration that a copy
    of a hub data set does not have or that only files are given with.
    """
    sources = [replace(resolve_source(name), columns=columns or {}) for name in names]
    seen: dict[str, str] = {}
    for source in sources:
        key = source.name if source.path is None else str(source.path.resolve())
        if key in seen:
            other = f", also as {source.name}" if source.name != seen[key] else ""
            what = f"--{option} names {seen[key]} twice{other}"
            raise ToolkitError(what, hint="name it once; `--dataset_weights` repeats the rows of a data set")
        seen[key] = source.name
    if config is not None and all(source.kind == "file" for source in sources):
        what = f"--{option}_config {config[:80]}: {names[0]} is a file, and only a hub data set has configurations"
        raise ToolkitError(what, hint=f"leave `--{option}_config` out")
    return [_with_config(source, config, option) if source.kind == "hub" else source for source in sources]


def _with_config(source: DataSource, config: str | None, option: str) -> DataSource:
    listed = _configs(Path(source.name))
    names = [str(each["config_name"]) for each in listed]
    has_default = len(names) == 1 or any(each.get("default") or each["config_name"] == "default" for each in listed)
    if names and (config not in names if config is not None else not has_default):
        raise config_error(source.name, config, names, option=option)
    return replace(source, config=config)


def config_error(name: str, config: str | None, known: Sequence[str], *, option: str) -> ToolkitError:
    """Return an error that names the configurations of a hub data set; `config` None: one has to be chosen."""
    problem = "has several configurations" if config is None else f"has no configuration {shown(config)}; it has"
    close = nearest(config, known) if config is not None else None
    hint = f"`--{option}_config {known[0][:80]}`" if close is None else f"did you mean `--{option}_config {close}`?"
    return ToolkitError(f"data set {name!r} {problem}: {field_names(known, at_most=MAX_LISTED)}", hint=hint)


def _configs(folder: Path) -> list[dict[str, Any]]:
    card = folder / DATASET_CARD
    try:
        header = re.match(r"---\n(.*?)\n---", read_text(card, max_bytes=MAX_CARD_BYTES), re.DOTALL)
        content = parse_yaml(header[1], str(card), limits=CARD) if header else None
    except OverLimit:
        raise
    except ToolkitError:  # none is there, or one that the library reads in its own way
        return []
    listed = content.get("configs") if isinstance(content, dict) else None
    listed = listed if isinstance(listed, list) else []
    return [each for each in listed if isinstance(each, dict) and "config_name" in each]


def resolve_source(source: str) -> DataSource:
    """Return the local file or hub data set that a name means. Opens and downloads nothing.

    Raises ToolkitError for another folder than a copy of a hub data set (with its README.md), an unknown suffix, and a
    name that is neither.
    """
    path = user_path(source)
    try:
        if path.is_dir():
            if (path / DATASET_CARD).is_file():
                return DataSource(kind="hub", name=str(path))
            inside = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix.lower() in SUFFIXES)[:5])
            hint = f"it holds: {inside or 'no data file'}"
            raise ToolkitError(f"{source or '.'} is a folder, expected a data file", hint=hint)
        exists = path.exists()
    except OSError as error:
        raise ToolkitError(f"{source[:80]} cannot be read: {error.strerror}") from None
    if exists:
        _reader(path)
        return DataSource(kind="file", name=source, path=path)
    close = None
    with contextlib.suppress(OSError):
        close = nearest(path.name, [entry.name for entry in path.parent.iterdir() if entry.is_file()])
    if close is None and is_hub_id(source):
        return DataSource(kind="hub", name=source)
    hint = f"did you mean `{path.parent / close}`?" if close else "give a path to a file, or a hub id like `owner/name`"
    raise ToolkitError(f"no such data file: {source[:200]}", hint=hint)


def iter_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row and the row. Raises ToolkitError with file and place for what cannot be read."""
    return ((place, row) for place, row, _ in _read_rows(path))


def check_file(path: Path, *, max_bytes: int | None = CHECKED_BYTES, columns: Columns = NO_COLUMNS) -> FileCheck:
    """Check every row against the format of the first, up to about `max_bytes` (None: the whole file).

    Raises ToolkitError with file and place for the first invalid row.
    """
    data_format, rows = "", 0
    for data_format, (_, _, bytes_read) in checked_rows(path, columns):
        rows += 1
        if max_bytes is not None and bytes_read >= max_bytes:
            return FileCheck(format=data_format, rows=rows, complete=False)
    return FileCheck(format=data_format, rows=rows, complete=True)


def checked_rows(path: Path, columns: Columns = NO_COLUMNS) -> Iterator[tuple[str, ReadValue]]:
    """Yield the format of the first row, and each row, with columns renamed. Raises ToolkitError as `check_file`."""
    data_format = ""
    for value in _read_rows(path):
        try:
            if not data_format:
                data_format, columns = detect_format(value.value, columns), formats.columns_of(value.value, columns)
            value = value._replace(value=formats.with_columns(value.value, columns))
            check_row(value.value, data_format, columns)
        except ToolkitError as error:
            raise error_at(path, value.place, error.message, hint=error.hint) from None
        except RecursionError:
            raise error_at(path, value.place, "nested too deeply") from None
        yield data_format, value


def check_columns(columns: Columns, names: Sequence[str], hub_rows: Sequence[Row] = ()) -> None:
    """Raise ToolkitError for a column that neither the files have, in 32 MiB, nor the first rows from the hub."""
    paths = [path for name in names if (path := resolve_source(name).path) is not None]
    missing, seen = dict(columns), dict[str, Any]()
    if not columns or len(paths) + len(hub_rows) < len(names):  # the ranks, which load the others, check
        return
    read = (itertools.takewhile(lambda value: value.bytes_read < CHECKED_BYTES, _read_rows(path)) for path in paths)
    for row in itertools.chain(hub_rows, (value.value for each in read for value in each)):
        missing = {f: name for f, name in missing.items() if name not in row and formats.value_at(row, name) is None}
        if not missing:
            return
        seen |= row
    raise formats.no_column_error(next(iter(missing)), columns, seen)


def _read_rows(path: Path) -> Iterator[ReadValue]:
    empty = True
    try:
        for place, row, bytes_read in _reader(path)(path):
            if not isinstance(row, dict):
                raise error_at(path, place, f"the row is not an object but {json.dumps(row)[:40]}", hint=JSONL_HINT)
            empty = False
            yield ReadValue(place, row, bytes_read)
    except OSError as error:
        why = error.strerror or (str(error).splitlines() or ["no reason given"])[0]
        raise ToolkitError(f"{path} cannot be read: {why}") from None
    if empty:
        raise ToolkitError(f"{path} has no rows", hint="a data file needs at least one row")


def _reader(path: Path) -> Callable[[Path], Iterator[ReadValue]]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ToolkitError(f"{path}: unsupported data file", hint=f"supported suffixes: {', '.join(SUFFIXES)}")
    return reader


# -- text


def _read_jsonl(path: Path) -> Iterator[ReadValue]:
    lines, row = Lines(path), 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row += 1
        place = f"row {row}, line {number}"
        try:
            value = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            raise error_at(path, place, describe_json_error(error), hint=JSONL_HINT) from None
        yield ReadValue(place, value, lines.bytes_read)


def _read_csv(path: Path) -> Iterator[ReadValue]:
    """Records with their first lines. Strict, because an unclosed quote would otherwise swallow the file."""
    csv.field_size_limit(MAX_ROW_BYTES)  # a cell may hold a long document
    lines, header, number, place = Lines(path), list[str](), 0, "line 1"
    reader = csv.reader(iter(lines), strict=True)
    try:
        for record in reader:
            if not header:
                header = record
                if len(set(header)) < len(header):
                    raise error_at(path, place, f"two columns have the same name: {', '.join(header)}")
            elif record:
                number += 1
                if len(record) != len(header):
                    why = f"{len(record)} cells for {len(header)} columns ({', '.join(header)})"
                    raise error_at(path, f"row {number}, {place}", why)
                yield ReadValue(f"row {number}, {place}", dict(zip(header, record, strict=True)), lines.bytes_read)
            place = f"line {reader.line_num + 1}"
    except csv.Error as error:
        if "field limit" in str(error):
            raise over_limit(path, place) from None
        raise error_at(path, place, f"malformed CSV: {error}", hint="is a quote missing in this record?") from None


# -- JSON files


def _read_json(path: Path) -> Iterator[ReadValue]:
    """A list of objects, JSON lines, or one object around the list (`{"data": [...]}`)."""
    with open_file(path) as file:
        start = file.read(64 * 1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start == b"[":
        yield from JsonList(path).rows()
        return
    try:
        value = json.loads(next((line for line in Lines(path) if line.strip()), "null"))
        is_lines = start != b"{" or _wrapped_list(value) is None
    except (OverLimit, ValueError, RecursionError):  # the object has several lines, or is one long line
        is_lines = start != b"{"
    if is_lines:
        yield from _read_jsonl(path)  # it raises, or there are no rows, if there are no objects
        return
    text = read_text(path, max_bytes=MAX_OBJECT_BYTES)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise error_at(path, f"line {error.lineno}", describe_json_error(error)) from None
    except (ValueError, RecursionError) as error:
        raise ToolkitError(f"{path}: {describe_json_error(error)}") from None
    rows = _wrapped_list(value)
    for number, row in enumerate([value] if rows is None and value else rows or [], start=1):
        yield ReadValue(f"row {number}", row, len(text))


def _wrapped_list(value: object) -> list[Any] | None:
    """The only list in an object that is not a row itself."""
    if not isinstance(value, dict):
        return None
    lists = [item for item in value.values() if isinstance(item, list)]
    try:
        detect_format(value)
    except ToolkitError:
        return lists[0] if len(lists) == 1 else None
    return None


# -- Parquet


def _read_parquet(path: Path) -> Iterator[ReadValue]:
    import pyarrow
    import pyarrow.parquet

    number, bytes_read = 0, 0
    try:
        with open_file(path) as stream, pyarrow.parquet.ParquetFile(stream) as file:
            for index in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(index)
                if group.total_byte_size > MAX_ROW_BYTES * max(1, group.num_rows):  # on average, before one is decoded
                    raise over_limit(path, f"row group {index + 1}")
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                bytes_read += batch.nbytes
                for index, row in enumerate(batch.to_pylist()):
                    number += 1
                    if batch.nbytes > MAX_ROW_BYTES and batch.slice(index, 1).nbytes > MAX_ROW_BYTES:
                        raise over_limit(path, f"row {number}")
                    yield ReadValue(f"row {number}", row, bytes_read)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ToolkitError(f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}") from None


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}


# -- rows of several data sets in one epoch


def fractions(weights: Sequence[float]) -> list[float]:
    """Return weights as fractions of their sum."""
    return [weight / sum(weights) for weight in weights]


def rows_per_epoch(rows: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Return the rows that each data set contributes to an epoch: without weights, every row once.

    With weights, as many of each data set as its weight says: the one that lasts longest contributes each of its rows
    once, the others repeat theirs.

    >>> rows_per_epoch([503, 1000], [0.7, 0.3])
    [2333, 1000]
    """
    if weights is None:
        return list(rows)
    shares = fractions(weights)
    total = max(count / share for count, share in zip(rows, shares, strict=True))
    return [max(count, round(total * share)) for count, share in zip(rows, shares, strict=True)]


def repeated_rows(rows: int, count: int, *, seed: str) -> list[int]:
    """Return the indices of `count` of the rows: each `count // rows` times, and some, drawn by the seed, once more.

    >>> repeated_rows(2, 5, seed="42")
    [0, 1, 0, 1, 1]
    """
    times, rest = divmod(count, rows)
    return [*range(rows)] * times + sorted(random.Random(seed).sample(range(rows), rest))


def numbered(row: int, source: int, *, sources: int) -> int:
    """Return the number of a row among those of all data sets; with one data set, its own. Both count from 0."""
    return row * sources + source


def row_and_source(number: int, *, sources: int) -> tuple[int, int]:
    """Return the index of a row in its data set, and that of the data set: the reverse of `numbered`.

    >>> row_and_source(numbered(7, 1, sources=3), sources=3)
    (7, 1)
    """
    return divmod(number, sources)

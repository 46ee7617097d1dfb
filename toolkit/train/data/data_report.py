"""Statistics of the tokenised rows, printed before training starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import datasets

from toolkit.errors import ToolkitError
from toolkit.observe.batches import IGNORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of tokenised rows; tokens are of an epoch's rows, after truncation; in a stream, all of the first rows."""

    format: str
    rows: int  # all rows read, also those dropped
    dropped_rows: int  # rows without a supervised token
    epoch_rows: int | None  # rows of an epoch: those kept, with the repeats that weights ask for; None for a stream
    tokens: int
    supervised_tokens: int  # labels that are not -100, without the first position of each row, which nothing predicts


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats(Counts):
    """Counts of one data set of a run."""

    name: str  # file or hub id
    weight: float | None  # its share of the weights; None without `--dataset_weights`


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStats(Counts):
    """Counts of all data sets together."""

    truncated_rows: int  # rows longer than `max_seq_length`, kept or dropped
    longest_row_tokens: int  # before truncation: the `max_seq_length` that would truncate nothing
    sample: str  # the first row kept, decoded, with its supervised parts between « and »
    packs: int | None = None  # sequences that the rows were packed into; None without packing
    pack_fill_fraction: float | None = None  # tokens, as a fraction of the packs' capacity
    streamed: bool = False  # true for a stream, whose counts are of its first rows only
    sources: list[SourceStats] = field(default_factory=list)  # of the training data; empty for evaluation data


def system_prompt_lines(encoded: Sequence[datasets.Dataset], system_prompt: str | None) -> list[str]:
    """Return a warning if no row of any data set took the system prompt."""
    taken = system_prompt is None or any(any(rows["got_system_prompt"][:]) for rows in encoded)
    why = "every row read so far is plain text or has its own system message"
    return [] if taken else [f"warning: --system_prompt has no effect: {why}"]


def no_supervised_tokens_error(name: str, encoded: datasets.Dataset, max_seq_length: int) -> ToolkitError:
    """Return an error that explains why no row of the data set `name` has a supervised token."""
    rows, uncut = len(encoded), encoded["uncut_tokens"][:]
    truncated = sum(tokens > max_seq_length for tokens in uncut)
    hint = "check the roles and that the answers are not empty, or pass `--loss_on all`"
    why = f" ({truncated:,} were cut at max_seq_length={max_seq_length})" if truncated else ""
    why += ": no assistant turn, completion or text to learn from"
    if truncated == rows:
        hint = f"raise it: the longest row has {max(uncut):,} tokens"
        why = f": every prompt fills max_seq_length={max_seq_length}"
    return ToolkitError(f"{name}: no supervised token in any of the {rows:,} rows{why}", hint=hint)


def of_one_source(stats: DataStats, name: str, weight: float | None, **changes: int) -> SourceStats:
    """Return the counts of a data set, from the statistics of its rows; `changes` are those of an epoch."""
    counts = {each.name: getattr(stats, each.name) for each in fields(Counts)}
    return SourceStats(name=name, weight=weight, **counts | changes)


def of_all_sources(stats: Sequence[DataStats], sources: Sequence[SourceStats]) -> DataStats:
    """Return the statistics of several data sets: `stats` of the rows of each, `sources` what an epoch has of it."""
    counts = [source.epoch_rows for source in sources if source.epoch_rows is not None]
    return DataStats(
        format=", ".join(dict.fromkeys(source.format for source in sources)),
        rows=sum(each.rows for each in stats),
        dropped_rows=sum(each.dropped_rows for each in stats),
        epoch_rows=sum(counts) if len(counts) == len(sources) else None,
        truncated_rows=sum(each.truncated_rows for each in stats),
        tokens=sum(source.tokens for source in sources),
        supervised_tokens=sum(source.supervised_tokens for source in sources),
        longest_row_tokens=max(each.longest_row_tokens for each in stats),
        sample=stats[0].sample,
        sources=list(sources),
    )


def mark_supervised(row: dict[str, Any], tokenizer: Any) -> str:
    """Return the row's text, with « and » around its supervised parts."""
    marked = ""
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        marked += f"«{text}»" if supervised else text
    return marked


def preflight_lines(stats: DataStats) -> list[str]:
    """Return the report that is printed before training."""
    rows = f"streamed; of the first {stats.rows:,} rows" if stats.streamed else f"{stats.rows:,} rows"
    share = stats.supervised_tokens / stats.tokens
    lines = [f"data: {stats.format} format, {rows}, {stats.rows - stats.dropped_rows:,} kept"]
    if len(stats.sources) > 1:
        total = "" if stats.epoch_rows is None else f"; an epoch has {stats.epoch_rows:,} rows"
        lines.append(f"  from {len(stats.sources)} data sets{total}")
        lines += [_source_line(source, stats.epoch_rows) for source in stats.sources]
    lines += [
        f"  {stats.tokens:,} tokens, {stats.supervised_tokens:,} supervised ({share:.0%});"
        f" longest row {stats.longest_row_tokens:,} tokens",
        f"  {stats.truncated_rows:,} rows truncated, {stats.dropped_rows:,} dropped without a supervised token",
    ]
    if stats.packs is not None and stats.pack_fill_fraction is not None and stats.epoch_rows is not None:
        each, full = f"{stats.epoch_rows / stats.packs:.1f} rows", f"{stats.pack_fill_fraction:.1%} full"
        lines.append(f"  packed into {stats.packs:,} sequences of {each}, {full}; batch sizes count these sequences")
    sample = stats.sample if len(stats.sample) <= 1200 else f"{stats.sample[:600]} … {stats.sample[-600:]}"
    return [*lines, "  first row, supervised part between « and »:", *(f"  | {line}" for line in sample.splitlines())]


def _source_line(source: SourceStats, epoch_rows: int | None) -> str:
    """For example `faq.jsonl: alpaca, 503 rows; 70.0% of an epoch: 2,333 rows, each 4.64 times, 95,000 tokens`."""
    head = f"    {source.name}: {source.format}"
    if source.epoch_rows is None or epoch_rows is None:
        order = "one after the other" if source.weight is None else f"{source.weight:.1%} of the rows, at random"
        return f"{head}, {order}; of the first {source.rows:,} rows {source.tokens:,} tokens"
    kept = source.rows - source.dropped_rows
    share = f"{source.epoch_rows / epoch_rows:.1%} of an epoch: {source.epoch_rows:,} rows"
    repeated = f", each {source.epoch_rows / kept:.2f} times" if source.epoch_rows > kept else ""
    return f"{head}, {source.rows:,} rows; {share}{repeated}, {source.tokens:,} tokens"

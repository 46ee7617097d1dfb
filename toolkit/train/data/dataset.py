"""Training and evaluation data of a run, from the data arguments, as a Trainer takes them."""

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import torch

from toolkit.data import data_files
from toolkit.demo.assets import attribution
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import DataArguments
from toolkit.job.dataset_checks import check_val_size, held_out_rows
from toolkit.models.attention import needs_no_mask
from toolkit.observe.batches import IGNORED
from toolkit.parallel.layout import ParallelLayout
from toolkit.record.folder import RunFolder
from toolkit.train.data import data_report
from toolkit.train.data.collation import Collator, PackCollator, PackedRows
from toolkit.train.data.streaming import MixedRows, TokenStream, open_stream
from toolkit.train.data.tokenization import ENCODED, EncodedSource, encode_rows, load_rows, row_encoder

REPORTED_STREAM_ROWS = 100  # of a stream, tokenised before training for the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Datasets for training and evaluation, with their statistics."""

    train: Any
    stats: data_report.DataStats
    evaluation: Any = None
    evaluation_stats: data_report.DataStats | None = None
    warnings: list[str] = field(default_factory=list)


def load_data(
    tokenizer: Any, arguments: DataArguments, training: Any, *, data_parallel_size: int | None = None
) -> Data:
    """Load the data on every rank; rank 0 tokenises first and prints the report, the others read its cache.

    `data_parallel_size` is how many ranks, or groups of ranks, train on different rows; all ranks without it.
    """
    sources = data_files.resolve_sources(arguments.dataset, config=arguments.dataset_config, columns=arguments.column)
    loader = _Loader(tokenizer, arguments, training)
    data = loader.open_streams(sources) if arguments.streaming else None
    with training.main_process_first(desc="tokenising"):
        data = data or loader.load_all_rows(sources)
        if arguments.eval_dataset is not None:
            config, names = arguments.eval_dataset_config, [arguments.eval_dataset]
            [source] = data_files.resolve_sources(names, option="eval_dataset", config=config, columns=arguments.column)
            encoded = loader.encode(source, arguments.eval_dataset_split, option="eval_dataset")
            data = loader.with_evaluation(data, *encoded.supervised())
            sources = [*sources, source]
        data_files.check_columns(arguments.column or {}, [each.name for each in sources], loader.hub_rows)
    batch = training.train_batch_size * training.gradient_accumulation_steps
    batch *= data_parallel_size or training.world_size
    if arguments.packing and not arguments.streaming and len(data.train) < batch:
        raise ToolkitError(  # accelerate would silently repeat packs within a step
            f"the rows make {len(data.train)} packs, fewer than one global batch of {batch} sequences",
            hint="lower `--per_device_train_batch_size` or `--max_seq_length`, or leave `--packing` out",
        )
    if training.process_index == 0:
        credits = [f"data: {text}" for text in dict.fromkeys(map(attribution, arguments.dataset)) if text]
        print("\n".join([*credits, *data_report.preflight_lines(data.stats), *data.warnings]), flush=True)
        facts = {"data": asdict(data.stats)}
        if (stats := data.evaluation_stats) is not None:
            rows = f"{stats.rows:,} rows, {stats.rows - stats.dropped_rows:,} kept"
            print(f"evaluation data: {rows}, {stats.supervised_tokens:,} supervised tokens", flush=True)
            facts["eval_data"] = asdict(stats)
        RunFolder(Path(training.output_dir)).update_run(**facts)
    return data


class _Loader:
    def __init__(self, tokenizer: Any, arguments: DataArguments, training: Any) -> None:
        self.tokenizer, self.arguments, self.training = tokenizer, arguments, training
        self.seed = int(training.seed if training.data_seed is None else training.data_seed)
        self.hub_rows: list[dict[str, Any]] = []  # the first of each data set of the hub
        self.weights = tuple(arguments.dataset_weights) or None
        self.shares = data_files.fractions(self.weights) if self.weights else [None] * len(arguments.dataset)

    def load_all_rows(self, sources: Sequence[data_files.DataSource]) -> Data:
        """Tokenise every row before the first step; `val_size` holds some out for evaluation."""
        encoded = [self.encode(source, self.arguments.dataset_split) for source in sources]
        for index, source in enumerate(encoded if len(encoded) > 1 else ()):
            # A row's number then says which data set it is from.
            numbers = [data_files.numbered(row, index, sources=len(encoded)) for row in source.rows["row"][:]]
            rows = source.rows.remove_columns("row")
            rows = rows.add_column("row", numbers, feature=source.rows.features["row"])
            encoded[index] = replace(source, rows=rows)
        train, evaluation = self._hold_out(encoded)
        packs, stats = self._packed(*self._mixed(train))
        warnings = data_report.system_prompt_lines([source.rows for source in encoded], self.arguments.system_prompt)
        data = Data(train=packs, stats=stats, warnings=warnings)
        if evaluation is None:
            return data
        kept, own = EncodedSource(name="--val_size", rows=evaluation, encoder=encoded[0].encoder).supervised()
        return self.with_evaluation(data, kept, replace(own, format=stats.format))

    def open_streams(self, sources: Sequence[data_files.DataSource]) -> Data:
        """Tokenise rows during training; the statistics are of the first rows."""
        split, size = self.arguments.dataset_split, self.arguments.streaming_buffer_size
        streams = [open_stream(source, split, buffer_size=size, seed=self.seed) for source in sources]
        self.hub_rows += [next(iter(stream.rows)) for stream in streams if stream.source.path is None]
        first = []
        for source, stream in zip(sources, streams, strict=True):
            encoder = row_encoder(self.tokenizer, stream.data_format, self.arguments)
            head = enumerate(itertools.islice(stream.epoch(0), REPORTED_STREAM_ROWS))
            rows = [encoder.encode_row(row.fields, number=n, place=row.place_in(source.name)) for n, row in head]
            encoded = datasets.Dataset.from_list(rows, features=ENCODED)
            first.append(EncodedSource(name=source.name, rows=encoded, encoder=encoder))
        parts = [replace(source.supervised()[1], streamed=True, epoch_rows=None) for source in first]
        named = zip(parts, sources, self.shares, strict=True)
        described = [data_report.of_one_source(part, source.name, share) for part, source, share in named]
        mixed = MixedRows(streams=tuple(streams), weights=self.weights)
        encoders = [source.encoder for source in first]
        return Data(
            train=TokenStream(mixed, encoders, self.training, packing=self.arguments.packing),
            stats=replace(data_report.of_all_sources(parts, described), streamed=True),
            warnings=data_report.system_prompt_lines([source.rows for source in first], self.arguments.system_prompt),
        )

    def _mixed(self, sources: Sequence[EncodedSource]) -> tuple[datasets.Dataset, data_report.DataStats]:
        """The rows of an epoch: every row once, or as often as the weights ask for."""
        parts = [source.supervised() for source in sources]
        counts = data_files.rows_per_epoch([len(rows) for rows, _ in parts], self.weights)
        epochs, described = [], []
        for index, (source, (rows, stats), count) in enumerate(zip(sources, parts, counts, strict=True)):
            if count > len(rows):
                rows = rows.select(data_files.repeated_rows(len(rows), count, seed=f"{self.seed} {index}"))
            own = {"tokens": sum(rows["length"][:]), "supervised_tokens": sum(rows["supervised"][:])}
            own["epoch_rows"] = count
            epochs.append(rows)
            described.append(data_report.of_one_source(stats, source.name, self.shares[index], **own))
        return _concatenated(epochs), data_report.of_all_sources([stats for _, stats in parts], described)

    def _hold_out(self, sources: Sequence[EncodedSource]) -> tuple[Sequence[EncodedSource], datasets.Dataset | None]:
        """Rows for training and rows held out by `val_size`, chosen by index and seed before any row is repeated."""
        val_size, total = self.arguments.val_size, sum(len(source.rows) for source in sources)
        if val_size is None:
            return sources, None
        check_val_size(val_size, rows=total)
        chosen, offset = held_out(total, val_size, seed=self.training.seed), 0
        train, evaluation = [], []
        for source in sources:
            numbers = range(offset, offset := offset + len(source.rows))
            kept, own = ([i for i, n in enumerate(numbers) if (n in chosen) is held] for held in (False, True))
            if not kept:
                raise ToolkitError(f"--val_size {val_size} holds out every row of {source.name}", hint="lower it")
            train.append(replace(source, rows=source.rows.select(kept)))
            evaluation.append(source.rows.select(own))
        return train, _concatenated(evaluation)

    def with_evaluation(self, data: Data, dataset: datasets.Dataset, stats: data_report.DataStats) -> Data:
        """Add evaluation rows, packed like the training rows and sorted by length, since their order has no effect."""
        lengths = dataset["length"][:]
        longest_first = dataset.select(sorted(range(len(lengths)), key=lambda row: -lengths[row]))
        rows, stats = self._packed(longest_first, stats)
        # of every layout's number of different batches
        multiple = self.training.eval_batch_size * self.training.world_size
        return replace(data, evaluation=EvaluationRows(rows, multiple=multiple), evaluation_stats=stats)

    def encode(self, source: data_files.DataSource, split: str, *, option: str = "dataset") -> EncodedSource:
        """Tokenise every row of a data set."""
        rows, data_format = load_rows(source, split, option=option)
        self.hub_rows += [rows[0]] if source.path is None else []
        encoder = row_encoder(self.tokenizer, data_format, self.arguments)
        encoded = encode_rows(rows, encoder, num_proc=self.arguments.preprocessing_num_workers)
        return EncodedSource(name=source.name, rows=encoded, encoder=encoder)

    def _packed(self, dataset: datasets.Dataset, stats: data_report.DataStats) -> tuple[Any, data_report.DataStats]:
        if not self.arguments.packing:
            return dataset, stats
        packed = PackedRows(dataset, max_seq_length=self.arguments.max_seq_length)
        return packed, replace(stats, packs=len(packed), pack_fill_fraction=packed.fill_fraction)


def _concatenated(parts: list[datasets.Dataset]) -> datasets.Dataset:
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def make_collator(tokenizer: Any, model: Any, *, packing: bool, layout: ParallelLayout | None = None) -> Collator:
    """Return the collator for rows, or for packs in the shape that the model's attention takes."""
    if not packing:
        return Collator(tokenizer, pieces=1 if layout is None else layout.pieces)
    # Attention that takes the lengths of documents takes those of a single row.
    return PackCollator(tokenizer, one_row=needs_no_mask(getattr(model.config, "_attn_implementation", None)))


def row_places(numbers: tuple[int, ...], names: Sequence[str]) -> dict[str, Any]:
    """Return `rows`, counted from 1, and `places`: where they are in those of the data sets that are local files."""
    found = {data_files.row_and_source(number, sources=max(1, len(names))) for number in numbers}
    places: list[str] = []
    for index, name in enumerate(names):
        rows = {row for row, source in found if source == index}
        with contextlib.suppress(ToolkitError, OSError, TypeError, ValueError):
            path = data_files.resolve_source(name).path
            if path is not None and rows:
                read = enumerate(itertools.islice(data_files.iter_rows(path), max(rows) + 1))
                in_file = [place for number, (place, _) in read if number in rows]
                places += [f"{name}: {place}" for place in in_file] if len(names) > 1 else in_file
    in_order = sorted(found, key=lambda pair: pair[::-1])  # data set by data set, as their places
    return {"rows": [row + 1 for row, _ in in_order], "places": places}


def held_out(rows: int, val_size: float, *, seed: int) -> set[int]:
    """Return the numbers of the rows held out for evaluation, a fraction of them or so many; the same in every run."""
    return set(random.Random(seed).sample(range(rows), held_out_rows(rows, val_size)))


class EvaluationRows(torch.utils.data.Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Rows (or packs), filled up with unsupervised copies to a multiple of the sequences of a batch over all ranks."""

    def __init__(self, rows: Any, *, multiple: int) -> None:
        self.rows = rows
        self.length = -(-len(rows) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return dict(self.rows[index])
        row = dict(self.rows[0])
        return row | {"labels": [IGNORED] * len(row["labels"])}

"""Training and evaluation data of a run, from the data arguments.

`load_data` returns what the Trainer takes as `train_dataset` and `eval_dataset`, `make_collator` its `data_collator`.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets

from toolkit.errors import ToolkitError
from toolkit.run.folder import RunFolder
from toolkit.run.script_arguments import DataArguments
from toolkit.train.data.collation import Collator, PackCollator
from toolkit.train.data.data_report import DataStats, preflight_lines, system_prompt_lines
from toolkit.train.data.packing import PackedRows, packs_into_one_row, supports_partial_logits
from toolkit.train.data.stream_loader import batch_share
from toolkit.train.data.streaming import TokenStream, open_stream
from toolkit.train.data.tokenization import (
    RowEncoder,
    Tokenized,
    encode_rows,
    encoded_dataset,
    keep_supervised,
    load_rows,
    row_encoder,
)
from toolkit.train.metrics.evaluation import EvaluationRows, held_out

REPORTED_STREAM_ROWS = 100
"""Rows of a stream that are tokenised before training, for the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Datasets for training and evaluation, with their statistics."""

    train: Any
    stats: DataStats
    evaluation: Any = None
    evaluation_stats: DataStats | None = None
    warnings: list[str] = field(default_factory=list)


def load_data(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Load the data on every rank; rank 0 tokenises first and prints the report, the others read its cache."""
    _check_evaluation_arguments(arguments, training)
    data = _open_streamed_data(tokenizer, arguments, training) if arguments.streaming else None
    with training.main_process_first(desc="tokenising"):
        data = data or _load_all_rows(tokenizer, arguments, training)
        if arguments.eval_dataset is not None:
            evaluation_arguments = replace(
                arguments, dataset=arguments.eval_dataset, dataset_split=arguments.eval_dataset_split
            )
            evaluation, encoder = _encode_all(tokenizer, evaluation_arguments)
            data = _with_evaluation(data, keep_supervised(evaluation, encoder), arguments, training)
    if training.process_index == 0:
        print("\n".join([*preflight_lines(data.stats), *data.warnings]), flush=True)
        facts = {"data": asdict(data.stats)}
        if data.evaluation_stats is not None:
            stats = data.evaluation_stats
            rows = f"{stats.rows:,} rows, {stats.rows - stats.dropped_rows:,} kept"
            print(f"evaluation data: {rows}, {stats.supervised_tokens:,} supervised tokens", flush=True)
            facts["eval_data"] = asdict(data.evaluation_stats)
        RunFolder(Path(training.output_dir)).update_run(**facts)
    return data


def _check_evaluation_arguments(arguments: DataArguments, training: Any) -> None:
    """Raise ToolkitError for two sources of evaluation rows, or for none where the run evaluates."""
    evaluates = str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no"
    if arguments.eval_dataset is not None and arguments.val_size is not None:
        raise ToolkitError("both --eval_dataset and --val_size are given", hint="leave one of them out")
    if evaluates and arguments.val_size is None and arguments.eval_dataset is None:
        raise ToolkitError(
            "--eval_strategy is set, but there are no evaluation rows",
            hint="`--eval_dataset FILE`" + ("" if arguments.streaming else ", or `--val_size 0.05` to hold some out"),
        )


def _load_all_rows(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Tokenise every row before the first step; `val_size` holds some out for evaluation."""
    encoded, encoder = _encode_all(tokenizer, arguments)
    train, evaluation = _hold_out(encoded, arguments, training)
    rows, stats = _pack(keep_supervised(train, encoder), arguments)
    data = Data(train=rows, stats=stats, warnings=system_prompt_lines(encoded, arguments.system_prompt))
    if arguments.packing:
        _check_packs_fill_a_step(data, training)
    if evaluation is None:
        return data
    return _with_evaluation(data, keep_supervised(evaluation, encoder), arguments, training)


def _open_streamed_data(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Tokenise rows during training; the statistics are of the first rows."""
    rows = open_stream(
        str(arguments.dataset),
        arguments.dataset_split,
        buffer_size=arguments.streaming_buffer_size,
        seed=training.seed if training.data_seed is None else training.data_seed,
    )
    encoder = _encoder(tokenizer, arguments, rows.data_format)
    first = enumerate(itertools.islice(rows.epoch(0), REPORTED_STREAM_ROWS))
    encoded = encoded_dataset(
        [encoder.encode_row(row.fields, number=n, place=row.place_in(rows.name)) for n, row in first]
    )
    stats = replace(keep_supervised(encoded, encoder).stats, streamed=True)
    stream = TokenStream(rows, encoder, batch_share(training), packing=arguments.packing)
    return Data(train=stream, stats=stats, warnings=system_prompt_lines(encoded, arguments.system_prompt))


def _hold_out(
    encoded: datasets.Dataset, arguments: DataArguments, training: Any
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Rows for training and rows held out by `val_size`, chosen by index and seed alone."""
    if arguments.val_size is None:
        return encoded, None
    if arguments.val_size <= 0 or arguments.val_size >= len(encoded):
        raise ToolkitError(
            f"--val_size is {arguments.val_size}, expected a fraction below 1 or fewer than all {len(encoded)} rows"
        )
    chosen = held_out(len(encoded), arguments.val_size, seed=training.seed)
    train = encoded.select([index for index in range(len(encoded)) if index not in chosen])
    return train, encoded.select(sorted(chosen))


def _with_evaluation(data: Data, tokenized: Tokenized, arguments: DataArguments, training: Any) -> Data:
    """Add evaluation rows, packed like the training rows and sorted by length, since their order has no effect."""
    by_length = replace(tokenized, dataset=tokenized.dataset.sort("length", reverse=True))
    rows, stats = _pack(by_length, arguments)
    multiple = training.eval_batch_size * training.world_size
    return replace(data, evaluation=EvaluationRows(rows, multiple=multiple), evaluation_stats=stats)


def _encode_all(tokenizer: Any, arguments: DataArguments) -> tuple[datasets.Dataset, RowEncoder]:
    rows, data_format = load_rows(str(arguments.dataset), arguments.dataset_split)
    encoder = _encoder(tokenizer, arguments, data_format)
    return encode_rows(rows, encoder, num_proc=arguments.preprocessing_num_workers), encoder


def _encoder(tokenizer: Any, arguments: DataArguments, data_format: str) -> RowEncoder:
    return row_encoder(
        tokenizer=tokenizer,
        data_format=data_format,
        max_seq_length=arguments.max_seq_length,
        loss_on=arguments.loss_on,
        system_prompt=arguments.system_prompt,
    )


def _pack(tokenized: Tokenized, arguments: DataArguments) -> tuple[Any, DataStats]:
    """Packs of the rows, or the rows themselves without `--packing`."""
    if not arguments.packing:
        return tokenized.dataset, tokenized.stats
    packed = PackedRows(tokenized.dataset, max_tokens=arguments.max_seq_length)
    return packed, replace(tokenized.stats, packs=len(packed), pack_fill_fraction=packed.fill_fraction)


def _check_packs_fill_a_step(data: Data, training: Any) -> None:
    """accelerate would silently repeat packs within a step if they did not fill one global batch."""
    batch = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    if len(data.train) < batch:
        raise ToolkitError(
            f"the rows make {len(data.train)} packs, fewer than one global batch of {batch} sequences",
            hint="lower `--per_device_train_batch_size` or `--max_seq_length`, or leave `--packing` out",
        )


def make_collator(tokenizer: Any, model: Any, training: Any, *, packing: bool) -> Collator:
    """Return the collator for rows, or for packs in the shape that the model's attention takes."""
    if not packing:
        return Collator(tokenizer)
    partial_logits = supports_partial_logits(model, training)
    return PackCollator(tokenizer, one_row=packs_into_one_row(model), supervised_logits=partial_logits)

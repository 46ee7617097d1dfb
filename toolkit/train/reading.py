"""From the data arguments to what the Trainer iterates over, with a preflight printed once.

data = read_data(tokenizer, data_arguments, training)
Trainer(..., train_dataset=data.train, eval_dataset=data.evaluation, data_collator=collator(...))
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets

from toolkit.errors import ToolkitError
from toolkit.runs.arguments import DataArguments
from toolkit.runs.folder import RunFolder
from toolkit.train.batches import Collator, PackCollator
from toolkit.train.data_preflight import DataStats, preflight_lines, system_prompt_lines
from toolkit.train.evaluation import EvaluationRows, held_out
from toolkit.train.packing import PackedRows, gives_chosen_logits, packs_into_one_row
from toolkit.train.stream_loading import share_of
from toolkit.train.stream_rows import read_stream
from toolkit.train.streaming import TokenStream
from toolkit.train.tokens import (
    RowEncoder,
    Tokenized,
    encode_rows,
    encoded_dataset,
    keep_supervised,
    load_rows,
    row_encoder,
)

FIRST_ROWS = 100
"""Rows of a stream that are tokenised before the training starts, to show what they become."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is trained on, and what the evaluation loss is taken over, if anything."""

    train: Any
    stats: DataStats
    evaluation: Any = None
    evaluation_stats: DataStats | None = None
    warnings: list[str] = field(default_factory=list)


def read_data(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Tokenise on rank 0 first, the others from its cache, and print the preflight once."""
    check_evaluation_rows(arguments, training)
    data = streamed_data(tokenizer, arguments, training) if arguments.streaming else None
    with training.main_process_first(desc="tokenising"):
        data = data or whole_data(tokenizer, arguments, training)
        if arguments.eval_dataset is not None:
            evaluation, encoder = encoded_rows(tokenizer, evaluation_arguments(arguments))
            data = with_evaluation(data, keep_supervised(evaluation, encoder), arguments, training)
    if training.process_index == 0:
        print("\n".join([*preflight_lines(data.stats), *data.warnings]), flush=True)
        facts = {"data": asdict(data.stats)}
        if data.evaluation_stats is not None:
            print(evaluation_line(data.evaluation_stats), flush=True)
            facts["eval_data"] = asdict(data.evaluation_stats)
        RunFolder(Path(training.output_dir)).update_run(**facts)
    return data


def check_evaluation_rows(arguments: DataArguments, training: Any) -> None:
    """Refuse two sources of rows for evaluation, or none where evaluations are asked for."""
    asks = str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no"
    if arguments.eval_dataset is not None and arguments.val_size is not None:
        raise ToolkitError("both --eval_dataset and --val_size are given", hint="leave one of them out")
    if asks and arguments.val_size is None and arguments.eval_dataset is None:
        raise ToolkitError(
            "--eval_strategy asks for evaluations, and there are no rows for them",
            hint="`--eval_dataset FILE`" + ("" if arguments.streaming else ", or `--val_size 0.05` holds some out"),
        )


def whole_data(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Every row tokenised before the first step, without those that `val_size` holds out."""
    encoded, encoder = encoded_rows(tokenizer, arguments)
    train, evaluation = split(encoded, arguments, training)
    rows, stats = pack(keep_supervised(train, encoder), arguments)
    data = Data(train=rows, stats=stats, warnings=system_prompt_lines(encoded, arguments.system_prompt))
    if arguments.packing:
        check_packs_fill_a_step(data, training)
    if evaluation is None:
        return data
    return with_evaluation(data, keep_supervised(evaluation, encoder), arguments, training)


def streamed_data(tokenizer: Any, arguments: DataArguments, training: Any) -> Data:
    """Rows that are tokenised while they are trained on; the stats are of the first."""
    rows = read_stream(
        str(arguments.dataset),
        arguments.dataset_split,
        buffer_size=arguments.streaming_buffer_size,
        seed=training.seed if training.data_seed is None else training.data_seed,
    )
    encoder = encoder_of(tokenizer, arguments, rows.data_format)
    first = enumerate(itertools.islice(rows.epoch(0), FIRST_ROWS))
    encoded = encoded_dataset(
        [encoder.encode_row(row.fields, number=n, place=row.where(rows.name)) for n, row in first]
    )
    stats = replace(keep_supervised(encoded, encoder).stats, streamed=True)
    stream = TokenStream(rows, encoder, share_of(training), packing=arguments.packing)
    return Data(train=stream, stats=stats, warnings=system_prompt_lines(encoded, arguments.system_prompt))


def split(
    encoded: datasets.Dataset, arguments: DataArguments, training: Any
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The rows to train on, and those that `val_size` holds out, chosen by their number and the seed alone."""
    if arguments.val_size is None:
        return encoded, None
    if arguments.val_size <= 0 or arguments.val_size >= len(encoded):
        raise ToolkitError(
            f"--val_size is {arguments.val_size}, expected a fraction below 1 or fewer than all {len(encoded)} rows"
        )
    kept = held_out(len(encoded), arguments.val_size, seed=training.seed)
    train = encoded.select([index for index in range(len(encoded)) if index not in kept])
    return train, encoded.select(sorted(kept))


def evaluation_arguments(arguments: DataArguments) -> DataArguments:
    """As for training, of the other rows."""
    return replace(arguments, dataset=arguments.eval_dataset, dataset_split=arguments.eval_dataset_split)


def with_evaluation(data: Data, tokenized: Tokenized, arguments: DataArguments, training: Any) -> Data:
    """The same way of making sequences; neighbours of similar length, since their order changes nothing."""
    by_length = replace(tokenized, dataset=tokenized.dataset.sort("length", reverse=True))
    rows, stats = pack(by_length, arguments)
    multiple = training.eval_batch_size * training.world_size
    return replace(data, evaluation=EvaluationRows(rows, multiple=multiple), evaluation_stats=stats)


def evaluation_line(stats: DataStats) -> str:
    """What the evaluation loss is taken over."""
    rows = f"{stats.rows:,} rows, {stats.rows - stats.dropped_rows:,} kept"
    return f"evaluation data: {rows}, {stats.supervised_tokens:,} supervised tokens"


def encoded_rows(tokenizer: Any, arguments: DataArguments) -> tuple[datasets.Dataset, RowEncoder]:
    """Every row of `dataset` as tokens."""
    rows, data_format = load_rows(str(arguments.dataset), arguments.dataset_split)
    encoder = encoder_of(tokenizer, arguments, data_format)
    return encode_rows(rows, encoder, num_proc=arguments.preprocessing_num_workers), encoder


def encoder_of(tokenizer: Any, arguments: DataArguments, data_format: str) -> RowEncoder:
    """As the arguments say, for rows of one format."""
    return row_encoder(
        tokenizer=tokenizer,
        data_format=data_format,
        max_seq_length=arguments.max_seq_length,
        loss_on=arguments.loss_on,
        system_prompt=arguments.system_prompt,
    )


def pack(tokenized: Tokenized, arguments: DataArguments) -> tuple[Any, DataStats]:
    """The rows, or packs of them; and the stats that go with them."""
    if not arguments.packing:
        return tokenized.dataset, tokenized.stats
    packed = PackedRows(tokenized.dataset, max_tokens=arguments.max_seq_length)
    return packed, replace(tokenized.stats, packs=len(packed), pack_fill_fraction=packed.fill_fraction)


def check_packs_fill_a_step(data: Data, training: Any) -> None:
    """Fewer packs than one global batch would be repeated within a step without a word."""
    batch = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    if len(data.train) < batch:
        raise ToolkitError(
            f"the rows make {len(data.train)} packs, fewer than one global batch of {batch} sequences",
            hint="lower `--per_device_train_batch_size` or `--max_seq_length`, or leave `--packing` out",
        )


def collator(tokenizer: Any, model: Any, training: Any, *, packing: bool) -> Collator:
    """What makes batches of the rows, or of the packs in the shape that the model's attention wants."""
    if not packing:
        return Collator(tokenizer)
    chosen = gives_chosen_logits(model, training)
    return PackCollator(tokenizer, one_row=packs_into_one_row(model), supervised_logits=chosen)

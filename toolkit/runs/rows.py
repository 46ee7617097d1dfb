"""What a job asks of its rows before any is tokenised: enough for a step and, where they are streamed, a known end.

    >>> check_rows_fill_a_step(8, 4, "faq.jsonl")

No torch here: `toolkit train` asks before the launch, the ranks ask again.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError
from toolkit.runs.arguments import DataArguments
from toolkit.runs.argv import flag, integer

Arguments = dict[str, Any]

WORKERS = (0, 1, 2, 4, 8)
"""Processes of one rank that can tokenise a stream; 0: the rank itself."""


def check_rows_fill_a_step(rows: int | None, batch: int, dataset: str, *, packing: bool = False) -> None:
    """Fewer rows than one global batch would be repeated within a step without a word; None: not known yet."""
    if rows is None or rows >= batch:
        return
    made = ", which make no more packs than that" if packing else ""
    raise ToolkitError(
        f"{dataset} has {rows} rows{made}, fewer than one global batch of {batch} sequences",
        hint="lower `--per_device_train_batch_size`, `--gradient_accumulation_steps` or the number of processes",
    )


def check_streaming(arguments: Arguments) -> None:
    """Refuse what a stream cannot do: it has no length and no second look at a row."""
    if not flag(arguments.get("streaming", False)):
        return
    if integer(arguments, "max_steps", -1) <= 0:
        raise ToolkitError(
            "--streaming needs --max_steps: how many rows there are is not known before the last is read",
            hint="`--max_steps 1000`",
        )
    if arguments.get("val_size") is not None:
        raise ToolkitError(
            "--val_size with --streaming: no row can be held out of rows that are not known",
            hint="name other rows: `--eval_dataset FILE`",
        )
    order = str(arguments.get("train_sampling_strategy") or "random")
    if order != "random":
        raise ToolkitError(
            f"--train_sampling_strategy {order} with --streaming: rows are shuffled in a buffer as they come",
            hint="`--streaming_buffer_size 1` keeps the file's order; `--packing true` pads less",
        )
    if integer(arguments, "dataloader_num_workers", 0) not in WORKERS:
        raise ToolkitError(
            f"--dataloader_num_workers is {arguments['dataloader_num_workers']}, and a stream is shared out among"
            f" {', '.join(map(str, WORKERS[:-1]))} or {WORKERS[-1]} processes",
            hint=f"`--dataloader_num_workers {WORKERS[-1]}`",
        )


def without_streaming(arguments: Arguments) -> list[str]:
    """One line for an argument that streaming, or its absence, leaves without effect."""
    streams = flag(arguments.get("streaming", False))
    if streams and arguments.get("preprocessing_num_workers") is not None:
        return ["--preprocessing_num_workers has no effect with --streaming: `--dataloader_num_workers` has"]
    if not streams and "streaming_buffer_size" in arguments:
        return ["--streaming_buffer_size has no effect without --streaming"]
    return []


def streaming_buffer_size(arguments: Arguments) -> int:
    """Rows that a stream is shuffled among, on which its order depends; 0 where nothing is streamed."""
    if not flag(arguments.get("streaming", False)):
        return 0
    return integer(arguments, "streaming_buffer_size", DataArguments.streaming_buffer_size)

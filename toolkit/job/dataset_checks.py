"""Checks of a job's data before tokenization: weights, enough rows for a step, and the limits of streaming.

>>> check_rows_fill_a_step(8, 4, "faq.jsonl")

No torch here: `toolkit train` checks before the launch, and the ranks check again.
"""

import math

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.units import counted

WORKERS = (0, 1, 2, 4, 8)
"""Supported values of `--dataloader_num_workers` for a stream; 0 means that the rank itself tokenizes."""


def check_rows_fill_a_step(rows: int | None, batch: int, dataset: str, *, packing: bool = False) -> None:
    """Raise ToolkitError for fewer rows (None: not known) than one global batch, which a step would silently repeat."""
    if rows is None or rows >= batch:
        return
    packs = ", which make at most as many packed sequences" if packing else ""
    hint = "lower `--per_device_train_batch_size`, `--gradient_accumulation_steps` or the number of processes"
    what = f"{dataset} has {counted(rows, 'row')}{packs}, fewer than one global batch of {batch} sequences"
    raise ToolkitError(what, hint=hint)


def check_weights(job: Job) -> None:
    """Raise ToolkitError unless there is one weight above zero for each data set, or none at all."""
    names, weights = job.dataset, job.dataset_weights
    if not weights:
        return
    if len(weights) != len(names):
        raise ToolkitError(
            f"--dataset_weights has length {len(weights)}, expected {len(names)}: a weight for each data set",
            hint=f"one weight for each, in the order of --dataset: {', '.join(names) or 'none is given'}",
        )
    for weight in weights:
        if not 0 < weight < math.inf:
            hint = "leave a data set without rows out of --dataset"
            raise ToolkitError(f"--dataset_weights has {weight:g}, expected numbers above 0", hint=hint)


def check_streaming(job: Job) -> None:
    """Raise ToolkitError for arguments that need the length of a stream, or random access to its rows."""
    if not job.streaming:
        return
    if job.max_steps <= 0:
        hint = "`--max_steps 1000`"
        raise ToolkitError("--streaming needs --max_steps: the number of rows is not known in advance", hint=hint)
    if job.val_size is not None:
        hint = "use another file: `--eval_dataset FILE`"
        raise ToolkitError("--val_size with --streaming: rows cannot be held out of a stream", hint=hint)
    order = job.train_sampling_strategy
    if order != "random":
        raise ToolkitError(
            f"--train_sampling_strategy {order} with --streaming: rows are shuffled in a buffer",
            hint="`--streaming_buffer_size 1` keeps the file's order; `--packing true` pads less",
        )
    if job.dataloader_num_workers not in WORKERS:
        raise ToolkitError(
            f"--dataloader_num_workers is {job.dataloader_num_workers}, and a stream is divided among"
            f" {', '.join(map(str, WORKERS[:-1]))} or {WORKERS[-1]} processes",
            hint=f"`--dataloader_num_workers {WORKERS[-1]}`",
        )


def check_evaluation(job: Job) -> None:
    """Raise ToolkitError for two sources of evaluation rows, for none where the run evaluates, and for a bad size."""
    val_size, has_rows = job.val_size, job.eval_dataset is not None
    if val_size is not None:
        check_val_size(val_size)
    if has_rows and val_size is not None:
        raise ToolkitError("both --eval_dataset and --val_size are given", hint="leave one of them out")
    if job.evaluates and val_size is None and not has_rows:
        streams = job.streaming
        argument = "eval_strategy" if job.eval_strategy != "no" else "eval_on_start"
        hint = "`--eval_dataset FILE`" + ("" if streams else ", or `--val_size 0.05` to hold some out")
        raise ToolkitError(f"--{argument} is set, but there are no evaluation rows", hint=hint)


def check_val_size(val_size: float, *, rows: int | None = None) -> int:
    """Return the rows held out, 0 if `rows` is not known. Raises ToolkitError unless so many can be."""
    if val_size <= 0 or (val_size > 1 and val_size != int(val_size)) or (rows is not None and val_size >= rows):
        fewer = "a number of rows" if rows is None else f"fewer than all {rows} rows"
        raise ToolkitError(f"--val_size is {val_size:g}, expected a fraction below 1 or {fewer}")
    return 0 if rows is None else held_out_rows(rows, val_size)


def held_out_rows(rows: int, val_size: float) -> int:
    """Return how many rows `--val_size` holds out: a fraction of them below 1, otherwise that many.

    >>> held_out_rows(100, 0.05), held_out_rows(100, 5)
    (5, 5)
    """
    number = round(rows * val_size) if val_size < 1 else int(val_size)
    return max(1, min(number, rows - 1))


def streaming_warnings(job: Job) -> list[str]:
    """Return a warning for an argument that has no effect with or without streaming."""
    streams = job.streaming
    if streams and job.preprocessing_num_workers is not None:
        return ["--preprocessing_num_workers has no effect with --streaming: `--dataloader_num_workers` has"]
    if not streams and "streaming_buffer_size" in job.given:
        return ["--streaming_buffer_size has no effect without --streaming"]
    return []

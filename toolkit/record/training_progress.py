"""How training goes, from the rows of all ranks: the newest step as one line, and signs that the run diverged."""

import contextlib
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import StepRow, grad_norm, measure
from toolkit.units import counted, gib, number, seconds, speed, time_left

STEP_LINE = re.compile(r"step (?P<step>\d+)(?:/(?P<of>\d+))?  ")  # the beginning of what `step_line` returns
TAIL_BYTES = 2**14  # ranks are in the same step, give or take one; a row has about 700 bytes
# A loss this close to zero is not a likelihood: that of a policy gradient begins near 0 and may go anywhere.
SMALLEST_JUDGED_LOSS = 0.1
DIVERGED_RATIO = 1.5
COMPARED_STEPS = 7  # at each end of the run, or a tenth of it
LAST_STEPS = 3  # a run that explodes as it ends
# In standard errors. Of stationary losses of single sequences, fewer than 1 run of 200 is called (the test counts).
BEYOND_NOISE = 5.0


def newest_steps(folder: RunFolder, *, ranks: int, resumed_step: int) -> list[list[StepRow]]:
    """Return the rows of the newest steps that all ranks have written, read from the ends of their files."""
    by_rank = [_newest_rows(folder.rank_rows(rank), resumed_step) for rank in range(ranks)]
    common = reduce(lambda steps, rows: steps & rows.keys(), by_rank, set(by_rank[0]))
    return [[rows[step] for rows in by_rank] for step in sorted(common)]


def _newest_rows(path: Path, resumed_step: int) -> dict[int, StepRow]:
    rows = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValidationError):  # cut off, at either end
                row = StepRow.model_validate_json(line)
                if row.step_of_process == row.step - resumed_step:  # otherwise of an attempt that has ended
                    rows[row.step] = row
    return rows


def step_line(step: list[StepRow], *, max_steps: int, seconds_left: float | None) -> str:
    """Return one step as a line: mean loss and gradient norm, tokens per second and the largest peak of all ranks."""
    measured = measure([step], untimed_steps=0)
    norm, loss = measured.grad_norms[0], measured.losses[0] if measured.losses else None
    host, reserved = measured.peak_host_bytes, measured.peak_reserved_bytes
    peak = f"{gib(host)} RSS" if reserved is None else f"{gib(measured.peak_allocated_bytes)}, {gib(reserved)} reserved"
    parts = [
        f"step {step[0].step}" + (f"/{max_steps}" if max_steps > 0 else ""),  # a loop on accelerate does not tell
        f"loss {number(loss, 4)}",
        *([] if norm is None else [f"grad_norm {norm:.4g}"]),
        *map(seconds, measured.step_seconds),  # none where ranks share a GPU
        *([] if measured.tokens_per_second is None else [f"{speed(measured.tokens_per_second)} tokens/s"]),
        f"peak {peak}",
        *([] if seconds_left is None else [f"{time_left(seconds_left)} left"]),
    ]
    return "  ".join(parts)


# -- a run that diverged without an infinite loss


def untrained_steps(steps: Iterable[Sequence[StepRow]]) -> tuple[int, int] | None:
    """Return the first and last of the first consecutive steps whose gradient was exactly zero; None for no two."""
    found: list[int] = []
    for step in steps:
        if grad_norm(step) == 0:
            found.append(step[0].step)
        elif len(found) > 1:
            break
        else:
            found = []
    return (found[0], found[-1]) if len(found) > 1 else None


def loss_growth(losses: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the medians of the first and last losses of a run whose loss grew by half, beyond its noise; else None.

    Losses of small batches vary by half from step to step: the mean logarithms of both ends are compared in standard
    errors, by the differences of consecutive steps. A rate far too high spoils every step after the first: then that
    one alone is the beginning, and every other loss must be higher by half.
    """
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    compared = max(COMPARED_STEPS, len(known) // 10)
    if len(known) <= compared or min(known[:compared]) < SMALLEST_JUDGED_LOSS:
        return None
    logs = [math.log(max(loss, 1e-9)) for loss in known]
    squares = [(after - before) ** 2 for before, after in pairwise(logs)]
    later = squares[-max(compared, len(known) // 2) + 1 :]
    for first, last in itertools.product((1, compared), (compared, LAST_STEPS)):
        if first + last > len(known) or (first == 1 and min(known[1:]) <= DIVERGED_RATIO * known[0]):
            continue
        error = math.sqrt(statistics.fmean(squares[: first - 1] + later) / 2 * (1 / first + 1 / last))
        grown = statistics.fmean(logs[-last:]) - statistics.fmean(logs[:first])
        before, after = statistics.median(known[:first]), statistics.median(known[-last:])
        if after > DIVERGED_RATIO * before and grown > BEYOND_NOISE * error:
            return before, after
    return None


def signs_of_divergence(steps: list[list[StepRow]], losses: Sequence[float | None]) -> list[str]:
    """Return what suggests that a run that completed has diverged; empty for most runs."""
    signs = []
    # of a script that is not ours, which nothing stops; `losses` of a summary have None for what is not finite
    if bad := [step[0].step for step in steps if not all(math.isfinite(row.loss or 0) for row in step)]:
        signs.append(f"the loss was not finite in {counted(len(bad), 'step')}, first in step {bad[0]}")
    if grown := loss_growth(losses):
        signs.append(f"the loss grew from {number(grown[0], 4)} to {number(grown[1], 4)}")
    # One that is 0 from the first step on never trained: rewards that are all equal have no gradient.
    if (untrained := untrained_steps(steps)) and untrained[0] > steps[0][0].step:
        signs.append("grad_norm was exactly 0 in steps {} to {}".format(*untrained))
    return signs


def repeated_epoch(steps: list[list[StepRow]]) -> int | None:
    """Return the steps of an epoch whose batches, in their order, every later one has; None for one step, or others."""
    batches = [[row.batch_sha256 for row in step] for step in steps]
    period = next((n for n in range(1, len(batches) - 2) if batches[n] == batches[0]), 1)
    return period if period > 1 and any(batches[0]) and batches[period:] == batches[:-period] else None

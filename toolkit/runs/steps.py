"""Measured steps of a run, read from `ranks/rank*.jsonl`, and the speed and memory that they show.

>>> throughput(step_seconds=[9.0, 0.5, 0.5], tokens=[10, 1000, 1000], untimed_steps=1)
2000.0
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.runs.folder import RunFolder
from toolkit.runs.gpu_readings import energy_joules, throttle_reasons
from toolkit.runs.ladder import highest

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the steps of one run show; every speed leaves the untimed steps out, on both sides of the fraction."""

    steps: int
    timed_steps: int
    timed_seconds: float
    """Wall time of the timed steps, data loading included; evaluation, saving and logging are outside."""
    step_seconds: list[float]
    """Per step, the slowest rank."""
    step_tokens: list[int]
    """Per step, of all ranks, padding included."""
    step_non_padding_tokens: list[int]
    step_supervised_tokens: list[int]
    timed_step_numbers: list[int]
    """Places of the timed steps among all, from 1."""
    rank_skew: float | None
    """Median `own_seconds` of the slowest rank over those of the median rank."""
    step_seconds_median: float | None
    step_seconds_p90: float | None
    tokens_per_second: float | None
    """Tokens of all ranks, padding included."""
    non_padding_tokens_per_second: float | None
    supervised_tokens_per_second: float | None
    tokens_per_cpu_second: float | None
    """Tokens of all ranks over the processor time of all ranks: steady on a shared machine."""
    padding_fraction: float | None
    """Padding over all tokens of the timed steps."""
    losses: list[float]
    """Per step, the mean over ranks."""
    grad_norms: list[float | None]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_host_bytes: int | None
    """Largest resident set of one rank's process."""
    peak_rank: int | None
    """The rank of the allocated peak, or of the resident set where there is no allocator."""
    peak_driver_bytes: int | None
    """Largest that the driver counted for one rank's process, asked at most once a second."""
    allocator_retries: int | None
    """Of the rank with most."""
    memory_ladder: dict[str, Any] | None
    """After loading, first forward, first backward and first step: each rung's maximum over ranks."""
    energy_joules: float | None
    """Of all ranks' GPUs over the timed steps: mean power between readings times `timed_seconds`."""
    throttle_reasons: list[str] | None
    """Why a GPU's clocks were held down in a timed step; empty where none were."""
    batch_sha256: list[list[str]]
    """Per step, each rank's batches in the order trained."""


PER_STEP = (
    "step_seconds",
    "step_tokens",
    "step_non_padding_tokens",
    "step_supervised_tokens",
    "timed_step_numbers",
    "losses",
    "grad_norms",
    "batch_sha256",
)
"""What of it has a value a step: too much for a summary."""


def throughput(*, step_seconds: Sequence[float], tokens: Sequence[float], untimed_steps: int) -> float | None:
    """Tokens of the timed steps over the time of the same steps; None when no step is timed."""
    seconds = math.fsum(step_seconds[untimed_steps:])
    return sum(tokens[untimed_steps:]) / seconds if seconds > 0 else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile: the smallest value with at least `share` of the values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def read_rows(path: Path) -> list[Row]:
    """Rows of one rank; a last line that was cut off while being written is left out."""
    rows: list[Row] = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def read_steps(folder: RunFolder) -> list[list[Row]]:
    """Per step, the rows of all ranks in rank order; only steps that every rank finished."""
    paths = sorted((folder.path / "ranks").glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    ranks = [read_rows(path) for path in paths]
    return [list(step) for step in zip(*ranks, strict=False)]


def measure(steps: list[list[Row]], *, untimed_steps: int) -> Measured:
    """Reduce the rows of all ranks: seconds by the slowest rank, tokens by sum, peaks by maximum.

    A run that was resumed has untimed steps again, since its processes are new.
    """
    step_seconds = _over_ranks(steps, "seconds", max)
    timed_steps = {
        number: step
        for number, step in enumerate(steps, 1)
        if step[0].get("step_of_process", number) > untimed_steps and not step[0].get("profiled")
    }
    timed_rows = list(timed_steps.values())
    timed = _over_ranks(timed_rows, "seconds", max)
    by_rank = list(zip(*timed_rows, strict=True))
    tokens, non_padding = _over_ranks(timed_rows, "tokens", sum), _over_ranks(timed_rows, "non_padding_tokens", sum)

    def rate(counted: list[float], clock: list[float] = timed) -> float | None:
        return throughput(step_seconds=clock, tokens=counted, untimed_steps=0)

    return Measured(
        steps=len(steps),
        timed_steps=len(timed),
        timed_seconds=math.fsum(timed),
        step_seconds=step_seconds,
        step_tokens=_counted(steps, "tokens"),
        step_non_padding_tokens=_counted(steps, "non_padding_tokens"),
        step_supervised_tokens=_counted(steps, "supervised_tokens"),
        timed_step_numbers=list(timed_steps),
        rank_skew=rank_skew(timed_rows),
        step_seconds_median=statistics.median(timed) if timed else None,
        step_seconds_p90=percentile(timed, 0.9),
        tokens_per_second=rate(tokens),
        non_padding_tokens_per_second=rate(non_padding),
        supervised_tokens_per_second=rate(_over_ranks(timed_rows, "supervised_tokens", sum)),
        tokens_per_cpu_second=rate(tokens, _over_ranks(timed_rows, "cpu_seconds", sum)),
        padding_fraction=_padding(tokens, non_padding),
        losses=_over_ranks(steps, "loss", lambda losses: math.fsum(losses) / len(losses)),
        grad_norms=[grad_norm(step) for step in steps],
        batch_sha256=[[row["batch_sha256"] for row in step] for step in steps],
        memory_ladder=highest(row.get("memory_ladder") for step in steps for row in step),
        energy_joules=energy_joules(by_rank, seconds=math.fsum(timed)),
        throttle_reasons=throttle_reasons(by_rank),
        **_peaks(steps),
    )


def rank_skew(steps: list[list[Row]]) -> float | None:
    """How much longer the slowest rank takes than the median one, where ranks do not wait for each other.

    The lower median: of two ranks, the faster. None where a row does not say.
    """
    if not steps or any(not row.get("own_seconds") for step in steps for row in step):
        return None
    of_ranks = [statistics.median(seconds) for seconds in zip(*_own_seconds(steps), strict=True)]
    return float(max(of_ranks) / statistics.median_low(of_ranks))


def _own_seconds(steps: list[list[Row]]) -> list[list[float]]:
    return [[row["own_seconds"] for row in step] for step in steps]


def _padding(tokens: Sequence[float], non_padding: Sequence[float]) -> float | None:
    return 1 - sum(non_padding) / sum(tokens) if sum(tokens) else None


def grad_norm(step: list[Row]) -> float | None:
    """The gradient norm before clipping over all ranks; shares of a sharded norm add up as squares."""
    if step[0]["grad_norm"] is not None:
        return float(step[0]["grad_norm"])
    shares, ranks = [row.get("local_grad_norm") for row in step], step[0].get("grad_norm_ranks")
    if ranks is None or None in shares:
        return None
    return math.sqrt(math.fsum(share * share for share in shares if share is not None) * ranks / len(step))


def _counted(steps: list[list[Row]], key: str) -> list[int]:
    return [sum(row[key] for row in step) for step in steps]


def _over_ranks(steps: list[list[Row]], key: str, reduce: Callable[[list[float]], float]) -> list[float]:
    return [reduce([row[key] for row in step]) for step in steps]


def _peaks(steps: list[list[Row]]) -> dict[str, int | None]:
    """Maximum over steps and ranks of each peak, and the rank that the largest was on."""
    rows = [row for step in steps for row in step]
    peaks = {key: _largest(rows, key) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")}
    deciding = "peak_allocated_bytes" if peaks["peak_allocated_bytes"] is not None else "peak_host_bytes"
    holder = next((row["rank"] for row in rows if row[deciding] and row[deciding] == peaks[deciding]), None)
    counted = {"peak_driver_bytes": _largest(rows, "driver_bytes"), "peak_rank": holder}
    return peaks | counted | {"allocator_retries": _largest(rows, "allocator_retries")}


def _largest(rows: list[Row], key: str) -> int | None:
    return max((row[key] for row in rows if row.get(key) is not None), default=None)

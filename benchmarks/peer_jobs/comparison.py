"""Figures of finished runs: speed, memory, whether a program ran the same job, and ratios to ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from peer_jobs.job import Job
from toolkit.compare.significance import mean_interval

# Of the first loss, before anything was learned: the rows, their order and length, and the model are the same.
FIRST_LOSS_BAND = 1e-3
# Of every later loss. Full fine-tuning repeats the bare Trainer's arithmetic; LoRA starts from other random weights.
LOSS_BANDS = {"full": 0.01, "lora": 0.05}
COMPARED = ("tokens_per_second", "tokens_per_cpu_second", "peak_pss_bytes", "first_step_seconds")
FACTLESS = ("step", "time", "cpu_seconds", "loss", "resumed")


def figures(record: dict[str, Any], untimed_steps: int, tokens_per_step: int) -> dict[str, Any]:
    """Return the figures of one finished run from what was recorded of it."""
    ranks = record["ranks"]
    numbers = range(untimed_steps, len(ranks[0]))
    seconds = sum(last(ranks, number) - last(ranks, number - 1, goes_on=True) for number in numbers)
    cpu = sum(step_cpu_seconds(ranks, number) for number in numbers)
    tokens = len(numbers) * tokens_per_step
    peaks = [rank[-1]["peak_allocated_bytes"] for rank in ranks if "peak_allocated_bytes" in rank[-1]]
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "first_step_seconds": max(rank[0]["time"] for rank in ranks) - record["started"],
        "peak_pss_bytes": record["peak_pss_bytes"],
        "peak_allocated_bytes": max(peaks) if peaks else None,
        "cpu_seconds": record["cpu_seconds"],
        "losses": [step.get("loss") for step in ranks[0]],
        "facts": {name: value for name, value in ranks[0][0].items() if name not in FACTLESS},
        "num_ranks": len(ranks),
    }


def step_cpu_seconds(ranks: Sequence[Sequence[dict[str, Any]]], number: int) -> float:
    """Return the processor time of all ranks in a step."""
    turns = [(resumed(rank[number - 1]), rank[number]) for rank in ranks]
    return float(sum(after["cpu_seconds"] - before["cpu_seconds"] for before, after in turns))


def resumed(step: dict[str, Any]) -> dict[str, float]:
    """Return the clocks when a rank went on after a step: later than its end, where programs train in turns."""
    return step.get("resumed", step)


def last(ranks: Sequence[Sequence[dict[str, Any]]], number: int, *, goes_on: bool = False) -> float:
    """Return when the last rank had done a step, or when it went on after it."""
    steps = [rank[number] for rank in ranks]
    return max((resumed(step) if goes_on else step)["time"] for step in steps)


def differences(own: dict[str, Any], bare: dict[str, Any], job: Job) -> list[str]:
    """Return how a run's job differs from the bare Trainer's; empty if it is the same job."""
    found = []
    if own["num_ranks"] != job.ranks:
        found.append(f"{own['num_ranks']} of {job.ranks} ranks trained")
    if own["facts"]["engine"] != job.preset:
        found.append(f"ran as {own['facts']['engine']}")
    for name in ("trained_parameters", "trained_dtypes", "activation_checkpointing"):
        if own["facts"][name] != bare["facts"][name]:
            found.append(f"{name}: {own['facts'][name]}, bare Trainer: {bare['facts'][name]}")
    if len(own["losses"]) != len(bare["losses"]) or None in own["losses"]:
        return [*found, f"{len(own['losses'])} steps with a loss, bare Trainer: {len(bare['losses'])}"]
    comparable = comparable_losses(own["losses"], bare["losses"], job.setting.max_length)
    losses = list(zip(comparable, bare["losses"], strict=True))
    first = relative(*losses[0])
    if first > FIRST_LOSS_BAND:
        found.append(f"first loss {losses[0][0]:.4f}, bare Trainer: {losses[0][1]:.4f}")
    elif (largest := max(relative(*pair) for pair in losses)) > LOSS_BANDS[job.method]:
        found.append(f"losses differ by up to {largest:.1%}: last {losses[-1][0]:.4f}, bare: {losses[-1][1]:.4f}")
    return found


def comparable_losses(own: Sequence[float], bare: Sequence[float], max_length: int) -> list[float]:
    """Return losses that are divided by the number of predicted tokens, one fewer per row than its tokens.

    transformers 5.6.0, LLaMA-Factory's, divides by all tokens of a row, which makes every loss smaller by that factor.

    >>> comparable_losses([3.0], [4.0], max_length=4)
    [4.0]
    """
    factor = max_length / (max_length - 1)
    scaled = [loss * factor for loss in own]
    return scaled if relative(scaled[0], bare[0]) < relative(own[0], bare[0]) else list(own)


def relative(own: float, other: float) -> float:
    return abs(own - other) / abs(other)


def row(runs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of a program's repeats, and our geometric mean ratio to it with its 95 % CI (None for one repeat).

    A run is a dictionary with `repeat` and `figures`; a ratio pairs the repeats that both finished.
    """
    own_by_repeat = {run["repeat"]: run["figures"] for run in ours}
    both = [(own_by_repeat[run["repeat"]], run["figures"]) for run in runs if run["repeat"] in own_by_repeat]
    measured = [name for name in COMPARED if runs[0]["figures"][name] is not None]
    medians = {name: statistics.median(run["figures"][name] for run in runs) for name in measured}
    ratios: dict[str, Any] = {}
    for name in measured if both else ():
        values = [own[name] / other[name] for own, other in both]
        interval = mean_interval(values)
        ratios[name] = {"ratio": statistics.geometric_mean(values), "interval": list(interval) if interval else None}
    return {"repeats": len(runs), "medians": medians, "ours_over_theirs": ratios}

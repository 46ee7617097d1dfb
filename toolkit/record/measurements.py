"""The measurements of a run: speed, memory and energy, computed from the rows in `ranks/rank*.jsonl`."""

import contextlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files import write_text
from toolkit.files.documents import explain, read_json_lines
from toolkit.record.columns import (
    Bytes,
    Column,
    Count,
    Fraction,
    Measured,
    Model,
    Number,
    PerStep,
    PositiveCount,
    Repeats,
    column_of,
)
from toolkit.record.folder import RunFolder
from toolkit.units import fixed, number, percent, speed

RANK_ROWS = re.compile(r"rank\d{1,9}\.jsonl")
DAMAGED_ROW = "move the line to another file: its step is left out"
NonNegativeFinite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MEMORY_PHASES = ("load", "forward", "backward", "step")  # the points of a run at which the memory in use is read once


class MemoryByPhase(Model):
    """Bytes of one rank after each phase of its first step, each the maximum over ranks and repeats."""

    bytes_of: str
    """`allocated` by CUDA's allocator, or on a CPU `rss`."""
    load: Annotated[Bytes, Column(unit="bytes")] = None
    """Before the first step."""
    forward: Annotated[Bytes, Column(unit="bytes")] = None
    """After the forward pass of the first accumulation step."""
    backward: Annotated[Bytes, Column(unit="bytes")] = None
    """After its backward pass."""
    step: Annotated[Bytes, Column(unit="bytes")] = None
    """After the optimizer step, gradients released."""


def _tokens_per(heading: str, repeats: Repeats | None = None) -> Column:
    return Column(heading, speed, unit="tokens/s", repeats=repeats, is_speed=True)


def _step(heading: str) -> Column:
    return Column(heading, fixed(3), unit="s", repeats=Repeats.COMMON_STEPS, is_speed=True)


def _peak(heading: str, repeats: Repeats = Repeats.LARGEST) -> Column:
    return Column(heading, unit="bytes", repeats=repeats)


def _document(repeats: Repeats) -> Column:
    return Column(repeats=repeats, in_csv=False)


class Figures(Model):
    """What is measured in one run, and of a row over its repeats. What was not measured is None."""

    tokens_per_second: Annotated[Measured, _tokens_per("tokens/s", Repeats.COMMON_STEPS)] = None
    """Tokens of the timed steps, padding included, over their wall time, all ranks together. Null where parity
    failed."""
    non_padding_tokens_per_second: Annotated[Measured, _tokens_per("non-padding\ntokens/s")] = None
    """The same without padding."""
    supervised_tokens_per_second: Annotated[Measured, _tokens_per("supervised\ntokens/s", Repeats.GEOMETRIC_MEAN)] = (
        None
    )
    """The same of tokens that the loss counts."""
    tokens_per_cpu_second: Annotated[Measured, _tokens_per("tokens per\nCPU-second", Repeats.GEOMETRIC_MEAN)] = None
    """Tokens over all ranks' CPU time. Steadier than wall time on a shared node."""
    padding_fraction: Annotated[Fraction, Column("padding", percent, repeats=Repeats.MIDDLE)] = None
    """Padding tokens over all tokens (0 to 1)."""
    timed_steps: Annotated[Count, Column("timed\nsteps", fixed(0))] = 0
    """Optimizer steps that the speeds count. Of a row, in each repeat."""
    timed_seconds: Annotated[Measured, Column("timed\ns", fixed(1), unit="s", repeats=Repeats.MEDIAN)] = None
    """Their wall time, with data loading, without evaluation, saving and logging."""
    step_seconds_median: Annotated[Measured, _step("step\nmedian s")] = None
    """Median of the timed steps, data loading included."""
    step_seconds_p90: Annotated[Measured, _step("step\np90 s")] = None
    """Their 90th percentile."""
    rank_skew: Annotated[Measured, Column("rank\nskew", fixed(2), repeats=Repeats.GEOMETRIC_MEAN)] = None
    """Own work (data loading, first forward, optimizer) of the slowest rank over the median rank's. 1 where none delays
    the others."""
    ranks_per_gpu: Annotated[Count | None, Column(repeats=Repeats.MIDDLE)] = None
    """Ranks that shared each GPU, which leaves the run without speeds."""
    peak_allocated_bytes: Annotated[Bytes, _peak("peak\nallocated\n{unit}")] = None
    """Peak of CUDA's allocator on the largest rank."""
    peak_reserved_bytes: Annotated[Bytes, _peak("peak\nreserved\n{unit}")] = None
    """Peak that it reserved."""
    peak_host_bytes: Annotated[Bytes, _peak("peak\nRSS\n{unit}")] = None
    """Peak resident host memory (RSS) of the largest rank, libraries included."""
    peak_rank: Annotated[Count | None, Column("on\nrank", fixed(0))] = None
    """The rank with the highest peak."""
    peak_driver_bytes: Annotated[Bytes, _peak("peak\ndriver\n{unit}", Repeats.LARGEST_OF_ALL)] = None
    """Highest memory of one rank by the driver (NVML, once per second), context and libraries included."""
    allocator_retries: Annotated[Count | None, Column("re-\ntries", fixed(0), repeats=Repeats.LARGEST_OF_ALL)] = None
    """Times that the allocator freed its cache and retried."""
    memory_by_phase: Annotated[MemoryByPhase | None, _document(Repeats.LARGEST_OF_ALL)] = None
    """Bytes of one rank after each phase of its first step."""
    energy_joules: Annotated[
        Measured, Column("energy\nkJ", lambda joules: number(joules / 1000, 1), unit="J", repeats=Repeats.MEDIAN_OF_ALL)
    ] = None
    """Energy of all GPUs over the timed steps (NVML: mean power times `timed_seconds`)."""
    throttle_reasons: Annotated[tuple[str, ...] | None, _document(Repeats.UNION_OF_ALL)] = None
    """Why GPU clocks were reduced in a timed step."""
    recompilations_after_first_steps: Annotated[Count | None, _document(Repeats.LARGEST_OF_ALL)] = None
    """Graphs compiled in the timed steps."""
    graph_breaks_after_first_steps: Annotated[Count | None, _document(Repeats.LARGEST_OF_ALL)] = None
    """Graph breaks in the timed steps."""
    first_loss: Annotated[Number, Column(repeats=Repeats.MIDDLE)] = None
    """Loss of the first step."""
    last_loss: Annotated[Number, Column("last\nloss", fixed(4), repeats=Repeats.MIDDLE)] = None
    """Loss of the last step."""
    losses: Annotated[PerStep, _document(Repeats.MIDDLE)] = ()
    """Loss of each step, mean over ranks."""
    grad_norms: Annotated[PerStep, _document(Repeats.MIDDLE)] = ()
    """Gradient norm of each step before clipping."""
    step_seconds: Annotated[PerStep, _document(Repeats.MIDDLE)] = ()
    """Seconds of each step on the slowest rank, untimed steps included."""


class Measurements(Figures):
    """The figures of one run, and what its parity with another is checked by."""

    step_tokens: tuple[Count | None, ...] = ()
    """Tokens of each step, padding included, all ranks; None, as the next, where a script's batches do not show it."""
    timed_step_numbers: tuple[PositiveCount, ...] = ()
    """Numbers, from 1, of the steps that the speeds count."""
    step_non_padding_tokens: tuple[Count | None, ...] = ()
    """Tokens of each step without padding, all ranks."""
    step_supervised_tokens: tuple[Count | None, ...] = ()
    """Tokens of each step that the loss counts, all ranks."""
    batch_sha256: tuple[tuple[str, ...], ...] = ()
    """Digest of each rank's batches in each step, in training order."""

    def summary(self) -> dict[str, Any]:
        """Return what has one value per run, with the number of steps that every rank completed."""
        lists = [key for key, value in self if isinstance(value, tuple) and key != "throttle_reasons"]
        return {"steps": len(self.step_tokens), **self.model_dump(exclude=set(lists))}


# What is not measured where ranks share a GPU.
WITHOUT_SPEEDS: dict[str, Any] = {
    **{key: None for key in Measurements.model_fields if column_of(Measurements, key).is_speed},
    **dict.fromkeys(("timed_seconds", "rank_skew", "tokens_per_cpu_second", "energy_joules")),
    **{"timed_steps": 0, "step_seconds": (), "timed_step_numbers": ()},
}


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value with at least `share` of the values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


class GpuReading(BaseModel):
    """What NVML reported at the end of a step."""

    model_config = ConfigDict(strict=True)

    monotonic_seconds: NonNegativeFinite
    energy_joules: NonNegativeFinite | None = None
    throttle_reasons: list[str] | None = None


class StepRow(BaseModel):
    """One step of one rank, as the timer writes it; a rehearsal and a CPU lack what has a default."""

    model_config = ConfigDict(strict=True)

    step: PositiveInt
    step_of_process: PositiveInt | None = None
    rank: NonNegativeInt
    world_size: PositiveInt | None = None
    preset: str | None = None
    ranks_per_gpu: PositiveInt | None = None  # ranks that shared its GPU; None where it had its own
    seconds: NonNegativeFinite
    own_seconds: NonNegativeFinite | None = None
    data_seconds: NonNegativeFinite | None = None
    cpu_seconds: NonNegativeFinite
    tokens: NonNegativeInt | None  # None, as the next two, where the batches of a script do not show it
    non_padding_tokens: NonNegativeInt | None
    supervised_tokens: NonNegativeInt | None
    loss: float | None  # None in a rehearsal only; not finite in a run that diverged
    grad_norm: float | None = None
    local_grad_norm: float | None = None
    grad_norm_ranks: PositiveInt | None = None
    batch_sha256: str
    peak_allocated_bytes: NonNegativeInt | None
    peak_reserved_bytes: NonNegativeInt | None
    allocator_retries: NonNegativeInt | None = None
    driver_bytes: NonNegativeInt | None = None
    gpu_reading: GpuReading | None = None
    peak_host_bytes: NonNegativeInt | None
    memory_by_phase: MemoryByPhase | None = None
    profiled: bool = False
    compiled_graphs: NonNegativeInt | None = None
    graph_breaks: NonNegativeInt | None = None
    rehearsed: bool = False

    def to_line(self) -> str:
        """Return the line of a rank's file, without the flags and counts that are not set."""
        values = {name: value for name, value in self.model_dump().items() if name in self.model_fields_set}
        return json.dumps(values) + "\n"


def read_rows(path: Path) -> list[StepRow]:
    """Return a rank's rows, without a last line that was cut off. Raises ToolkitError for any other damage."""
    rows = []
    for name, content in read_json_lines(path, allow_nan=True, hint=DAMAGED_ROW):
        try:
            rows.append(StepRow.model_validate(content))
        except ValidationError as error:
            raise ToolkitError(f"{name}: {explain(error)}", hint=DAMAGED_ROW) from None
    return rows


def written_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one rank as a process that was killed left them: those before a missing or damaged line."""
    rows = []
    with contextlib.suppress(ToolkitError):
        for _, content in read_json_lines(path, allow_nan=True):
            if type(content.get("step")) is int:
                rows.append(content)
    return rows


def last_step(path: Path) -> int:
    """Return the last step in the rows of one rank, 0 without any; rows after a damaged one do not count."""
    rows = written_rows(path)
    return int(rows[-1]["step"]) if rows else 0


def drop_rows_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the rows up to `step`, where the run resumes, and return the others: their steps are trained again."""
    rows = written_rows(path)
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
    return [row for row in rows if row["step"] > step]


def read_steps(folder: RunFolder) -> list[list[StepRow]]:
    """Return each step's rows in rank order, where every rank completed it. Raises ToolkitError as `read_rows`."""
    paths = [path for path in (folder.path / "ranks").glob("rank*.jsonl") if RANK_ROWS.fullmatch(path.name)]
    steps: dict[int, dict[int, StepRow]] = {}
    for rank, path in sorted((int(path.stem.removeprefix("rank")), path) for path in paths):
        for row in read_rows(path):
            steps.setdefault(row.step, {})[rank] = row
    by_step = [list(rows.values()) for _, rows in sorted(steps.items())]
    # As many ranks as there are files, where the rows do not say how many the run had.
    return [rows for rows in by_step if len(rows) == next((r.world_size for r in rows if r.world_size), len(paths))]


def measure(steps: list[list[StepRow]], *, untimed_steps: int) -> Measurements:
    """Reduce the rows of all ranks: seconds by the slowest rank, tokens by sum, peaks by maximum.

    A resumed run has untimed steps again, since its processes are new. Where it resumed under another preset or number
    of ranks, speeds and peaks are those of its last. Ranks that share a GPU have no speeds: each waits for the others'
    kernels.
    """
    by_number = timed_steps(steps, untimed_steps=untimed_steps)
    timed = list(by_number.values())
    ranks, rows = _by_rank(timed), [row for step in _of_last_preset(steps).values() for row in step]
    seconds = _over_ranks(timed, "seconds", max)
    total, text = _total(_counted(timed, "tokens")), _total(_counted(timed, "non_padding_tokens"))

    def rate(tokens: int | None, clock: Sequence[float] = seconds) -> float | None:
        return tokens / math.fsum(clock) if tokens is not None and math.fsum(clock) > 0 else None

    losses = _over_ranks(steps, "loss", _mean)
    allocated, host = _largest(rows, "peak_allocated_bytes"), _largest(rows, "peak_host_bytes")
    peak = ("peak_host_bytes", host) if allocated is None else ("peak_allocated_bytes", allocated)
    measured = Measurements(
        timed_steps=len(timed),
        timed_seconds=math.fsum(seconds),
        step_seconds=tuple(_over_ranks(steps, "seconds", max)),
        step_tokens=_counted(steps, "tokens"),
        step_non_padding_tokens=_counted(steps, "non_padding_tokens"),
        step_supervised_tokens=_counted(steps, "supervised_tokens"),
        timed_step_numbers=tuple(by_number),
        rank_skew=rank_skew(timed),
        step_seconds_median=statistics.median(seconds) if seconds else None,
        step_seconds_p90=percentile(seconds, 0.9),
        tokens_per_second=rate(total),
        non_padding_tokens_per_second=rate(text),
        supervised_tokens_per_second=rate(_total(_counted(timed, "supervised_tokens"))),
        tokens_per_cpu_second=rate(total, _over_ranks(timed, "cpu_seconds", sum)),
        padding_fraction=1 - text / total if total and text is not None else None,
        losses=tuple(losses),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        grad_norms=tuple(grad_norm(step) for step in steps),
        batch_sha256=tuple(tuple(row.batch_sha256 for row in step) for step in steps),
        memory_by_phase=max_memory_by_phase(row.memory_by_phase for row in rows if row.memory_by_phase is not None),
        energy_joules=energy_joules(ranks, seconds=math.fsum(seconds)),
        throttle_reasons=throttle_reasons(ranks),
        recompilations_after_first_steps=_sum_of_a_rank(ranks, "compiled_graphs"),
        graph_breaks_after_first_steps=_sum_of_a_rank(ranks, "graph_breaks"),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=_largest(rows, "peak_reserved_bytes"),
        peak_host_bytes=host,
        peak_rank=next((row.rank for row in rows if peak[1] and getattr(row, peak[0]) == peak[1]), None),
        peak_driver_bytes=_largest(rows, "driver_bytes"),
        allocator_retries=_largest(rows, "allocator_retries"),
        ranks_per_gpu=_largest(rows, "ranks_per_gpu"),
    )
    return measured if measured.ranks_per_gpu is None else measured.updated(**WITHOUT_SPEEDS)


def timed_steps(steps: list[list[StepRow]], *, untimed_steps: int) -> dict[int, list[StepRow]]:
    """Return the steps whose time counts, by number from 1: not the first ones of a process, nor profiled ones."""
    numbered = _of_last_preset(steps).items()
    return {n: step for n, step in numbered if (step[0].step_of_process or n) > untimed_steps and not step[0].profiled}


def _of_last_preset(steps: list[list[StepRow]]) -> dict[int, list[StepRow]]:
    """Return the steps under the preset and number of ranks of the last one, by number from 1."""
    settings = [(step[0].preset, step[0].world_size) for step in steps]
    return {n: step for n, step in enumerate(steps, 1) if settings[n - 1] == settings[-1]}


def rank_skew(steps: list[list[StepRow]]) -> float | None:
    """Return the slowest rank's own seconds over the (lower) median rank's; None where a row has none."""
    of_ranks = [[row.own_seconds for row in rows if row.own_seconds] for rows in _by_rank(steps)]
    if not steps or sum(map(len, of_ranks)) < sum(map(len, steps)):
        return None
    medians = list(map(statistics.median, of_ranks))
    return max(medians) / statistics.median_low(medians)


def _by_rank(steps: Sequence[Sequence[StepRow]]) -> list[list[StepRow]]:
    ranks: dict[int, list[StepRow]] = {}
    for step in steps:
        for rank, row in enumerate(step):
            ranks.setdefault(rank, []).append(row)
    return list(ranks.values())


def grad_norm(step: Sequence[StepRow]) -> float | None:
    """Return the gradient norm before clipping over all ranks; the ranks' norms add up as squares."""
    if step[0].grad_norm is not None:
        return step[0].grad_norm
    shares, ranks = [row.local_grad_norm for row in step if row.local_grad_norm is not None], step[0].grad_norm_ranks
    if ranks is None or len(shares) < len(step):
        return None
    return math.sqrt(math.fsum(share * share for share in shares) * ranks / len(step))


def _counted(steps: list[list[StepRow]], key: str) -> tuple[int | None, ...]:
    return tuple(_total([getattr(row, key) for row in step]) for step in steps)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _over_ranks(steps: list[list[StepRow]], key: str, reduce: Callable[[list[float]], float]) -> list[float]:
    return [reduce([getattr(row, key) for row in step]) for step in steps]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _largest(rows: Iterable[BaseModel], key: str) -> int | None:
    return max((size for row in rows if (size := getattr(row, key)) is not None), default=None)


def _sum_of_a_rank(ranks: Sequence[Sequence[StepRow]], key: str) -> int | None:
    counted = [[count for row in rows if (count := getattr(row, key)) is not None] for rows in ranks]
    return max(map(sum, counted)) if any(counted) else None


def energy_joules(ranks: Sequence[Sequence[StepRow]], *, seconds: float) -> float | None:
    """Return the ranks' mean power between readings, times `seconds`; None where one has fewer than two."""
    if not ranks or len(set(map(len, ranks))) > 1:  # some ranks were there for part of the steps only
        return None
    watts = 0.0
    for rows in ranks:
        readings = [row.gpu_reading for row in rows if row.gpu_reading]
        known = [(each.monotonic_seconds, each.energy_joules) for each in readings if each.energy_joules is not None]
        if len(known) < 2 or known[-1][0] <= known[0][0]:
            return None
        watts += (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])
    return seconds * watts


def throttle_reasons(ranks: Sequence[Sequence[StepRow]]) -> tuple[str, ...] | None:
    """Return every reason in any reading; empty where there was none, None where NVML gave no readings."""
    readings = [row.gpu_reading for rows in ranks for row in rows if row.gpu_reading]
    reported = [each.throttle_reasons for each in readings if each.throttle_reasons is not None]
    return tuple(sorted({reason for reasons in reported for reason in reasons})) if reported else None


def max_memory_by_phase(ranks: Iterable[MemoryByPhase]) -> MemoryByPhase | None:
    """Return each phase's maximum over ranks, and what was counted; None where no rank has readings."""
    known = list(ranks)
    largest = {phase: _largest(known, phase) for phase in MEMORY_PHASES}
    return MemoryByPhase(bytes_of=known[0].bytes_of, **largest) if known else None


MEDIAN_ERROR = 0.05  # share of samples whose interval does not hold the median, at most


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a median from its order statistics; None for fewer than six values.

    Between the value with `rank` values below it and the one with as many above: the median is outside with a chance of
    twice that of at most `rank` heads in as many throws as there are values.
    """
    count, rank, chance = len(values), -1, 0.0
    of_all = math.lgamma(count + 1) - count * math.log(2)
    while (chance := chance + math.exp(of_all - math.lgamma(rank + 2) - math.lgamma(count - rank))) <= MEDIAN_ERROR / 2:
        rank += 1
    ordered = sorted(values)
    return None if rank < 0 else (ordered[rank], ordered[count - 1 - rank])

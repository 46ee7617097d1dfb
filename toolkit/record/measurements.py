"""The measurements of a run: speed, memory and energy, computed from the rows in `ranks/rank*.jsonl`.

>>> throughput(step_seconds=[9.0, 0.5, 0.5], tokens=[10, 1000, 1000], untimed_steps=1)
2000.0
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from toolkit.errors import ToolkitError
from toolkit.files.atomic_write import write_text
from toolkit.files.json_lines import JsonLine, line_name, read_json_lines
from toolkit.files.validation import explain
from toolkit.record.folder import RunFolder

Row = dict[str, Any]
"""One step of one rank, checked against `StepRow`."""
RANK_ROWS = re.compile(r"rank\d{1,9}\.jsonl")
DAMAGED_ROW = "move the line to another file: its step is left out"
NonNegativeFinite = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


def _not_beyond_reach(value: float) -> float:
    if math.isfinite(value) and abs(value) > 1e100:
        raise ValueError("expected at most 1e+100")
    return value


MaybeNotFinite = Annotated[float, AfterValidator(_not_beyond_reach)]
"""Of a run that diverged."""

MEMORY_PHASES = ("load", "forward", "backward", "step")
"""The points of a run at which the memory in use is read once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Reduced over the ranks and steps of one run. Speeds leave out the tokens and the time of untimed steps."""

    steps: int
    timed_steps: int
    timed_seconds: float
    """Wall time of the timed steps, with data loading and without evaluation, saving and logging."""
    step_seconds: list[float]
    """Per step, the slowest rank."""
    step_tokens: list[int | None]
    """Per step, of all ranks, padding included; None, as the next two, where a batch does not show it."""
    step_non_padding_tokens: list[int | None]
    step_supervised_tokens: list[int | None]
    timed_step_numbers: list[int]
    """Numbers of the timed steps, from 1."""
    rank_skew: float | None
    """Median `own_seconds` of the slowest rank, divided by that of the median rank."""
    step_seconds_median: float | None
    step_seconds_p90: float | None
    tokens_per_second: float | None
    """Tokens of all ranks, padding included."""
    non_padding_tokens_per_second: float | None
    supervised_tokens_per_second: float | None
    tokens_per_cpu_second: float | None
    """Tokens of all ranks per second of CPU time of all ranks: stable on a shared node."""
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
    """Largest memory of one rank's process as NVML reports it, read at most once per second."""
    allocator_retries: int | None
    """Maximum over ranks."""
    memory_by_phase: dict[str, Any] | None
    """Memory in use after loading, first forward, first backward and first step: maximum over ranks."""
    energy_joules: float | None
    """Energy of all GPUs in the timed steps: mean power between readings times `timed_seconds`."""
    throttle_reasons: list[str] | None
    """Why GPU clocks were throttled in a timed step; empty where they were not."""
    recompilations_after_first_steps: int | None
    """Graphs that one rank compiled in its timed steps, the maximum over ranks; None where nothing is compiled."""
    graph_breaks_after_first_steps: int | None
    """Places in those graphs where the compiler gave up, the maximum over ranks."""
    batch_sha256: list[list[str]]
    """Per step, the hash of each rank's batches in training order."""


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
"""Fields with one value per step: too long for a summary."""


def throughput(*, step_seconds: Sequence[float], tokens: Sequence[int | None], untimed_steps: int) -> float | None:
    """Return the tokens of the timed steps per second of the same steps; None without a timed step or its tokens."""
    seconds, timed = math.fsum(step_seconds[untimed_steps:]), _total(tokens[untimed_steps:])
    return timed / seconds if seconds > 0 and timed is not None else None


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


class FirstStepMemory(BaseModel):
    """Bytes of one rank after each phase of its first step."""

    model_config = ConfigDict(strict=True)

    bytes_of: str
    load: NonNegativeInt | None = None
    forward: NonNegativeInt | None = None
    backward: NonNegativeInt | None = None
    step: NonNegativeInt | None = None


class StepRow(BaseModel):
    """One step of one rank, as its file must have it; runs of earlier versions lack what has a default."""

    model_config = ConfigDict(strict=True)

    step: PositiveInt
    step_of_process: PositiveInt | None = None
    rank: NonNegativeInt
    world_size: PositiveInt | None = None
    seconds: NonNegativeFinite
    own_seconds: NonNegativeFinite | None = None
    data_seconds: NonNegativeFinite | None = None
    cpu_seconds: NonNegativeFinite
    tokens: NonNegativeInt | None
    """None, as the next two, where the batches of a script do not show it."""
    non_padding_tokens: NonNegativeInt | None
    supervised_tokens: NonNegativeInt | None
    loss: MaybeNotFinite | None
    """None in a rehearsal only."""
    grad_norm: MaybeNotFinite | None
    local_grad_norm: MaybeNotFinite | None = None
    grad_norm_ranks: PositiveInt | None = None
    batch_sha256: str
    peak_allocated_bytes: NonNegativeInt | None
    peak_reserved_bytes: NonNegativeInt | None
    peak_host_bytes: NonNegativeInt | None
    allocator_retries: NonNegativeInt | None = None
    driver_bytes: NonNegativeInt | None = None
    gpu_reading: GpuReading | None = None
    memory_by_phase: FirstStepMemory | None = None
    profiled: bool = False
    compiled_graphs: NonNegativeInt | None = None
    graph_breaks: NonNegativeInt | None = None


def read_rows(path: Path) -> list[Row]:
    """Return the rows of one rank, without a last line that was cut off while being written.

    Raises ToolkitError for a file that cannot be read, and for any other line that is no row, with its number.
    """
    return [_checked(line, path) for line in read_json_lines(path, allow_nan=True, hint=DAMAGED_ROW)]


def last_step(path: Path) -> int:
    """Return the last step in the rows of one rank, 0 without any; rows after a damaged one do not count."""
    step = 0
    with contextlib.suppress(ToolkitError):
        for line in read_json_lines(path, allow_nan=True):
            step = _number(line) or step
    return step


def _checked(line: JsonLine, path: Path) -> Row:
    try:
        StepRow.model_validate(line.content)
    except ValidationError as error:
        raise ToolkitError(f"{line_name(path, line.number)}: {explain(error)}", hint=DAMAGED_ROW) from None
    return line.content


class DroppedRows(NamedTuple):
    """Rows of steps that are trained again."""

    steps: int
    seconds: float


def drop_rows_after(path: Path, step: int) -> DroppedRows:
    """Keep the rows up to `step`, where the run resumes; later steps are trained again. Return what was dropped."""
    kept, dropped = _split_rows(path, step)
    write_text(path, "".join(kept))
    return dropped


def rows_after(path: Path, step: int) -> DroppedRows:
    """Return what `drop_rows_after` would drop."""
    return _split_rows(path, step)[1]


def _split_rows(path: Path, step: int) -> tuple[list[str], DroppedRows]:
    """The lines up to `step`, and what the later ones hold."""
    kept: list[str] = []
    dropped: list[float] = []
    with contextlib.suppress(ToolkitError):  # a missing file, or what follows a damaged line
        for line in read_json_lines(path, allow_nan=True):
            number = _number(line)
            if number is not None and number <= step:
                kept.append(json.dumps(line.content) + "\n")
            elif number is not None:
                seconds = line.content.get("seconds")
                dropped.append(seconds if isinstance(seconds, (int, float)) and seconds > 0 else 0.0)
    return kept, DroppedRows(len(dropped), math.fsum(dropped))


def _number(line: JsonLine) -> int | None:
    number = line.content.get("step")
    return number if type(number) is int else None


def read_steps(folder: RunFolder) -> list[list[Row]]:
    """Return per step the rows of all ranks in rank order, for the steps that every rank completed.

    A run that was resumed on another number of ranks has steps of different numbers of rows. Raises ToolkitError as
    `read_rows` does.
    """
    paths = [path for path in (folder.path / "ranks").glob("rank*.jsonl") if RANK_ROWS.fullmatch(path.name)]
    steps: dict[int, dict[int, Row]] = {}
    for rank, path in sorted((int(path.stem.removeprefix("rank")), path) for path in paths):
        for row in read_rows(path):
            steps.setdefault(row["step"], {})[rank] = row
    complete = [rows for _, rows in sorted(steps.items()) if len(rows) == _ranks_of_step(rows, len(paths))]
    return [list(rows.values()) for rows in complete]


def _ranks_of_step(rows: dict[int, Row], files: int) -> int:
    """The ranks that the run had in a step; as many as there are files where its rows do not say so."""
    return next((int(row["world_size"]) for row in rows.values() if row.get("world_size")), files)


def measure(steps: list[list[Row]], *, untimed_steps: int) -> Measurements:
    """Reduce the rows of all ranks: seconds by the slowest rank, tokens by sum, peaks by maximum.

    A resumed run has untimed steps again, since its processes are new.
    """
    step_seconds = _over_ranks(steps, "seconds", max)
    timed_numbers = [number for number, step in enumerate(steps, 1) if _is_timed(step, number, untimed_steps)]
    timed_rows = [steps[number - 1] for number in timed_numbers]
    timed = _over_ranks(timed_rows, "seconds", max)
    by_rank = _by_rank(timed_rows)
    tokens, non_padding = _counted(timed_rows, "tokens"), _counted(timed_rows, "non_padding_tokens")

    def rate(counted: list[int | None], clock: list[float] = timed) -> float | None:
        return throughput(step_seconds=clock, tokens=counted, untimed_steps=0)

    return Measurements(
        steps=len(steps),
        timed_steps=len(timed),
        timed_seconds=math.fsum(timed),
        step_seconds=step_seconds,
        step_tokens=_counted(steps, "tokens"),
        step_non_padding_tokens=_counted(steps, "non_padding_tokens"),
        step_supervised_tokens=_counted(steps, "supervised_tokens"),
        timed_step_numbers=timed_numbers,
        rank_skew=rank_skew(timed_rows),
        step_seconds_median=statistics.median(timed) if timed else None,
        step_seconds_p90=percentile(timed, 0.9),
        tokens_per_second=rate(tokens),
        non_padding_tokens_per_second=rate(non_padding),
        supervised_tokens_per_second=rate(_counted(timed_rows, "supervised_tokens")),
        tokens_per_cpu_second=rate(tokens, _over_ranks(timed_rows, "cpu_seconds", sum)),
        padding_fraction=_padding(tokens, non_padding),
        losses=_over_ranks(steps, "loss", _mean),
        grad_norms=[grad_norm(step) for step in steps],
        batch_sha256=[[row["batch_sha256"] for row in step] for step in steps],
        memory_by_phase=max_memory_by_phase(row.get("memory_by_phase") for step in steps for row in step),
        energy_joules=energy_joules(by_rank, seconds=math.fsum(timed)),
        throttle_reasons=throttle_reasons(by_rank),
        recompilations_after_first_steps=_sum_of_a_rank(by_rank, "compiled_graphs"),
        graph_breaks_after_first_steps=_sum_of_a_rank(by_rank, "graph_breaks"),
        **_peaks(steps),
    )


def timed_steps(steps: list[list[Row]], *, untimed_steps: int) -> list[list[Row]]:
    """Return the steps whose time counts: after the first ones of the process, and not profiled."""
    return [step for number, step in enumerate(steps, 1) if _is_timed(step, number, untimed_steps)]


def _is_timed(step: list[Row], number: int, untimed_steps: int) -> bool:
    return step[0].get("step_of_process", number) > untimed_steps and not step[0].get("profiled")


def rank_skew(steps: list[list[Row]]) -> float | None:
    """Return the slowest rank's time over the median rank's, where ranks do not wait for each other.

    The lower median is used: of two ranks, the faster. None where a row has no `own_seconds`.
    """
    if not steps or any(not row.get("own_seconds") for step in steps for row in step):
        return None
    of_ranks = [statistics.median(row["own_seconds"] for row in rows) for rows in _by_rank(steps)]
    return float(max(of_ranks) / statistics.median_low(of_ranks))


def _by_rank(steps: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The rows of each rank over the steps in which the run had it."""
    ranks: dict[int, list[Row]] = {}
    for step in steps:
        for rank, row in enumerate(step):
            ranks.setdefault(rank, []).append(row)
    return list(ranks.values())


def _padding(tokens: Sequence[int | None], non_padding: Sequence[int | None]) -> float | None:
    total, text = _total(tokens), _total(non_padding)
    return 1 - text / total if total and text is not None else None


def grad_norm(step: list[Row]) -> float | None:
    """Return the gradient norm before clipping over all ranks; the ranks' norms add up as squares."""
    if step[0]["grad_norm"] is not None:
        return float(step[0]["grad_norm"])
    shares, ranks = [row.get("local_grad_norm") for row in step], step[0].get("grad_norm_ranks")
    if ranks is None or None in shares:
        return None
    return math.sqrt(math.fsum(share * share for share in shares if share is not None) * ranks / len(step))


def _counted(steps: list[list[Row]], key: str) -> list[int | None]:
    return [_total([row[key] for row in step]) for step in steps]


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where a part is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _over_ranks(steps: list[list[Row]], key: str, reduce: Callable[[list[float]], float]) -> list[float]:
    return [reduce([row[key] for row in step]) for step in steps]


def _mean(values: list[float]) -> float:
    """The mean; not a number where one is not finite, which `fsum` refuses."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _peaks(steps: list[list[Row]]) -> dict[str, int | None]:
    """Maximum over steps and ranks of each peak, and the rank that the largest was on."""
    rows = [row for step in steps for row in step]
    peaks = {key: _largest(rows, key) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")}
    deciding = "peak_allocated_bytes" if peaks["peak_allocated_bytes"] is not None else "peak_host_bytes"
    holder = next((row["rank"] for row in rows if row[deciding] and row[deciding] == peaks[deciding]), None)
    counted = {"peak_driver_bytes": _largest(rows, "driver_bytes"), "peak_rank": holder}
    return peaks | counted | {"allocator_retries": _largest(rows, "allocator_retries")}


def _sum_of_a_rank(ranks: Sequence[Sequence[Row]], key: str) -> int | None:
    """The largest sum of one rank over its steps; None where no row has the key."""
    counted = [[row[key] for row in rows if row.get(key) is not None] for rows in ranks]
    return max(map(sum, counted)) if any(counted) else None


def _largest(rows: list[Row], key: str) -> int | None:
    return max((row[key] for row in rows if row.get(key) is not None), default=None)


def energy_joules(ranks: Sequence[Sequence[Row]], *, seconds: float) -> float | None:
    """Return the mean power between each rank's first and last reading, times `seconds`, summed over ranks.

    None where a rank has fewer than two readings: a GPU without a counter, or too short a run.

    >>> rows = [{"gpu_reading": {"monotonic_seconds": at, "energy_joules": 300.0 * at}} for at in (1.0, 3.0)]
    >>> energy_joules([rows], seconds=4.0)
    1200.0
    """
    if len(set(map(len, ranks))) > 1:  # some ranks were there for part of the steps only
        return None
    watts = [_watts(rows) for rows in ranks]
    return None if not watts or None in watts else seconds * sum(power for power in watts if power is not None)


def throttle_reasons(ranks: Sequence[Sequence[Row]]) -> list[str] | None:
    """Return every reason in any reading; empty where there was none, None where NVML gave no readings."""
    reported = [reading["throttle_reasons"] for rows in ranks for reading in _readings(rows, "throttle_reasons")]
    return sorted({reason for reasons in reported for reason in reasons}) if reported else None


def _watts(rows: Sequence[Row]) -> float | None:
    readings = _readings(rows, "energy_joules")
    if len(readings) < 2:
        return None
    first, last = readings[0], readings[-1]
    elapsed: float = last["monotonic_seconds"] - first["monotonic_seconds"]
    return float(last["energy_joules"] - first["energy_joules"]) / elapsed if elapsed > 0 else None


def _readings(rows: Sequence[Row], key: str) -> list[Row]:
    readings = [row.get("gpu_reading") for row in rows]
    return [reading for reading in readings if reading and reading.get(key) is not None]


def max_memory_by_phase(ranks: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return each phase's maximum over ranks, and what was counted; None where no rank has readings.

    >>> max_memory_by_phase([{"bytes_of": "rss", "load": 1}, {"bytes_of": "rss", "load": 3}])["load"]
    3
    """
    known = [memory for memory in ranks if memory]
    if not known:
        return None
    phases = {phase: [size for memory in known if (size := memory.get(phase)) is not None] for phase in MEMORY_PHASES}
    return {"bytes_of": known[0]["bytes_of"], **{name: max(sizes, default=None) for name, sizes in phases.items()}}

"""Coverage of the planned intervals of speeds on sources that were left out, by what bounds a step.

Sources are those of `fixtures/measured_speed.csv` and MosaicML's, each with constants that were fitted without it, and
those of `fixtures/reported_speeds.csv`, to which nothing was fitted.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache

from measured_jobs import MeasuredJob, measured_jobs, mosaicml_jobs, rows
from planned_commands import planned_command

from toolkit.plan.step_parts import CALIBRATION, Calibration
from toolkit.plan.step_time import MeasuredStep, StepTime, step_time

COVERED = 0.9
# The largest part of a step besides computation that leaves it bound by computation.
SMALL_SHARE = 0.15


@cache
def compared() -> dict[str, list[MeasuredJob]]:
    """Rows with a speed that state enough, by source."""
    by_source: dict[str, list[MeasuredJob]] = {}
    for job in (*measured_jobs(), *mosaicml_jobs()):
        if job.tokens_per_second and not job.why_not:
            by_source.setdefault(job.source, []).append(job)
    return by_source


def planned(job: MeasuredJob, calibration: Calibration = CALIBRATION) -> StepTime:
    assert job.setup is not None
    assert job.interconnect is not None
    speed = step_time(job.setup, job.interconnect, calibration=calibration)
    assert speed is not None
    return speed


# Constants that were fitted without a source, as `fitted_without` finds them.
WITHOUT: dict[str, tuple[float, float, float, float]] = {
    "fms-acceleration": (5.53, 0.445, 7.6, 1.46e-05),
    "QwenLM": (5.54, 0.376, 12.5, 1e-05),
    "torchtitan": (5.59, 0.446, 8.47, 1.46e-05),
    "fms-fsdp": (5.57, 0.446, 8.51, 1.46e-05),
    "stas00": (5.56, 0.447, 8.54, 1.46e-05),
    "llm-foundry": (5.7, 0.442, 8.17, 1.46e-05),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One published speed beside its plan without the source."""

    name: str
    source: str
    bound: str
    tokens_per_second: float
    estimate: float
    low: float
    high: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.tokens_per_second <= self.high

    @property
    def error(self) -> float:
        """Estimate over speed, minus one."""
        return self.estimate / self.tokens_per_second - 1

    @property
    def needed(self) -> float:
        """By what half of the interval would have to be multiplied to end at the speed, all as logarithms."""
        half = math.log(self.high / self.low) / 2
        return abs(math.log(self.estimate / self.tokens_per_second)) / half


def bound_of(speed: StepTime) -> str:
    """Return what the interval names as its reason, or what else takes much of the step."""
    reasons = " ".join(speed.wider_for)
    names = {"offload": "offload", "kernel launches": "launches", "experts": "experts", "share a sequence": "a ring"}
    for word, name in names.items():
        if word in reasons:
            return name
    beside = 1 - speed.compute_seconds / speed.estimate_seconds
    return "communication" if beside > SMALL_SHARE else "computation"


def _speed(name: str, source: str, measured: float, plan: StepTime) -> Speed:
    low, high = plan.tokens_per_second_per_gpu
    estimate = plan.tokens_per_second_per_gpu_estimate
    values = {"tokens_per_second": measured, "estimate": estimate, "low": low, "high": high}
    return Speed(name=name, source=source, bound=bound_of(plan), **values)


def alike() -> list[list[MeasuredJob]]:
    """Rows of one source with the same model, GPU, adapters and precision of the base."""
    groups: dict[tuple[object, ...], list[MeasuredJob]] = {}
    for job in itertools.chain.from_iterable(compared().values()):
        assert job.setup is not None
        how = job.setup.job
        key = (job.source, job.row["model"], job.row["gpu"], how.lora_r is not None, how.load_in_4bit)
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def as_measured(job: MeasuredJob, calibration: Calibration = CALIBRATION) -> MeasuredStep:
    speed = planned(job, calibration)
    assert job.setup is not None
    seconds = speed.tokens_per_step_per_gpu / job.tokens_per_second
    return MeasuredStep(run=job.name, setup=job.setup, planned=speed, seconds=seconds, seconds_p90=seconds)


def speed_of(job: MeasuredJob, calibration: Calibration = CALIBRATION) -> Speed:
    """Return a published row beside its plan."""
    return _speed(job.name, job.source, job.tokens_per_second, planned(job, calibration))


@cache
def left_out_speeds() -> tuple[Speed, ...]:
    found, names = [], [field.name for field in fields(Calibration)]
    for source, jobs in compared().items():
        without = Calibration(**dict(zip(names, WITHOUT[source], strict=True)))
        found += [speed_of(job, without) for job in jobs]
    for row in rows("reported_speeds"):
        plan = planned_command(row["command"]).speed
        assert plan is not None, row["id"]
        found.append(_speed(row["id"], row["source"], float(row["tokens_per_second"]), plan))
    return tuple(found)


def by(name: str) -> dict[str, list[Speed]]:
    groups: dict[str, list[Speed]] = defaultdict(list)
    for speed in left_out_speeds():
        groups[getattr(speed, name)].append(speed)
    return groups


def quantile_over_sources(speeds: Iterable[Speed], share: float = COVERED) -> float:
    """Return the factor of half intervals that covers that share, where each source counts as much as the others."""
    counts: dict[str, int] = defaultdict(int)
    speeds = list(speeds)
    for speed in speeds:
        counts[speed.source] += 1
    total = 0.0
    for speed in sorted(speeds, key=lambda each: each.needed):
        total += 1 / counts[speed.source] / len(counts)
        if total >= share:
            return speed.needed
    return math.inf


def coverage_of_sources(speeds: list[Speed]) -> float:
    """Return the mean of the sources' shares inside."""
    shares: dict[str, list[bool]] = defaultdict(list)
    for speed in speeds:
        shares[speed.source].append(speed.is_inside)
    return statistics.mean(statistics.mean(each) for each in shares.values())


def held_out_coverage() -> dict[str, float]:
    """Return the share inside of each source, with intervals as wide as the other sources need."""
    found = {}
    for source, speeds in by("source").items():
        factor = quantile_over_sources(speed for speed in left_out_speeds() if speed.source != source)
        found[source] = statistics.mean(speed.needed <= factor for speed in speeds)
    return found


def table(groups: dict[str, list[Speed]], first: str) -> list[list[str]]:
    """Rows of Markdown: one per group, and all of them."""
    lines = [[first, "rows", "sources", "inside", "mean of sources", "width at the median", "median error"]]
    for name, speeds in [*groups.items(), ("all", list(left_out_speeds()))]:
        sources = {speed.source for speed in speeds}
        inside = statistics.mean(speed.is_inside for speed in speeds)
        width = statistics.median(speed.high / speed.low for speed in speeds)
        error = statistics.median(abs(speed.error) for speed in speeds)
        cells = [str(len(speeds)), str(len(sources)), f"{inside:.0%}", f"{coverage_of_sources(speeds):.0%}"]
        lines.append([name, *cells, f"{width:.2f}", f"{error:.0%}"])
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedPair:
    """One published row, planned with another row of its source as the run that calibrates."""

    is_inside: bool
    error: float
    error_before: float
    """Without the calibration."""
    width: float


def calibrated_pairs(source: str) -> list[CalibratedPair]:
    """Return every pair of comparable rows of a source, with constants that were fitted without it."""
    calibration = Calibration(**dict(zip((each.name for each in fields(Calibration)), WITHOUT[source], strict=True)))
    pairs = []
    for jobs in (jobs for jobs in alike() if jobs[0].source == source):
        rows_of_source = [(job, as_measured(job, calibration)) for job in jobs]
        for (_, measured), (job, own) in itertools.permutations(rows_of_source, 2):
            assert job.interconnect is not None
            if not measured.differences(own.setup):  # repeated, or with other kernels
                continue
            speed = step_time(own.setup, job.interconnect, calibration=calibration, measured=measured)
            assert speed is not None
            low, high = speed.step_seconds
            before, after = (abs(own.seconds / each.estimate_seconds - 1) for each in (own.planned, speed))
            inside = low <= own.seconds <= high
            pairs.append(CalibratedPair(is_inside=inside, error=after, error_before=before, width=high / low))
    return pairs

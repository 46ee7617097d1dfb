"""Compute times: moments and tails against closed forms, and the rows of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from toolkit.errors import ToolkitError
from toolkit.simulate.options import StragglerOptions
from toolkit.simulate.step_time_distributions import compute_times, drawn_seconds, measured_step_times, resampled

RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded_demo_ddp"


@pytest.mark.parametrize("distribution", ["lognormal", "exponential", "pareto"])
def test_a_distribution_has_the_mean_and_spread_it_is_given(distribution: str) -> None:
    seconds = drawn_seconds(distribution, mean=2.0, spread=0.25, shape=(200, 2000), seed=0)
    assert seconds.mean() == pytest.approx(2.0, rel=0.005)
    assert seconds.std() / seconds.mean() == pytest.approx(0.25, rel=0.03)


def test_the_slowest_of_many_exponential_times_is_a_harmonic_sum() -> None:
    slowest = drawn_seconds("exponential", mean=1.0, spread=0.5, shape=(100, 20_000), seed=0).max(axis=0)
    assert slowest.mean() == pytest.approx(0.5 + 0.5 * sum(1 / k for k in range(1, 101)), rel=0.01)


def test_the_smallest_pareto_time_is_its_scale() -> None:
    seconds = drawn_seconds("pareto", mean=3.0, spread=1 / math.sqrt(3), shape=(100, 1000), seed=0)
    assert seconds.min() == pytest.approx(2.0, rel=0.001)  # tail index 3: scale 2


def test_without_spread_every_distribution_is_constant() -> None:
    assert drawn_seconds("pareto", mean=3.0, spread=0.0, shape=(1, 2), seed=0).tolist() == [[3.0, 3.0]]


def test_slow_workers_are_the_last_ones() -> None:
    options = StragglerOptions(workers=3, steps=1, distribution="constant", slow_workers=1, slow_factor=4.0)
    seconds, source = compute_times(options)
    assert seconds.tolist() == [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]
    assert source == "constant, mean 1 s, spread 0.2; 1 slower by 4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_seconds": math.nan}, "--step-seconds is nan"),
        ({"spread": -0.1}, "--spread is -0.1"),
        ({"spread": math.inf}, "--spread is inf"),
        ({"distribution": "exponential", "spread": 1.5}, "expected 0 to 1 for exponential"),
    ],
)
def test_times_that_no_worker_takes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        compute_times(StragglerOptions(**values))


def test_measured_steps_stay_whole() -> None:
    seconds = resampled(numpy.array([[1.0, 10.0], [2.0, 20.0]]), shape=(4, 50), seed=0)
    assert (seconds[1] == 10 * seconds[0]).all()
    assert (seconds[3] == 10 * seconds[2]).all()
    assert (seconds[0] != seconds[2]).any(), "more workers than ranks have other steps"


def run_of_two_ranks(folder: Path, own_seconds: tuple[float, float]) -> Path:
    """Copy the recorded run, with time of their own that its version did not record."""
    (folder / "ranks").mkdir()
    for rank, own in enumerate(own_seconds):
        lines = (RECORDED / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()
        rows = [json.loads(line) | {"seconds": 5.0, "own_seconds": own} for line in lines]
        (folder / "ranks" / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_gives_its_timed_steps_and_the_slowest_rank_a_whole_step(tmp_path: Path) -> None:
    run = run_of_two_ranks(tmp_path, (1.0, 3.0))
    num_steps = len((run / "ranks" / "rank0.jsonl").read_text().splitlines())
    assert measured_step_times(run, untimed_steps=2).tolist() == [[3.0, 5.0]] * (num_steps - 2)


def test_a_run_without_timed_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"no timed step of all ranks") as refused:
        measured_step_times(tmp_path, untimed_steps=2)
    assert refused.value.hint == "name the folder of a run of more than 2 steps"


def test_a_run_of_an_earlier_version_is_refused() -> None:
    with pytest.raises(ToolkitError, match="have no own_seconds"):
        measured_step_times(RECORDED, untimed_steps=2)

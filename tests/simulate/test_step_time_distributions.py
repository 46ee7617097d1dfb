"""Compute times: moments and tails against closed forms, and the rows of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.simulate.step_time_distributions import MeasuredStepTimes, StepTimes, measured_step_times

RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded_demo_ddp"


@pytest.mark.parametrize("distribution", ["lognormal", "exponential", "pareto"])
def test_a_distribution_has_the_mean_and_spread_it_is_given(distribution: str) -> None:
    times = StepTimes(distribution=distribution, step_seconds=2.0, spread=0.25)
    seconds = times.draw(seed=0, workers=200, steps=2000)
    assert seconds.mean() == pytest.approx(2.0, rel=0.005)
    assert seconds.std() / seconds.mean() == pytest.approx(0.25, rel=0.03)


def test_the_slowest_of_many_exponential_times_is_a_harmonic_sum() -> None:
    times = StepTimes(distribution="exponential", step_seconds=1.0, spread=0.5)
    slowest = times.draw(seed=0, workers=100, steps=20_000).max(axis=0)
    assert slowest.mean() == pytest.approx(0.5 + 0.5 * sum(1 / k for k in range(1, 101)), rel=0.01)


def test_the_smallest_pareto_time_is_its_scale() -> None:
    times = StepTimes(distribution="pareto", step_seconds=3.0, spread=1 / math.sqrt(3))  # tail index 3: scale 2
    assert times.draw(seed=0, workers=100, steps=1000).min() == pytest.approx(2.0, rel=0.001)


def test_without_spread_every_distribution_is_constant() -> None:
    assert StepTimes(distribution="pareto", step_seconds=3.0).draw(seed=0, workers=1, steps=2).tolist() == [[3.0, 3.0]]


def test_a_seed_draws_the_same_times_again() -> None:
    times = StepTimes(distribution="lognormal", step_seconds=1.0, spread=0.3)
    assert (times.draw(seed=7, workers=3, steps=4) == times.draw(seed=7, workers=3, steps=4)).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distribution": "lognormel"}, "unknown distribution 'lognormel'"),
        ({"step_seconds": -1.0}, "--step-seconds is -1.0"),
        ({"step_seconds": math.nan}, "--step-seconds is nan"),
        ({"spread": -0.1}, "--spread is -0.1"),
        ({"spread": math.inf}, "--spread is inf"),
        ({"distribution": "exponential", "spread": 1.5}, "expected 0 to 1 for exponential"),
    ],
)
def test_times_that_no_worker_takes_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        StepTimes(**({"distribution": "lognormal", "step_seconds": 1.0, "spread": 0.1} | values))  # type: ignore[arg-type]


def test_measured_steps_stay_whole() -> None:
    times = MeasuredStepTimes(seconds=((1.0, 10.0), (2.0, 20.0)), folder="run")
    seconds = times.draw(seed=0, workers=4, steps=50)
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
    measured = measured_step_times(run, untimed_steps=2)
    assert measured.seconds == ((3.0, 5.0),) * (num_steps - 2)


def test_a_run_without_timed_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"no timed step of all ranks") as refused:
        measured_step_times(tmp_path, untimed_steps=2)
    assert refused.value.hint == "name the folder of a run of more than 2 steps"


def test_a_run_of_an_earlier_version_is_refused() -> None:
    with pytest.raises(ToolkitError, match="have no own_seconds"):
        measured_step_times(RECORDED, untimed_steps=2)

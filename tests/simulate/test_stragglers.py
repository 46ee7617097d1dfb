"""`toolkit simulate stragglers`: policies worked out by hand, options, results, tables and the page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from command_line import run_command

from toolkit.errors import ToolkitError
from toolkit.simulate.options import StragglerOptions
from toolkit.simulate.stragglers import (
    best_backup_workers,
    compute_times,
    drawn_seconds,
    measured_step_times,
    resampled,
    simulate,
    straggler_report,
    study_stragglers,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA_8B, RECORDED = str(FIXTURES / "llama-8b"), FIXTURES / "recorded_demo_ddp"
SMALL = StragglerOptions(workers=4, steps=20)


def drawn(*, spread: float, workers: int = 8, steps: int = 100) -> Any:
    return drawn_seconds("lognormal", mean=1.0, spread=spread, shape=(workers, steps), seed=0)


def test_synchronous_updates_wait_for_the_slowest() -> None:
    run = simulate(numpy.array([[1.0, 3.0], [2.0, 2.0]]), steps=2, communication_seconds=0.5)
    assert run.seconds == 2.5 + 3.5
    assert run.waiting_seconds == 2.0
    assert run.communication_seconds == 2.0
    assert run.as_row()["steps_per_second"] == 2 / 6


def test_a_late_backup_worker_drops_its_gradient_and_joins_the_update_in_progress() -> None:
    # Worker 2 takes 2.5 s for its first batch: it misses updates 1 (at 1 s) and 2 (at 2 s), starts its second batch at
    # 2.5 s with the weights of update 2, and ends at 2.75 s, before worker 1.
    seconds = numpy.array([[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [2.5, 0.25, 1.0]])
    run = simulate(seconds, steps=3, backup_workers=1)
    assert run.seconds == 2.75
    assert run.discarded_seconds == 2.5 + 1.0, "worker 2's first batch, and worker 1's last"
    assert run.waiting_seconds == 0.25, "worker 0 before the last update"


def test_all_time_of_synchronous_training_is_computing_waiting_or_communication() -> None:
    seconds = drawn(spread=0.5)
    run = simulate(seconds, steps=60, communication_seconds=0.1)
    spent = seconds[:, :60].sum() + run.waiting_seconds + run.discarded_seconds + run.communication_seconds
    assert spent == pytest.approx(8 * run.seconds)


def test_one_backup_worker_pays_for_one_slow_worker() -> None:
    seconds = numpy.ones((8, 10))
    seconds[7] = 3.0
    assert best_backup_workers(seconds, steps=9) == (1, pytest.approx(7 / 8 * 3))
    assert best_backup_workers(numpy.ones((8, 10)), steps=10) == (0, 1.0)


@pytest.mark.nightly
def test_chen_et_al_4_of_100_backup_workers_are_the_best_for_a_small_spread_only() -> None:
    """Revisiting distributed synchronous SGD (https://arxiv.org/abs/1604.00981): 96 + 4 converged fastest.

    Their step times are not published as numbers, so that 4 cannot be predicted. It is the best number at some spread
    between 0.05 and 0.15; a known miss is that the model asks for more at larger spreads, since it counts gradients and
    leaves out what a smaller batch costs.
    """
    spreads = {spread: drawn(spread=spread, workers=100, steps=200) for spread in (0.05, 0.06, 0.08, 0.12, 0.3)}
    best = [best_backup_workers(seconds, steps=200)[0] for seconds in spreads.values()]
    assert best == sorted(best), "the heavier the tail, the more backup workers"
    assert 4 in best[:-1]
    assert best[-1] > 4


def test_both_policies_are_simulated_and_what_waiting_costs() -> None:
    found = study_stragglers(SMALL)
    synchronous, backup = (run.as_row() for run in found.policies)
    assert (synchronous["policy"], backup["policy"]) == ("synchronous", "backup_workers 1")
    assert synchronous["waiting_fraction"] == pytest.approx(1 - 1 / found.slowdown)


def test_with_a_model_its_gradients_are_communicated() -> None:
    found = study_stragglers(replace(SMALL, model=LLAMA_8B, gpu="h100"))
    assert found.gradient_bytes == 4 * 8_030_261_248
    assert found.all_reduce_seconds is not None
    assert found.policies[0].communication_seconds == pytest.approx(4 * 20 * found.all_reduce_seconds[1])
    assert straggler_report(found).notes[-1].startswith("Gradients of 29.92 GiB: an all-reduce takes")


def test_the_command_prints_json_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "stragglers", "--workers", "4", "--steps", "20", "--json"]
    code, out, err = run_command([*words, "--output-dir", str(tmp_path)], capsys)
    assert code == 0
    assert {"policies", "all_reduce_seconds", "slowdown", "best_backup_workers"} <= set(json.loads(out))
    assert "simulation.html" in err
    assert json.loads((tmp_path / "simulation.json").read_text()) == json.loads(out)
    assert (tmp_path / "simulation.html").read_text().count('<div class="bar">') == len(json.loads(out)["policies"])


@pytest.mark.parametrize("distribution", ["lognormal", "exponential", "pareto"])
def test_a_distribution_has_the_mean_and_spread_it_is_given(distribution: str) -> None:
    seconds = drawn_seconds(distribution, mean=2.0, spread=0.25, shape=(200, 1000), seed=0)
    assert seconds.mean() == pytest.approx(2.0, rel=0.005)
    assert seconds.std() / seconds.mean() == pytest.approx(0.25, rel=0.03)


def test_slow_workers_are_the_last_ones() -> None:
    options = StragglerOptions(workers=3, steps=1, distribution="constant", slow_workers=1, slow_factor=4.0)
    seconds, source = compute_times(options)
    assert seconds.tolist() == [[1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]
    assert source == "constant, mean 1 s, spread 0.2; 1 slower by 4"


def test_measured_steps_stay_whole() -> None:
    seconds = resampled(numpy.array([[1.0, 10.0], [2.0, 20.0]]), shape=(4, 50), seed=0)
    assert (seconds[1] == 10 * seconds[0]).all()
    assert (seconds[3] == 10 * seconds[2]).all()
    assert (seconds[0] != seconds[2]).any(), "more workers than ranks have other steps"


def test_a_run_gives_its_timed_steps_and_the_slowest_rank_a_whole_step(tmp_path: Path) -> None:
    """The recorded run, with time of their own that its version did not record."""
    with pytest.raises(ToolkitError, match="have no own_seconds"):
        measured_step_times(RECORDED, untimed_steps=2)
    (tmp_path / "ranks").mkdir()
    for name, own in (("rank0.jsonl", 1.0), ("rank1.jsonl", 3.0)):
        lines = (RECORDED / "ranks" / name).read_text().splitlines()
        rows = [json.loads(line) | {"seconds": 5.0, "own_seconds": own} for line in lines]
        (tmp_path / "ranks" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measured_step_times(tmp_path, untimed_steps=2).tolist() == [[3.0, 5.0]] * (len(lines) - 2)

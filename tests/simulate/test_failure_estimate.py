"""`toolkit simulate failures`: its command, and the simulation against the closed forms that hold exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command

from toolkit.plan.failures import FailingJob
from toolkit.simulate.failure_estimate import SimulatedFailures, simulate_failures

HOUR = 3600
COMMAND = ["simulate", "failures"]


def save(kind: str, stall: float) -> dict[str, Any]:
    return {"kind": kind, "step": 1, "seconds": 99.0, "stall_seconds": stall, "bytes": 10}


def test_json_has_closed_forms_beside_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of([*COMMAND, "--gpus", "12000", "--checkpoint-seconds", "60", "--days", "30"], capsys)
    assert (found["nodes"], found["monte_carlo"]["runs"]) == (1500, 10)
    assert found["mean_hours_between_failures"] == pytest.approx(24_000 / (6.5 * 1500))
    assert found["best_checkpoint_interval_seconds"] == pytest.approx(1031.2, abs=0.1)
    assert found["daly_checkpoint_interval_seconds"] == pytest.approx(991.5, abs=0.1)
    assert found["effective_time_ratio"] == pytest.approx(0.858, abs=0.001)
    assert found["monte_carlo"]["effective_time_ratio"] == pytest.approx(0.858, abs=0.005)
    assert found["expected_failures"] == pytest.approx(30 * 9.75)


def test_text_and_page_have_both_ratios_the_best_intervals_and_the_known_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus", "16384", "--spare-nodes", "40", "--repair-hours", "24"]
    code, out, _ = run_command([*COMMAND, *words, "--output-dir", str(tmp_path)], capsys)
    assert code == 0
    for text in ("40 spare", "one every 1.80 h", "(assumed)", "(Young)", "(Daly)", "Monte Carlo", "7.9 h"):
        assert text in out
    assert "time with all nodes" in out
    page = (tmp_path / "simulation.html").read_text()
    _, _, chart = page.partition('aria-label="effective time ratio by checkpoint interval"')
    points = [line.partition('"')[0].split() for line in chart.split('<polyline points="')[1:]]
    assert [len({*line}) for line in points] == [41, 41, 1, 1, 1, 1]  # exact, first order, two dots with their rings
    few, many = (
        run_command([*COMMAND, "--gpus", gpus, "--days", "0.1", "--runs", "1"], capsys)[1] for gpus in ("4", "10000000")
    )
    assert "4 GPUs on 1 node; 6.5 failures per 1,000 node-days: one every 154 days" in few
    assert "almost no progress" in many


def test_a_job_that_fails_very_often_is_simulated_fewer_times(capsys: pytest.CaptureFixture[str]) -> None:
    failures_of_a_run = 5_000_000 / 8 * 6.5 / 1000 * 100
    found = json_of([*COMMAND, "--gpus", "5000000", "--days", "100"], capsys)
    assert found["monte_carlo"]["runs"] == int(2_000_000 / failures_of_a_run) == 4


CHECKPOINTS = [save("checkpoint", 9.0), save("checkpoint", 2.0), save("checkpoint", 4.0), save("model", 100.0)]


@pytest.mark.parametrize(
    ("saves", "cost"),
    [(CHECKPOINTS, 4.0), (None, None), ([save("model", 3.0)], None), ([save("checkpoint", 0.0)], None)],
)
def test_a_save_costs_the_median_time_for_which_a_runs_checkpoints_made_training_stand_still(
    saves: list[dict[str, Any]] | None, cost: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "completed", "saves": saves}))
    code, out, err = run_command([*COMMAND, "--gpus", "16", "--run-folder", str(tmp_path), "--json"], capsys)
    if cost is None:
        assert (code, "recorded no checkpoint" in err) == (2, True)
    else:
        assert json.loads(out)["checkpoint_seconds"] == cost


def failing_job(**changes: Any) -> FailingJob:
    values: dict[str, Any] = {"nodes": 1500, "failures_per_1000_node_days": 6.5}
    return FailingJob(**{**values, "checkpoint_seconds": 60.0, "restart_seconds": 300.0, **changes})


def simulated(failing: FailingJob, *, runs: int = 10, seed: int = 0) -> SimulatedFailures:
    return simulate_failures(failing, days=365.0, runs=runs, seed=seed)


@pytest.mark.parametrize(
    "failing",
    [
        failing_job(),
        failing_job(nodes=100, checkpoint_seconds=600.0, detection_seconds=900.0),
        failing_job(restart_seconds=0.0, interval_seconds=4.0 * HOUR),
    ],
    ids=["12k GPUs", "slow saves and detection", "rare saves"],
)
def test_the_simulation_agrees_with_the_exact_closed_form(failing: FailingJob) -> None:
    found = simulated(failing)
    assert found.standard_error is not None
    assert found.effective_time_ratio == pytest.approx(failing.exact_time_ratio, abs=5 * found.standard_error)
    assert found.standard_error < 0.006


def test_the_simulation_agrees_with_erlangs_formula_for_spares() -> None:
    failing = failing_job(spare_nodes=12, repair_seconds=24.0 * HOUR)
    found = simulated(failing, runs=20)
    assert 1 - found.stopped_fraction == pytest.approx(failing.availability, abs=0.005)
    assert found.effective_time_ratio == pytest.approx(failing.exact_time_ratio * failing.availability, abs=0.006)


def test_failures_come_at_their_rate_and_a_seed_repeats_them() -> None:
    found = simulated(failing_job(), runs=20)
    assert found.failures == pytest.approx(365 * 24 * HOUR / failing_job().mean_seconds_between_failures, rel=0.01)
    assert simulated(failing_job(), runs=20) == found
    assert simulated(failing_job(), runs=20, seed=1) != found

"""`toolkit simulate stragglers`: options, results, tables and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from command_line import run_command

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.plan.interconnect import Interconnect
from toolkit.simulate.options import StragglerOptions
from toolkit.simulate.stragglers import (
    StragglerStudy,
    compute_times,
    drawn_seconds,
    measured_step_times,
    push_pull_seconds,
    resampled,
    straggler_report,
    study_stragglers,
)

GIGA = 10**9
FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA_8B, RECORDED = str(FIXTURES / "llama-8b"), FIXTURES / "recorded_demo_ddp"
SMALL = StragglerOptions(workers=4, steps=20)


def study(options: StragglerOptions = SMALL) -> StragglerStudy:
    return study_stragglers(options, say=lambda _: None)


def test_every_policy_is_trained_on_as_many_gradients() -> None:
    small = study()
    names = ["synchronous", "backup_workers 1", "bounded_staleness 4", "asynchronous"]
    assert [result.run.policy.label for result in small.policies] == names
    assert [sum(result.run.staleness.values()) for result in small.policies] == [80, 60, 80, 80]
    assert small.policies[0].seconds_to_target is not None
    assert small.policies[0].as_row()["waiting_fraction"] == pytest.approx(1 - 1 / small.slowdown)


def test_the_loss_to_reach_is_that_of_the_first_policy_where_none_is_synchronous() -> None:
    found = study(replace(SMALL, policy=("asynchronous", "bounded_staleness")))
    assert (found.target_policy, found.target_loss) == ("asynchronous", 1.05 * found.policies[0].curve[-1][1])
    assert "5 % above the last of asynchronous" in straggler_report(found).notes[-1]


def test_with_a_model_its_gradients_are_communicated() -> None:
    found = study(replace(SMALL, model=LLAMA_8B, gpu="h100", policy=("synchronous", "asynchronous")))
    assert found.gradient_bytes == 4 * 8_030_261_248
    assert found.all_reduce_seconds is not None
    assert found.push_pull_seconds is not None
    synchronous, asynchronous = (result.run for result in found.policies)
    assert synchronous.communication_seconds == pytest.approx(4 * 20 * found.all_reduce_seconds[1])
    assert asynchronous.communication_seconds == pytest.approx(80 * found.push_pull_seconds[1])
    assert asynchronous.communication_seconds > synchronous.communication_seconds, "one server for four workers"
    assert straggler_report(found).notes[-1].startswith("Gradients of 29.92 GiB: an all-reduce takes")


def test_one_parameter_server_takes_as_many_times_longer_as_there_are_workers() -> None:
    """64 H100s, each on a node with 50 GB/s, push and pull 8 GB; with 64 servers they are as fast as a ring."""
    nodes = Interconnect(gpu=find_gpu("h100"), world_size=64, gpus_per_node=1, network_bytes_per_second=50 * GIGA)
    ring_seconds = 2 * 63 / 64 * 8 / 50
    assert push_pull_seconds(nodes, 8 * GIGA, servers=1)[0] == pytest.approx(2 * 64 * 8 / 50, rel=0.001)
    assert push_pull_seconds(nodes, 8 * GIGA)[0] == pytest.approx(ring_seconds * 64 / 63, rel=0.002)


def test_a_diverged_policy_is_named_and_has_no_loss() -> None:
    found = study(replace(SMALL, learning_rate=1e6, policy=("synchronous",)))
    (diverged,) = found.policies
    assert diverged.final_loss is None
    assert all(loss < float("inf") for _, loss in diverged.curve), "it ends with the last finite loss"
    assert "diverged" in straggler_report(found).page()
    assert found.as_json()["policies"][0]["final_loss"] is None


def test_the_command_prints_json_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "stragglers", "--workers", "4", "--steps", "20", "--json"]
    code, out, err = run_command([*words, "--output-dir", str(tmp_path)], capsys)
    assert code == 0
    assert {"policies", "all_reduce_seconds", "slowdown", "best_backup_workers"} <= set(json.loads(out))
    assert "simulation.html" in err
    assert json.loads((tmp_path / "simulation.json").read_text()) == json.loads(out)
    page, policies = (tmp_path / "simulation.html").read_text(), json.loads(out)["policies"]
    assert page.count('<div class="bar">') == page.count("<polyline") == len(policies), "one speed, one loss curve each"


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

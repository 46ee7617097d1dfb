"""`toolkit simulate stragglers`: options, results, tables and the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit import cli
from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.plan.interconnect import Interconnect
from toolkit.simulate.options import StragglerOptions
from toolkit.simulate.straggler_report import page, policy_table, summary
from toolkit.simulate.stragglers import (
    StragglerStudy,
    chosen_policies,
    push_pull_seconds,
    study_stragglers,
)

GIGA = 10**9

LLAMA_8B = str(Path(__file__).parent.parent / "fixtures" / "llama-8b")
SMALL = StragglerOptions(workers=4, steps=20)
WITH_MODEL = replace(SMALL, model=LLAMA_8B, gpu="h100", policy=("synchronous", "asynchronous"))


def study(options: StragglerOptions = SMALL) -> StragglerStudy:
    return study_stragglers(options, say=lambda _: None)


@pytest.fixture(scope="module")
def small() -> StragglerStudy:
    return study()


@pytest.fixture(scope="module")
def with_model() -> StragglerStudy:
    return study(WITH_MODEL)


def test_every_policy_is_trained_on_as_many_gradients(small: StragglerStudy) -> None:
    names = ["synchronous", "backup_workers 1", "bounded_staleness 4", "asynchronous"]
    assert [result.run.policy.label for result in small.policies] == names
    assert [row[0].text for row in policy_table(small).rows] == names
    assert [sum(result.run.staleness.values()) for result in small.policies] == [80, 60, 80, 80]
    assert small.policies[0].seconds_to_target is not None
    assert small.policies[0].run.waiting_fraction == pytest.approx(1 - 1 / small.slowdown)


def test_the_loss_to_reach_is_that_of_the_first_policy_where_none_is_synchronous() -> None:
    found = study(replace(SMALL, policy=("asynchronous", "bounded_staleness")))
    assert (found.target_policy, found.target_loss) == ("asynchronous", 1.05 * found.policies[0].curve[-1][1])
    assert "5 % above the last of asynchronous" in page(found)


def test_a_seed_gives_the_same_study(small: StragglerStudy) -> None:
    assert study().as_json() == small.as_json()


def test_without_a_model_nothing_is_communicated(small: StragglerStudy) -> None:
    assert small.all_reduce_seconds is None
    assert {result.run.communication_seconds for result in small.policies} == {0.0}


def test_with_a_model_its_gradients_are_communicated(with_model: StragglerStudy) -> None:
    assert with_model.gradient_bytes == 4 * 8_030_261_248
    assert with_model.all_reduce_seconds is not None
    assert with_model.push_pull_seconds is not None
    synchronous, asynchronous = (result.run for result in with_model.policies)
    assert synchronous.communication_seconds == pytest.approx(4 * 20 * with_model.all_reduce_seconds[1])
    assert asynchronous.communication_seconds == pytest.approx(80 * with_model.push_pull_seconds[1])
    assert asynchronous.communication_seconds > synchronous.communication_seconds, "one server for four workers"
    assert "Gradients of 29.92 GiB: an all-reduce takes" in page(with_model)


def test_one_parameter_server_takes_as_many_times_longer_as_there_are_workers() -> None:
    """64 H100s, each on a node with 50 GB/s, push and pull 8 GB; with 64 servers they are as fast as a ring."""
    nodes = Interconnect(gpu=find_gpu("h100"), world_size=64, gpus_per_node=1, network_bytes_per_second=50 * GIGA)
    ring_seconds = 2 * 63 / 64 * 8 / 50
    assert push_pull_seconds(nodes, 8 * GIGA, servers=1)[0] == pytest.approx(2 * 64 * 8 / 50, rel=0.001)
    assert push_pull_seconds(nodes, 8 * GIGA)[0] == pytest.approx(ring_seconds * 64 / 63, rel=0.002)


def test_a_slow_worker_costs_synchronous_training_its_factor() -> None:
    options = replace(SMALL, distribution="constant", slow_workers=1, slow_factor=3.0, policy=("synchronous",))
    found = study(options)
    assert found.slowdown == pytest.approx(3 / 1.5)
    assert found.policies[0].run.waiting_fraction == pytest.approx(0.5)
    assert (found.best_backup_workers, found.best_backup_gain) == (1, pytest.approx(3 / 4 * 20 * 3 / 20))


def test_a_large_study_says_what_it_does() -> None:
    said: list[str] = []
    options = replace(SMALL, workers=200, steps=51, policy=("synchronous",))
    study_stragglers(options, say=said.append)
    assert said == ["simulating and training synchronous"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 1}, "--workers is 1, expected 2 to"),
        ({"backup_workers": 4}, "--backup-workers is 4, expected 1 to 3"),
        ({"staleness": -1}, "--staleness is -1"),
        ({"policy": ("async",)}, "unknown policy 'async'"),
        ({"distribution": "gauss"}, "unknown distribution 'gauss'"),
        ({"step_seconds": -1.0}, "--step-seconds is -1"),
        ({"spread": math.nan}, "--spread is nan"),
        ({"slow_workers": 5}, "--slow-workers is 5"),
        ({"slow_factor": math.nan}, "--slow-factor is nan"),
        ({"steps": 0}, "--steps is 0"),
        ({"workers": 1000, "steps": 1001}, "more than 1,000,000 batches"),
        ({"seed": -1}, "--seed is -1"),
        ({"learning_rate": math.nan}, "--learning-rate is nan"),
        ({"run_folder": Path("run"), "spread": 0.1}, "--run-folder and --spread both"),
        ({"run_folder": Path("no-such-run")}, "no-such-run has no timed step"),
        ({"gpu": "h100"}, "--gpu has no effect"),
        ({"model": LLAMA_8B, "gpu": "h100", "parameter_servers": 0}, "--parameter-servers is 0"),
        ({"parameter_servers": 2}, "--parameter-servers has no effect"),
        ({"model": LLAMA_8B, "gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"model": LLAMA_8B, "gpu": "h100", "network_gb_per_second": math.nan}, "--network-gb-per-second is nan"),
        ({"model": LLAMA_8B, "gpu": "h100", "gpus_per_node": 3}, "4 GPUs do not fill nodes of 3"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        study(replace(SMALL, **given))


def test_backup_workers_above_the_workers_do_not_matter_to_other_policies() -> None:
    assert chosen_policies(replace(SMALL, policy=("synchronous",), backup_workers=99))[0].number == 0


def test_the_page_has_every_chart_and_makes_no_request(small: StragglerStudy) -> None:
    html = page(small)
    assert "lognormal, mean 1 s, spread 0.2" in summary(small)
    for title in ("Steps per second", "Loss by time"):
        assert f"<h2>{title}" in html
    assert html.count("<svg") == 1
    assert "src=" not in html
    assert "href=" not in html


def test_a_diverged_policy_is_named_and_has_no_loss() -> None:
    found = study(replace(SMALL, learning_rate=1e6, policy=("synchronous",)))
    assert found.policies[0].final_loss is None
    assert "diverged" in page(found)
    assert found.as_json()["policies"][0]["final_loss"] is None


def test_the_command_prints_json_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "stragglers", "--workers", "4", "--steps", "20", "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--output-dir", str(tmp_path)])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert {"policies", "all_reduce_seconds", "slowdown", "best_backup_workers"} <= set(json.loads(printed.out))
    assert "simulation.html" in printed.err
    assert json.loads((tmp_path / "simulation.json").read_text()) == json.loads(printed.out)


def test_the_command_refuses_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "stragglers", "--backup-workers", "16"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: --backup-workers is 16, expected 1 to 15\n"
        "  hint: fewer backup workers than workers; `--policy synchronous` has none\n"
    )

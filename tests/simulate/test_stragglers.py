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
from toolkit.simulate.allreduce_algorithms import ReductionTime
from toolkit.simulate.straggler_options import StragglerOptions
from toolkit.simulate.straggler_report import html_text, policy_table, reduction_table, summary, write_report
from toolkit.simulate.stragglers import StragglerStudy, checked, communication_seconds, study_stragglers
from toolkit.simulate.synchronization import Policy

LLAMA_8B = str(Path(__file__).parent.parent / "fixtures" / "llama-8b")
SMALL = StragglerOptions(workers=4, steps=20, compression=("none", "top_k:0.1"))
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
    assert [result.policy for result in small.policies] == [
        "synchronous",
        "backup_workers 1",
        "bounded_staleness 4",
        "asynchronous",
    ]
    assert [sum(result.staleness.values()) for result in small.policies] == [80, 60, 80, 80]
    assert small.policies[0].seconds_to_target is not None
    assert small.policies[0].waiting_fraction == pytest.approx(1 - 1 / small.slowdown)


def test_the_loss_to_reach_is_that_of_the_first_policy_where_none_is_synchronous() -> None:
    found = study(replace(SMALL, policy=("asynchronous", "bounded_staleness")))
    assert (found.target_policy, found.target_loss) == ("asynchronous", 1.05 * found.policies[0].curve[-1].loss)
    assert "5 % above the last of asynchronous" in html_text(found)


def test_a_seed_gives_the_same_study(small: StragglerStudy) -> None:
    assert study().as_json() == small.as_json()


def test_without_a_model_nothing_is_communicated(small: StragglerStudy) -> None:
    assert small.reductions == ()
    assert {result.communication_fraction for result in small.policies} == {0.0}
    assert {result.communication_seconds for result in small.compressions} == {None}


def test_with_a_model_its_gradients_are_communicated(with_model: StragglerStudy) -> None:
    assert with_model.gradient_bytes == 4 * 8_030_261_248
    assert [found.algorithm for found in with_model.reductions] == ["ring", "tree", "hierarchical", "parameter_server"]
    synchronous, asynchronous = with_model.policies
    assert synchronous.communication_fraction > 0
    assert asynchronous.communication_fraction > synchronous.communication_fraction, "one server for four workers"
    none, top_k = with_model.compressions
    assert none.communication_seconds is not None
    assert top_k.communication_seconds is not None
    assert none.step_seconds - none.communication_seconds[1] == pytest.approx(
        top_k.step_seconds - top_k.communication_seconds[1]
    )


def test_a_slow_worker_costs_synchronous_training_its_factor() -> None:
    options = replace(SMALL, distribution="constant", slow_workers=1, slow_factor=3.0, policy=("synchronous",))
    found = study(options)
    assert found.slowdown == pytest.approx(3 / 1.5)
    assert found.policies[0].waiting_fraction == pytest.approx(0.5)
    assert (found.best_backup_workers, found.best_backup_gain) == (1, pytest.approx(3 / 4 * 20 * 3 / 20))


def test_synchronous_policies_reduce_and_the_others_push_and_pull() -> None:
    times = [
        ReductionTime(algorithm=name, seconds=(0.0, seconds), sent_bytes=1)
        for name, seconds in (("ring", 2.0), ("tree", 3.0), ("parameter_server", 5.0))
    ]
    assert communication_seconds(Policy(name="backup_workers", backup_workers=1), times) == 2.0
    assert communication_seconds(Policy(name="asynchronous"), times) == 5.0


def test_a_large_study_says_what_it_does() -> None:
    said: list[str] = []
    options = replace(SMALL, workers=200, steps=51, policy=("synchronous",), compression=("none",))
    study_stragglers(options, say=said.append)
    assert said == ["simulating and training synchronous", "training with none"]


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
        ({"compression": ("zip",)}, "unknown compression 'zip'"),
        ({"run_folder": Path("run"), "spread": 0.1}, "--run-folder and --spread both"),
        ({"run_folder": Path("no-such-run")}, "no-such-run has no timed step"),
        ({"gpu": "h100"}, "--gpu has no effect"),
        ({"parameter_servers": 2}, "--parameter-servers has no effect"),
        ({"model": LLAMA_8B, "gpu": "h1000"}, "unknown GPU 'h1000'"),
        ({"model": LLAMA_8B, "gpu": "h100", "network_gb_per_second": math.nan}, "--network-gb-per-second is nan"),
        ({"model": LLAMA_8B, "gpu": "h100", "gpus_per_node": 3}, "4 GPUs do not fill nodes of 3"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        checked(replace(SMALL, **given))


def test_backup_workers_above_the_workers_do_not_matter_to_other_policies() -> None:
    assert checked(replace(SMALL, policy=("synchronous",), backup_workers=99)).policies[0].backup_workers == 0


def test_the_tables_have_a_line_for_each_result(small: StragglerStudy, with_model: StragglerStudy) -> None:
    assert [row[0].text for row in policy_table(small).rows] == [result.policy for result in small.policies]
    assert [row[0].text for row in reduction_table(with_model).rows] == [
        "ring",
        "tree",
        "hierarchical",
        "parameter_server",
    ]
    assert "lognormal, mean 1 s, spread 0.2" in summary(small)


def test_the_page_has_every_chart_and_makes_no_request(small: StragglerStudy, with_model: StragglerStudy) -> None:
    page = html_text(with_model)
    for title in (
        "Steps per second",
        "Loss by time",
        "Staleness",
        "Reducing the gradients",
        "Compression: loss by time",
    ):
        assert f"<h2>{title}" in page
    assert page.count("<svg") == 3
    assert "src=" not in page
    assert "href=" not in page
    assert "Reducing the gradients" not in html_text(small)


def test_a_diverged_policy_is_named_and_has_no_loss(tmp_path: Path) -> None:
    found = study(replace(SMALL, learning_rate=1e6, policy=("synchronous",), compression=("none",)))
    assert found.policies[0].final_loss is None
    assert "diverged" in html_text(found)
    write_report(found, tmp_path)
    assert json.loads((tmp_path / "simulation.json").read_text())["policies"][0]["final_loss"] is None


def test_the_command_prints_json_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "stragglers", "--workers", "4", "--steps", "20", "--compression", "none", "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--output-dir", str(tmp_path)])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert {"policies", "reductions", "compressions", "slowdown", "best_backup_workers"} <= set(json.loads(printed.out))
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

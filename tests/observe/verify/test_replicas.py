"""Ranks that hold the same weights hold the same values: after the first step, at a save and at the end."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, accelerate_launch, nightly, nightly_launch, read

from toolkit.observe.verify.differences import replica_differences
from toolkit.observe.verify.verification import SAME_ROWS
from toolkit.record.reading import RankReading


def rank(number: int, **values: Any) -> RankReading:
    return RankReading(**{"rank": number, "sharding": "replicate", "replicas": "equal"} | values)


def test_a_rank_whose_weights_are_not_those_of_the_others_differs() -> None:
    differences = replica_differences([rank(0), rank(1, replicas="no_sync"), rank(2, replicas=None)])
    assert list(map(str, differences)) == ["replicas on rank 1 is no_sync, expected equal"]


def test_learning_rates_and_steps_are_compared_where_weights_have_no_copy() -> None:
    rates = [{"learning_rates": [1e-3], "optimizer_steps": 1}, {"learning_rates": [2e-3], "optimizer_steps": 0}]
    shown = ["learning_rates (equal on all ranks) on rank 1 is [0.002], expected [0.001]"]
    shown.append("optimizer_steps (equal on all ranks) on rank 1 is 0, expected 1")

    def of(**values: Any) -> list[str]:
        return list(map(str, replica_differences([rank(n, **each, **values) for n, each in enumerate(rates)])))

    assert of(sharding="full_shard", replicas=None) == shown
    assert of(sharding="shard_grad_op") == shown  # every rank has all weights, each from another rank's optimizer
    assert of(sharding="replicate", replicas=None, layout={"tp": 2, "pp": 1}) == shown
    assert of(sharding="replicate", replicas=None, layout={"tp": 1, "pp": 2}) == []  # of other layers
    assert of() == []  # the weights show it


def observed(mode: str, folder: Path, *options: str, preset: str = "ddp") -> subprocess.CompletedProcess[str]:
    own = ["--output-dir", str(folder / "run"), "--require", preset, *options, str(SCRIPTS / "apart.py")]
    return accelerate_launch(
        ROOT / "accelerate_configs" / f"{preset}.yaml", *own, mode, str(folder / "out"), module="toolkit.observe"
    )


@pytest.mark.launch
@pytest.mark.parametrize(
    ("mode", "said", "after_step_1"),
    [
        pytest.param("never_synced", "match its preset and arguments:", "no_sync", marks=pytest.mark.nightly),
        ("never_synced_warm", "train one model: after step 2", "equal"),  # the learning rate of step 1 is 0
    ],
)
def test_ranks_that_exchange_no_gradient_are_found_after_the_first_update(
    mode: str, said: str, after_step_1: str, tmp_path: Path
) -> None:
    ended = observed(mode, tmp_path)
    assert ended.returncode == 1
    assert f"{said} replicas on rank 1 is no_sync, expected equal" in ended.stderr
    assert "the backward was in `no_sync`: ranks exchanged no gradients" in ended.stderr
    replicas = [each["replicas"] for each in read(tmp_path / "run" / "attestation.json")["ranks"]]
    assert replicas == ["equal", after_step_1]


@pytest.mark.launch
@pytest.mark.parametrize(("mode", "step"), [("drifts_saves", 3), pytest.param("drifts", 4, marks=pytest.mark.nightly)])
def test_ranks_that_come_apart_later_are_found_before_a_save_and_at_the_end(
    mode: str, step: int, tmp_path: Path
) -> None:
    ended = observed(mode, tmp_path, "--complete-saves")
    assert ended.returncode == 1
    message = f"the ranks do not train one model: after step {step} replicas on rank 1 is different, expected equal"
    assert message in ended.stderr
    assert "layers.0.weight on rank 1 differs from rank 0's, as 1 of 8 do" in ended.stderr
    run = read(tmp_path / "run" / "run.json")
    assert (run["status"], run["replica_checks"]) == ("attestation_failed", [{"step": step, "replicas": "different"}])
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.launch
@pytest.mark.parametrize("mode", ["averages", *nightly("buffers", "freezes", "plain_saves", "own_loader")])
def test_what_may_differ_between_ranks_is_not_compared(mode: str, tmp_path: Path) -> None:
    ended = observed(mode, tmp_path, "--complete-saves")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (SAME_ROWS in ended.stdout) is (mode == "own_loader")
    steps = [3, 4] if mode == "plain_saves" else [4]
    checks = [{"step": step, "replicas": "equal"} for step in steps]
    assert read(tmp_path / "run" / "run.json")["replica_checks"] == checks


@nightly_launch
def test_a_layer_that_no_loss_uses_is_no_deviation_under_deepspeed(tmp_path: Path) -> None:
    """ZeRO-1 keeps no gradient for it."""
    ended = observed("plain_saves", tmp_path, preset="zero1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "verified: zero1" in ended.stdout

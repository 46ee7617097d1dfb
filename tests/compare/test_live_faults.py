"""Three faults injected into live ranks, each caught by the check meant for it; benchmarks/live_faults.py has all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

ROWS = ("bf16_adam", "no_clipping", "order_on_rank_1")


@pytest.fixture(scope="module")
def live_faults() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield __import__("live_faults")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in ("live_faults", "record", "small_job"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def compared(live_faults: Any, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """ddp compared with itself and with three faults, one trial each."""
    folder = tmp_path_factory.mktemp("faults") / "cmp"
    job = live_faults.job(tiny_model)
    faults = [fault for kind in live_faults.FAULTS.values() for fault in kind if fault.row in ROWS]
    live_faults.compare(folder, job, "--preset", "ddp", *live_faults.variants(faults), "--num-processes", "2")
    return folder


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.parametrize("row", ROWS)
def test_an_injected_fault_fails_its_own_check_and_has_no_speed(live_faults: Any, compared: Path, row: str) -> None:
    (fault,) = (fault for kind in live_faults.FAULTS.values() for fault in kind if fault.row == row)
    found = live_faults.figures(compared, f"{row}-n2")
    assert found["ranks_that_acted"], "the fault was not injected"
    assert found["found_by"] == fault.caught_by, found["message"]
    assert live_faults.judged("", fault, found)["as_it_should"]


@pytest.mark.launch
@pytest.mark.nightly
def test_the_same_trial_without_a_fault_passes_every_check(live_faults: Any, compared: Path) -> None:
    found = live_faults.figures(compared, "ddp-n2")
    assert (found["status"], found["parity"], found["ranks_that_acted"]) == ("completed", "reference", [])
    assert found["tokens_per_second"] > 0

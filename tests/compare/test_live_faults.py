"""Three faults injected into live ranks, each caught by the check meant for it; benchmarks/live_faults.py has all."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT

ROWS = ("bf16_adam", "no_clipping", "order_on_rank_1")


@pytest.mark.launch
@pytest.mark.nightly
def test_an_injected_fault_fails_its_own_check_and_has_no_speed_and_a_trial_without_one_passes_all(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ddp` is compared with itself and with three faults, one trial each."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import live_faults

    faults = [fault for kind in live_faults.FAULTS.values() for fault in kind if fault.row in ROWS]
    words = ("--preset", "ddp", "--num-processes", "2")
    live_faults.compare(tmp_path / "cmp", live_faults.job(tiny_model), faults, *words)
    for fault in faults:
        found = live_faults.figures(tmp_path / "cmp", f"{fault.row}-n2")
        assert found["ranks_that_acted"], f"{fault.row} was not injected"
        assert found["found_by"] == fault.caught_by, found["message"]
        assert live_faults.judged("", fault, found)["as_it_should"]
    found = live_faults.figures(tmp_path / "cmp", "ddp-n2")
    assert (found["status"], found["parity"], found["ranks_that_acted"]) == ("completed", "reference", [])
    assert found["tokens_per_second"] > 0

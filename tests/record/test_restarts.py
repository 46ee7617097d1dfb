"""`restarts` in run.json: how each earlier attempt ended, on how many ranks, and the steps that were trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder, write_json
from toolkit.record.restarts import record_restart


def trained(path: Path, *, steps: dict[int, int], **facts: Any) -> RunFolder:
    """A run folder whose ranks have trained so many steps."""
    folder = RunFolder(path)
    start_attempt(folder)
    folder.update_run(world_size=len(steps), **facts)
    for rank, number in steps.items():
        folder.rank_rows(rank).write_text(
            "".join(f'{{"step": {step}, "seconds": 0.5}}\n' for step in range(1, number + 1))
        )
    return folder


def test_an_attempt_that_failed_is_recorded_with_its_world_size_and_lost_steps(tmp_path: Path) -> None:
    folder = trained(tmp_path, steps={0: 7, 1: 6}, status="failed")
    write_json(folder.failure_json, {"kind": "failed", "rank": 1, "step": 6, "message": "gone"})
    ended = {"rank": 1, "step": 6, "status": "failed", "message": "gone", "world_size": 2}
    lost = {"lost_steps": 2, "lost_seconds": 1.5}  # rank 0 had trained step 7 too
    assert record_restart(folder, resumed_step=4) == [ended | {"resumed_from_step": 4} | lost]


def test_ranks_that_could_not_report_have_failed_and_earlier_restarts_stay(tmp_path: Path) -> None:
    folder = trained(tmp_path, steps={0: 5}, status="running", restarts=[{"world_size": 2}])
    folder.rank_rows(1).write_text('{"step": 1}\n')  # of the first attempt, which had two ranks
    first, second = record_restart(folder, resumed_step=4)
    assert first == {"world_size": 2}
    assert (second["status"], second["world_size"], second["lost_steps"]) == ("failed", 1, 1)
    assert "their node was lost" in second["message"]


@pytest.mark.parametrize("facts", [{"status": "completed"}, {"status": "failed"}])
def test_a_run_that_completed_or_never_trained_is_no_restart(facts: dict[str, Any], tmp_path: Path) -> None:
    steps = {0: 3} if facts["status"] == "completed" else {}
    assert record_restart(trained(tmp_path, steps=steps, **facts), resumed_step=0) == []

"""Progress on a terminal."""

from __future__ import annotations

import pytest
from comparison_records import trial

from toolkit.compare.runner import ConsoleProgress


def test_terminal_bars_follow_one_trial_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    progress = ConsoleProgress(2)
    assert progress.bars is not None
    with progress:
        for record in (trial("ddp", 0), trial("zero2", 0, status="failed", message="no room")):
            progress.start(record.trial)
            progress.output_line("step 3/8  on rank 0: loss 2.0")
            steps = progress.bars.tasks[-1]
            assert (steps.description, steps.completed, steps.total) == (record.trial, 3, 8)
            progress.finish(record)
    assert progress.bars.tasks[0].completed == 2

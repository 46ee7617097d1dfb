"""How a comparison runs: its progress on a terminal, and the arguments of side runs."""

from __future__ import annotations

import pytest
from comparison_records import trial

from toolkit.compare.runner import ConsoleProgress, side_run_arguments


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


def test_a_side_run_has_a_few_steps_of_which_the_last_are_profiled_and_saved() -> None:
    assert side_run_arguments(["profile", "save"], untimed_steps=2) == [
        *("--max_steps", "4", "--profile_steps", "3:4"),
        *("--save_strategy", "steps", "--save_steps", "4"),
    ]
    assert side_run_arguments(["save"], untimed_steps=0) == [
        *("--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2")
    ]

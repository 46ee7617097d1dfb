"""Side runs: their training arguments."""

from __future__ import annotations

from toolkit.compare.runner import side_run_arguments


def test_a_side_run_has_a_few_steps_of_which_the_last_are_profiled_and_saved() -> None:
    assert side_run_arguments(["profile", "save"], untimed_steps=2) == [
        *("--max_steps", "4", "--profile_steps", "3:4"),
        *("--save_strategy", "steps", "--save_steps", "4"),
    ]
    assert side_run_arguments(["save"], untimed_steps=0) == [
        *("--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2"),
    ]

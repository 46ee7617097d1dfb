"""The arithmetic of speed on a recorded run: the demo's `ddp` on two CPU ranks, 8 steps, its rank rows as they were.

Worked by hand from the columns `tokens`, `non_padding_tokens`, `supervised_tokens` and the slower rank's `seconds`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import measure, read_steps

RECORDED = RunFolder(Path(__file__).parents[1] / "fixtures" / "recorded_demo_ddp")
# Steps 3 to 8: 3.203 + 3.743 + 4.617 + 6.389 + 7.299 + 5.503 s, each the slower of two ranks.
TIMED_SECONDS = 30.753
# Of both ranks: 372 + 480 + 408 + 506 + 490 + 388, and the same without padding, and supervised.
TOKENS, NON_PADDING, SUPERVISED = 2644, 2379, 1395


def test_speeds_count_the_timed_steps_of_all_ranks_by_the_slower_one() -> None:
    measured = measure(read_steps(RECORDED), untimed_steps=2)
    assert measured.timed_seconds == pytest.approx(TIMED_SECONDS, abs=1e-3)
    assert measured.tokens_per_second == pytest.approx(TOKENS / TIMED_SECONDS, rel=1e-4)
    assert measured.non_padding_tokens_per_second == pytest.approx(NON_PADDING / TIMED_SECONDS, rel=1e-4)
    assert measured.supervised_tokens_per_second == pytest.approx(SUPERVISED / TIMED_SECONDS, rel=1e-4)
    assert measured.padding_fraction == pytest.approx(1 - NON_PADDING / TOKENS)
    assert measured.timed_step_numbers == (3, 4, 5, 6, 7, 8)


def test_a_slow_first_step_changes_no_speed() -> None:
    steps = read_steps(RECORDED)
    speed = measure(steps, untimed_steps=2).tokens_per_second
    steps[0][0] = steps[0][0].model_copy(update={"seconds": 1000.0})
    assert measure(steps, untimed_steps=2).tokens_per_second == speed

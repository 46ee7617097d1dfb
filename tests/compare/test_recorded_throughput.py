"""The arithmetic of speed on a recorded run: the demo's `ddp` on two CPU ranks, 8 steps, its rank rows as they were.

Worked by hand from the columns `tokens`, `non_padding_tokens`, `supervised_tokens` and the slower rank's `seconds`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison_records import node, row, trial

from toolkit.compare.efficiency import with_efficiency
from toolkit.models.read_model import read_model
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


def test_the_first_step_is_in_no_speed() -> None:
    """7.3 s for 340 tokens, twice as long a token as later; with both untimed steps the speed would read 80, not 86."""
    steps = read_steps(RECORDED)
    with_all = measure(steps, untimed_steps=0)
    timed = measure(steps, untimed_steps=2)
    assert (timed.timed_steps, timed.timed_step_numbers) == (6, (3, 4, 5, 6, 7, 8))
    assert with_all.tokens_per_second == pytest.approx((340 + 384 + TOKENS) / (7.281 + 3.884 + TIMED_SECONDS), rel=1e-4)
    assert timed.tokens_per_second == pytest.approx(85.97, abs=0.01)
    steps[0][0] = steps[0][0].model_copy(update={"seconds": 1000.0})  # however slow the first step is
    assert measure(steps, untimed_steps=2).tokens_per_second == timed.tokens_per_second


def test_mfu_of_the_recorded_speed_as_if_it_were_an_h100_s(real_model: Path) -> None:
    """134,515,008 parameters, 30 layers of 9 heads of 64; 2644 tokens in 6 steps of 4 sequences are 110 each."""
    measured = measure(read_steps(RECORDED), untimed_steps=2)
    assert measured.tokens_per_second is not None
    params = 134_515_008
    timed = row(
        tokens_per_second_per_gpu=measured.tokens_per_second / 2, num_params=params, num_trainable_params=params
    )
    recorded = trial(
        "ddp",
        0,
        step_tokens=measured.step_tokens,
        timed_step_numbers=measured.timed_step_numbers,
        compute_dtype="bfloat16",
        problem={"global_batch_size": 4, "activation_checkpointing": True},
    )
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 1}
    found = with_efficiency(timed, [recorded], shape=read_model(str(real_model)), environment=node("cuda", gpu))
    assert found.flops_per_token is not None
    causal = 6 * params + 6 * 30 * 576 * 110
    assert found.flops_per_token.causal == causal == 818_494_848
    assert found.mfu == pytest.approx(42.9874 * 818_494_848 / 989e12, rel=1e-3)
    again = 2 * params + 2 * 30 * 576 * 110  # one more forward, which activation checkpointing asks for
    assert found.hfu == pytest.approx(42.9874 * (causal + again) / 989e12, rel=1e-3)

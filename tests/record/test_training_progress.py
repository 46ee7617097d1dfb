"""The newest step that all ranks have written as one line, and signs that a run which completed has diverged."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from launching import nightly

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import StepRow
from toolkit.record.training_progress import (
    STEP_LINE,
    loss_growth,
    newest_steps,
    repeated_epoch,
    signs_of_divergence,
    step_line,
    untrained_steps,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"


def row(step: int, rank: int = 0, **measured: Any) -> StepRow:
    of_process = measured.pop("step_of_process", step)
    figures = {"seconds": 2.0, "cpu_seconds": 1.0, "loss": 3.0, "grad_norm": 1.5, "peak_host_bytes": 2**30}
    tokens = dict.fromkeys(("tokens", "non_padding_tokens", "supervised_tokens"), 100)
    gpu = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"))
    facts = figures | tokens | gpu | {"batch_sha256": "a", "step_of_process": of_process}
    return StepRow.model_validate(facts | {"step": step, "rank": rank} | measured)


def norms(*values: float | None) -> list[list[StepRow]]:
    return [[row(step, grad_norm=value)] for step, value in enumerate(values, 1)]


def test_a_step_line_sums_tokens_and_means_losses_over_ranks_and_has_the_largest_peak() -> None:
    step = [row(3), row(3, rank=1, loss=4.0, seconds=4.0, peak_host_bytes=2**31)]
    line = step_line(step, max_steps=8, seconds_left=75.0)
    assert line == "step 3/8  loss 3.5000  grad_norm 1.5  4.00 s  50.0 tokens/s  peak 2.00 GiB RSS  1 min 15 s left"
    assert STEP_LINE.match(line)


def test_a_step_line_on_a_gpu_has_what_is_allocated_and_what_is_reserved() -> None:
    step = [row(3, peak_allocated_bytes=2**30, peak_reserved_bytes=2**31, grad_norm=None, tokens=None)]
    assert (
        step_line(step, max_steps=0, seconds_left=None)
        == "step 3  loss 3.0000  2.00 s  peak 1.00 GiB, 2.00 GiB reserved"
    )


def test_the_newest_steps_are_those_of_this_attempt_that_every_rank_has_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    steps = {0: [row(1), row(2), row(3)], 1: [row(1, 1), row(2, 1, step_of_process=7)]}  # left by an attempt before
    for rank, rows in steps.items():
        text = "".join(each.model_dump_json() + "\n" for each in rows) + '{"step": 4, "cut'
        folder.rank_rows(rank).write_text(text)
    assert [step[1].step for step in newest_steps(folder, ranks=2, resumed_step=0)] == [1]


def test_two_consecutive_gradients_of_exactly_zero_are_a_sign_and_single_ones_are_none() -> None:
    assert untrained_steps(norms(13.3, 0.0, 0.0, 0.0, 0.2)) == (2, 4)
    assert untrained_steps(norms(0.0, 1.0, 0.0, None, 1e-30)) is None


@pytest.mark.parametrize(
    ("losses", "grown"),
    [
        ([4.35, 11.2, *[10.9, 10.8] * 3], (4.35, 10.9)),  # a rate of 1e6
        ([2.0, 2.1, 1.9, 2.0, 2.0, *[4.0] * 10], (2.0, 4.0)),
        ([*[2.0, 2.1, 1.9] * 6, 9.0, 40.0, 200.0], (2.0, 40.0)),  # in the last steps
        ([2.0, 3.4, 1.9, 3.2, 2.1, 2.2], None),  # single batches vary
        ([0.7, 0.9, 0.6, 1.2, 0.5, 0.7, 1.5, 0.6, 1.3, 0.9, 2.0, 0.8, 1.1, 1.07], None),  # 14 steps of one row each
        ([4.35, 11.2, 10.9, 10.8], None),  # too short to tell
        ([1e-4, 2e-4, 3e-3, 0.2, 0.4], None),  # a policy gradient
        ([10.7, 10.7, 10.6, 10.8], None),
    ],
)
def test_a_loss_that_grew_by_half_over_several_steps_is_a_sign(
    losses: list[float], grown: tuple[float, float] | None
) -> None:
    assert loss_growth(losses) == pytest.approx(grown) if grown else loss_growth(losses) is None


def recorded(*names: str) -> list[list[float]]:
    curves = json.loads((FIXTURES / "losses_of_single_rows.json").read_text())["losses"]
    return [curves[name] for name in names]


def test_recorded_losses_of_single_rows_are_no_sign_unless_the_rate_was_far_too_high() -> None:
    assert not any(map(loss_growth, recorded("LoRA at 5e-5", "LoRA at 5e-5, another seed")))
    all_weights, lora = map(loss_growth, recorded("all weights at 1e-2", "LoRA at 0.3"))
    assert (all_weights, lora) == ((4.461, 8.314), (4.461, 12.084))


@pytest.mark.parametrize("steps", [14, 30, *nightly(50, 200)])
def test_fewer_than_one_of_200_stationary_runs_is_called_and_growth_by_five_is(steps: int) -> None:
    """Medians of five steps called 15 of 100 such runs with a spread of 0.5, and 25 of 100 with one of 0.8."""
    drawn, half = random.Random(steps), steps // 2
    runs, calls, diverged = 1500, dict.fromkeys((0.2, 0.5, 0.8), 0), 0
    for spread in calls:
        for _ in range(runs):
            calls[spread] += loss_growth([drawn.lognormvariate(0, spread) for _ in range(steps)]) is not None
    assert max(calls.values()) < runs / 200, calls
    for _ in range(200):
        growth = [max(0, min(1, 2.5 * (step - half) / steps)) for step in range(steps)]
        diverged += loss_growth([5**grown * drawn.lognormvariate(0, 0.2) for grown in growth]) is not None
    assert diverged > 190


def test_a_resampled_recorded_run_is_no_sign() -> None:
    [losses] = recorded("LoRA at 5e-5, another seed")
    drawn = random.Random(0)
    assert not any(loss_growth(drawn.choices(losses, k=steps)) for steps in (14, 30, 50, 200) for _ in range(500))


def test_every_sign_is_named_with_its_figures() -> None:
    spoiled = [[row(1)], [row(2, loss=math.nan)], [row(3, loss=math.inf), row(3, rank=1)]]
    assert signs_of_divergence(spoiled, [3.0, None, None]) == ["the loss was not finite in 2 steps, first in step 2"]
    assert signs_of_divergence(norms(0.0, 0.0, 0.0, 0.0), [1.0] * 4) == []  # as of rewards that are all equal
    assert signs_of_divergence(norms(13.3, 0.0, 0.0, 0.0), [4.35, 11.2, *[10.9, 10.8] * 3]) == [
        "the loss grew from 4.3500 to 10.9000",
        "grad_norm was exactly 0 in steps 2 to 4",
    ]


@pytest.mark.parametrize(
    ("batches", "steps"), [("abcabcabc", 3), ("abcabca", 3), ("abcabc", 3), ("abcacbabc", None), ("aaaaaa", None)]
)
def test_an_epoch_in_the_order_of_the_first_is_known_but_not_one_batch_over_and_over(batches: str, steps: Any) -> None:
    assert repeated_epoch([[row(n, batch_sha256=each)] for n, each in enumerate(batches, 1)]) == steps

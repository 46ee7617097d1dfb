"""The options of `toolkit compare`: values that make no comparison are refused where they are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.compare.options import CompareOptions
from toolkit.errors import ToolkitError


def options(**given: Any) -> CompareOptions:
    return CompareOptions(**{"preset": ("ddp",), "num_processes": ("2",), "output_dir": Path("out")} | given)


WORLD_SIZES = [(["2"], (2,)), (["1,2,4"], (1, 2, 4)), (["1", "2"], (1, 2)), (["2, 2", "1"], (2, 1))]


@pytest.mark.parametrize(("given", "expected"), WORLD_SIZES)
def test_world_sizes_are_separate_or_with_commas(given: list[str], expected: tuple[int, ...]) -> None:
    assert options(num_processes=tuple(given)).world_sizes == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_processes", ("1,two",), "--num-processes is 'two', expected whole numbers: `--num-processes 1,2,4`"),
        ("num_processes", ("0",), "--num-processes is 0, expected 1 or more"),
        ("repeats", 1_000_000, "--repeats is 1000000, expected 1,000 or less"),
        ("trial_minutes", float("inf"), "--trial-minutes is inf, expected 527,040 or less"),
        ("price_per_gpu_hour", float("nan"), "--price-per-gpu-hour is nan, expected 0 or more"),
        ("target_interval", float("nan"), "--target-interval is nan, expected a fraction from 0 to below 1"),
    ],
)
def test_a_value_that_makes_no_comparison_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        options(**{name: value})
    assert caught.value.message == message


WARM_STARTS = [(True, None, True), (False, None, False), (True, False, False), (False, True, True)]


@pytest.mark.parametrize(("cpu", "warm_start", "expected"), WARM_STARTS)
def test_runs_start_warm_by_default_on_a_cpu_where_that_is_measured(
    cpu: bool, warm_start: bool | None, expected: bool
) -> None:
    assert options(cpu=cpu, warm_start=warm_start).starts_warm is expected

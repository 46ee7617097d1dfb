"""Values are limited in number, depth and size before anything else looks at them."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.value_limits import Limits, check_values

SMALL = Limits(values=10, depth=3)


@pytest.mark.parametrize(
    "content",
    [0, None, "é", -(2**63), 2**64 - 1, 1e308, [[1]], {"é": [1.5, True]}, [0] * 9, {str(key): 0 for key in range(9)}],
)
def test_ordinary_values_pass(content: Any) -> None:
    check_values(content, "mine", SMALL)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([0] * 10, "more than 10 values"),
        ({"a": [0] * 4, "b": [0] * 4}, "more than 10 values"),
        ([[[[]]]], "nested more than 3 deep"),
        ({"a": {"b": {"c": 1}}}, "nested more than 3 deep"),
        ([2**64], r"\[0\] is an integer of 65 bits"),
        ([-(2**70)], r"\[0\] is an integer of 71 bits"),
        ({"a": float("nan")}, "a is nan, expected a finite number"),
        ([float("-inf")], r"\[0\] is -inf"),
        (["\ud800"], "not valid Unicode"),
        ({"\udfff": 1}, "not valid Unicode"),
    ],
)
def test_values_beyond_the_limits_are_refused(content: Any, why: str) -> None:
    with pytest.raises(ToolkitError, match=f"^mine.*{why}"):
        check_values(content, "mine", SMALL)

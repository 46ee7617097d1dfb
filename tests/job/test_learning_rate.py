"""The learning rate scaled with the global batch size."""

from __future__ import annotations

import pytest

from toolkit.job.global_batch import scaled_rate


def test_the_rate_is_scaled_and_the_arithmetic_is_shown() -> None:
    linear = scaled_rate(2e-5, rule="linear", global_batch_size=64, reference_batch_size=16)
    assert linear.learning_rate == pytest.approx(8e-5)
    assert linear.sentence == "learning rate 2e-05 × 64/16 (linear) = 8e-05"
    root = scaled_rate(2e-5, rule="sqrt", global_batch_size=64, reference_batch_size=16)
    assert root.learning_rate == pytest.approx(4e-5)
    assert root.sentence == "learning rate 2e-05 × √(64/16) (sqrt) = 4e-05"

"""Engine settings read from a preset."""

from __future__ import annotations

from toolkit.plan.engine_settings import engine_settings
from toolkit.presets import load_preset


def test_auto_in_a_deepspeed_file_is_resolved_from_the_hidden_size() -> None:
    engine = engine_settings(load_preset("zero3"), world_size=8, hidden_size=4096)
    assert (engine.reduce_bucket, engine.prefetch_bucket) == (4096**2, int(0.9 * 4096**2))
    assert engine.persistence_threshold == 40_960

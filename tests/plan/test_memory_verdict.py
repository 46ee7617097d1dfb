"""Verdicts, and the search for the largest micro-batch."""

from __future__ import annotations

from dataclasses import replace

from model_configs import llama_8b

from toolkit.plan.memory import fit_verdict, memory_verdict, plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import largest_micro_batch
from toolkit.presets import load_preset


def test_a_verdict_leaves_a_margin_for_everything_but_the_model_states() -> None:
    sizes = {"planned_peak_bytes": 100, "exact_bytes": 40}  # 60 may be off by 9
    words = [fit_verdict(memory_bytes=memory, **sizes) for memory in (109, 108, 91, 90)]
    assert words == ["fits", "too_close", "too_close", "does_not_fit"]


def test_an_architecture_that_cannot_be_counted_has_a_wider_margin() -> None:
    known, unknown = llama_8b(), replace(llama_8b(), counted_on="meta device", why_not_counted="it looks into values")
    plans = [
        plan_memory(one, load_preset("zero2"), world_size=8, job=PlannedJob(max_seq_length=2048))
        for one in (known, unknown)
    ]
    assert plans[0].peak == plans[1].peak  # the same numbers, less believed
    memory = round(1.2 * plans[0].planned_peak_bytes)
    assert [memory_verdict(plan, memory_bytes=memory) for plan in plans] == ["fits", "too_close"]


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    for limit in (1, 2, 3, 7, 8, 1000, 4096):
        assert largest_micro_batch(lambda size, limit=limit: size <= limit) == limit
    assert largest_micro_batch(lambda _: False) is None

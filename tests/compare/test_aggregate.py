"""Rows are made of their repeats by the rule that each column declares."""

from __future__ import annotations

from comparison_records import aggregate_rows, comparison, failure, trial

from toolkit.compare.aggregate import aggregate_trials
from toolkit.compare.ledger import TrialRecord
from toolkit.compare.rows import Row


def row_of(*trials: TrialRecord) -> Row:
    """The only row of a comparison of `ddp` with itself."""
    rows, _ = aggregate_trials({trial.trial: trial for trial in trials}, comparison("ddp", repeats=len(trials)), {})
    return rows[0]


def test_readings_of_a_row_are_the_largest_the_median_or_those_of_the_middle_repeat() -> None:
    """Repeat 0 has the middle speed of 0.5, 0.505 and 0.495 s per step."""
    first, unknown = {"allocator_retries": 1, "attestation_sha256": "b"}, {"bytes_of": "rss", "step": None}
    row = row_of(
        trial("ddp", 0, energy_joules=100.0, padding_fraction=0.2, memory_by_phase=unknown | {"load": 1}, **first),
        trial("ddp", 1, energy_joules=90.0, padding_fraction=0.2, memory_by_phase=unknown | {"load": 3}),
        trial("ddp", 2, energy_joules=150.0, padding_fraction=0.2, throttle_reasons=["hot"], attestation_sha256="c"),
    )
    assert (row.peak_host_bytes, row.peak_rank, row.allocator_retries) == (1002, 0, 1)
    assert (row.energy_joules, row.attestation_sha256, row.throttle_reasons) == (100.0, "b", ("hot",))
    assert row.memory_by_phase is not None
    assert (row.memory_by_phase.load, row.memory_by_phase.step) == (3, None)
    assert row.non_padding_tokens_per_second == 0.8 * (row.tokens_per_second or 0)


def test_what_no_repeat_measured_is_unknown() -> None:
    row = row_of(trial("ddp", 0), trial("ddp", 1))
    unmeasured = ("non_padding_tokens_per_second", "peak_driver_bytes", "memory_by_phase", "energy_joules")
    assert {getattr(row, key) for key in (*unmeasured, "throttle_reasons", "startup_seconds")} == {None}


def test_a_row_fails_if_one_of_its_repeats_does() -> None:
    facts = failure("out_of_memory", phase="backward", measured_bytes=7)
    changes = {"status": "out_of_memory", "message": "no room", "failure": facts, "tokens_per_second": None}
    trials = [trial("ddp", r) for r in range(3)] + [trial("other", 0), trial("other", 1, **changes)]
    row = aggregate_rows(comparison("ddp", "other"), *trials)["other-n2"]
    assert (row.status, row.repeats, row.parity, row.ratio_to_reference) == ("out_of_memory", 1, None, None)
    assert row.message == "1 of 2 repeats completed; no room"
    assert row.failure is not None
    assert row.failure.model_dump() == facts


def test_an_unsupported_row_has_the_reason_and_ranks_no_other_row() -> None:
    spec = comparison("ddp", "zeropp")
    rows = aggregate_rows(spec, *(trial("ddp", r) for r in range(3)), unsupported={"zeropp-n2": "needs CUDA kernels"})
    row = rows["zeropp-n2"]
    assert (row.status, row.message, row.failure.kind) == ("not_supported", "needs CUDA kernels", "not_supported")
    assert rows["ddp-n2"].rank is None  # nobody to be ranked with

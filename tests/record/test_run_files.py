"""The seconds of a save beside the notice that clouds give."""

from __future__ import annotations

from toolkit.record.run_files import SaveRecord, describe_slowest_save


def save(step: int, seconds: float | None, **more: float) -> SaveRecord:
    return SaveRecord(kind="checkpoint", step=step, seconds=seconds, **more)


def test_a_save_that_is_longer_than_the_shortest_notice_is_a_warning() -> None:
    described = describe_slowest_save([save(10, 12.0), save(20, 41.0), save(30, 13.0)])
    assert described is not None
    assert described.startswith("warning: checkpoint-20 took 41.0 s to save; ")
    assert "30 s (Google Cloud, Azure) to 120 s (AWS)" in described


def test_the_fingerprint_counts_and_the_wait_for_an_earlier_save_does_not() -> None:
    described = describe_slowest_save([save(10, 20.0, stall_seconds=60.0, waited_seconds=35.0)])
    assert described is not None
    assert described.startswith("checkpoint-10 took 25.0 s to save; ")


def test_without_a_complete_checkpoint_nothing_is_said() -> None:
    assert describe_slowest_save([]) is None
    assert describe_slowest_save([save(10, None), SaveRecord(kind="model", step=10, seconds=50.0)]) is None

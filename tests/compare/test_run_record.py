"""Records of finished runs, read from run folders alone."""

from __future__ import annotations

from pathlib import Path

from comparison_records import trial

from toolkit.compare.result_values import MemoryByPhase, RowKey
from toolkit.compare.run_record import read_run_record, read_side_run
from toolkit.compare.specification import Trial
from toolkit.run.folder import RunFolder, write_json

TRIAL = Trial(row=RowKey(preset="zero2", world_size=2), repeat=0)


def test_an_empty_run_folder_is_a_failed_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    found = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
    assert (found.trial, found.status, found.timed_steps, found.peak_host_bytes) == ("zero2-n2-r0", "failed", 0, None)
    assert found.failure is not None
    assert found.failure.kind == "failed"


def test_a_run_that_never_reported_its_end_has_failed(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"status": "running"})
    found = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
    assert found.status == "failed"


def test_a_side_run_without_profile_and_checkpoint_reports_neither(tmp_path: Path) -> None:
    found = read_side_run(trial("zero2", 0), RunFolder(tmp_path), ["profile", "save"])
    assert (found.communication_fraction, found.timeline, found.save_seconds, found.save_bytes) == (None,) * 4


def test_a_run_out_of_memory_has_the_memory_of_the_phases_that_it_reached(tmp_path: Path) -> None:
    ladder = {"bytes_of": "allocated", "load": 10, "forward": 70, "backward": None, "step": None}
    write_json(tmp_path / "failure.json", {"kind": "out_of_memory", "memory_ladder": ladder})
    found = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
    assert found.memory_ladder == MemoryByPhase(**ladder)


def test_a_profiled_run_has_communication_a_timeline_and_a_checkpoint(tmp_path: Path) -> None:
    def step(rank: int, seconds: float, sent: float, exposed: float) -> dict[str, float]:
        parts = {"communication_seconds": sent, "exposed_communication_seconds": exposed}
        return {"rank": rank, "step": 3, "step_seconds": seconds, **parts}

    lanes = {"compute": [[0.0, 0.5]], "communication": [], "data_wait": []}
    drawn = [{"rank": rank, "start_unix": 50.0 + rank / 4, "seconds": 1.0, "lanes": lanes} for rank in (0, 1)]
    profile = {"last_step": 3, "steps": [step(0, 1.0, 0.5, 0.1), step(1, 1.0, 0.3, 0.1)], "timeline": drawn}
    saves = [{"kind": "checkpoint", "step": 3, "seconds": 2.5, "bytes": 77}]
    write_json(tmp_path / "run.json", {"profile": profile, "saves": saves})
    found = read_side_run(trial("zero2", 0), RunFolder(tmp_path), ["profile", "save"])
    assert (found.communication_fraction, found.exposed_communication_fraction) == (0.4, 0.1)
    assert (found.save_seconds, found.save_bytes) == (2.5, 77)
    assert found.timeline is not None
    assert found.timeline.step == 3
    assert [rank.start_seconds for rank in found.timeline.ranks] == [0.0, 0.25]


def test_an_impossible_fraction_of_padding_is_unknown_and_breaks_no_record() -> None:
    """Text tokens that outnumber all tokens are miscounted: parity reports the counts."""
    assert trial("zero2", 0, padding_fraction=-1.0).padding_fraction is None
    assert trial("zero2", 0, padding_fraction=0.25).padding_fraction == 0.25

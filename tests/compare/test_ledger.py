"""Records are read from run folders alone; their ledger survives a kill at any byte. A damaged line or key is named."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, comparison_runner, probe, trial

from toolkit.compare.ledger import (
    Ledger,
    comparison_lock,
    probes_of,
    read_run_record,
    read_side_run,
    side_runs_of,
    trials_of,
)
from toolkit.compare.rows import RowKey, Run, Trial
from toolkit.errors import ToolkitError
from toolkit.record.folder import RunFolder, write_json
from toolkit.record.measurements import MemoryByPhase
from toolkit.record.timeline import PARTS

ZERO2 = RowKey(preset="zero2", world_size=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_line_cut_off_by_a_kill_is_dropped_at_any_byte(ledger: Ledger, tmp_path: Path) -> None:
    for repeat in range(2):
        ledger.append(trial("ddp", repeat))
    content = ledger.path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in [0, 1, first // 2, *range(first - 2, first + 2), len(content) - 2, len(content) - 1, len(content)]:
        torn = Ledger(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:cut])
        kept = [] if cut < first else (["ddp-n2-r0"] if cut < len(content) else ["ddp-n2-r0", "ddp-n2-r1"])
        assert list(torn.read()) == kept
        torn.append(trial("zero2", 0))
        assert list(torn.read()) == [*kept, "zero2-n2-r0"]


def test_a_record_is_read_as_it_was_appended(ledger: Ledger) -> None:
    side_run = trial("zero2", 0).updated(trial="zero2-n2-save", kind="side_run", kinds=("save",), save_bytes=7)
    trials = [trial("zero2", 1), trial("zero2", 0), trial("zero2-n2", 0)]  # a variant may be called `zero2-n2`
    records = [*trials, probe("zero2", 8), probe("zero2", 4), side_run]
    for record in records:
        ledger.append(record)
    found = ledger.read()
    assert list(found.values()) == records
    assert [record.repeat for record in trials_of(found, ZERO2)] == [0, 1]
    assert list(probes_of(found, ZERO2)) == [4, 8]
    assert (side_runs_of(found, ZERO2, "save"), side_runs_of(found, ZERO2, "profile")) == ([side_run], [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": ["1"] * 8}, "step_seconds[0] is '1', expected a valid number"),
        ({"step_non_padding_tokens": [90] * 7}, "must reach the last timed step, 8"),
        ({"step_tokens": []}, "must reach the last timed step, 8"),
        ({"kind": "probe"}, "it has no per_device_train_batch_size"),
        ({"kind": None}, "kind is None, expected 'trial', 'probe' or 'side_run'"),
    ],
)
def test_a_damaged_record_is_named_with_its_line(ledger: Ledger, changes: dict[str, Any], message: str) -> None:
    ledger.append(trial("zero2", 0))
    damaged = json.loads(trial("ddp", 0).model_dump_json()) | changes
    with ledger.path.open("a") as file:
        file.write(json.dumps(damaged) + "\n")
    with pytest.raises(ToolkitError) as raised:
        ledger.read()
    assert raised.value.message.startswith(f"{ledger.path}, line 2: ")
    assert message in raised.value.message
    assert len(raised.value.message) < len(str(ledger.path)) + 250
    assert "`--resume` repeats its run" in (raised.value.hint or "")


def test_two_runners_never_share_a_folder(tmp_path: Path) -> None:
    running = rf"still running \(process {os.getpid()}\)"
    with comparison_lock(tmp_path), pytest.raises(ToolkitError, match=running), comparison_lock(tmp_path):
        pass
    with comparison_lock(tmp_path):
        pass


def read(folder: Path) -> Run:
    return read_run_record(Trial(row=ZERO2, repeat=0), RunFolder(folder), folder, untimed_steps=2)


def test_a_run_folder_without_a_run_json_is_a_failed_run(tmp_path: Path) -> None:
    reached = {"bytes_of": "allocated", "load": 10, "forward": 70, "backward": None, "step": None}
    write_json(tmp_path / "failure.json", {"kind": "out_of_memory", "memory_by_phase": reached})
    found = read(tmp_path)
    assert (found.trial, found.status, found.timed_steps, found.peak_host_bytes) == ("zero2-n2-r0", "failed", 0, None)
    assert (found.failure and found.failure.kind, found.memory_by_phase) == ("failed", MemoryByPhase(**reached))


@pytest.mark.parametrize(
    ("degrees", "found"),
    [
        ([{"dp_shard": 2, "tp": 2}] * 2, "dp_shard 2 x tp 2"),
        ([None, None], None),
        ([{"tp": 2}, {"tp": 1}], ["tp 2", "one rank"]),
    ],
)
def test_a_layout_is_what_all_ranks_read_back(tmp_path: Path, degrees: list[Any], found: Any) -> None:
    write_json(tmp_path / "attestation.json", {"ranks": [{"layout": each} for each in degrees]})
    record = read(tmp_path)
    assert (record.problem.layout, record.layout) == (found, found if isinstance(found, str) else None)


def test_the_goodput_of_a_run_is_read_with_its_parts(tmp_path: Path) -> None:
    seconds = {f"{part}_seconds": 0.0 for part in PARTS} | {"productive_seconds": 2.0, "lost_seconds": 1.5}
    goodput = {"wall_seconds": 8.0, "idle_seconds": 0.0, "lost_steps": 3, "starts": 2, "fraction": 0.25}
    write_json(tmp_path / "run.json", {"status": "completed", "goodput": seconds | goodput})
    found = read(tmp_path)
    assert (found.goodput_fraction, found.checkpoint_seconds, found.lost_seconds) == (0.25, 0.0, 1.5)
    assert found.wall_seconds is None  # run.json's own


def test_a_profiled_run_has_communication_a_timeline_and_a_checkpoint(tmp_path: Path) -> None:
    def step(rank: int, seconds: float, sent: float, exposed: float) -> dict[str, float]:
        parts = {"communication_seconds": sent, "exposed_communication_seconds": exposed}
        return {"rank": rank, "step": 3, "step_seconds": seconds, **parts}

    lanes = {"compute": [[0.0, 0.5]], "communication": [], "data_wait": []}
    drawn = [{"rank": rank, "start_unix": 50.0 + rank / 4, "seconds": 1.0, "lanes": lanes} for rank in (0, 1)]
    profile = {"last_step": 3, "steps": [step(0, 1.0, 0.5, 0.1), step(1, 1.0, 0.3, 0.1)], "timeline": drawn}
    saves = [{"kind": "checkpoint", "step": 3, "seconds": 2.5, "bytes": 77}]
    write_json(tmp_path / "run.json", {"profile": profile, "saves": saves})
    found = read_side_run(trial("zero2", 0), "zero2-n2-profile-save", RunFolder(tmp_path), ["profile", "save"])
    assert (found.communication_fraction, found.exposed_communication_fraction) == (0.4, 0.1)
    assert (found.save_seconds, found.save_bytes) == (2.5, 77)
    assert (found.timeline.step, [rank.start_seconds for rank in found.timeline.ranks]) == (3, [0.0, 0.25])


def recorded_run(folder: Path) -> Path:
    """A completed run of two ranks and eight steps, as far as a comparison reads it."""
    shutil.copytree((Path(__file__).parents[1] / "fixtures" / "recorded_demo_ddp" / "ranks"), folder / "ranks")
    write_json(folder / "run.json", {"status": "completed", "wall_seconds": 60.0, "command": "run"})
    return folder


def test_speeds_of_a_recorded_run_count_the_timed_steps_of_all_ranks_by_the_slower_one(tmp_path: Path) -> None:
    """Steps 3 to 8 of the demo's `ddp`: tokens of both ranks, all, without padding and supervised; seconds by hand."""
    found, seconds = read(recorded_run(tmp_path)), 3.203 + 3.743 + 4.617 + 6.389 + 7.299 + 5.503
    speeds = (found.tokens_per_second, found.non_padding_tokens_per_second, found.supervised_tokens_per_second)
    assert speeds == pytest.approx((2644 / seconds, 2379 / seconds, 1395 / seconds), rel=1e-4)
    assert (found.padding_fraction, found.timed_step_numbers) == (pytest.approx(1 - 2379 / 2644), (3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "garbage", "run.json, line 1: not JSON"),
        ("run.json", '{"status": "done"}', "run.json: status is 'done', expected '"),
        ("attestation.json", '{"ranks": [{"parameter_bytes": "1"}]}', "ranks[0].parameter_bytes is '1', expected"),
        ("ranks/rank1.jsonl", "garbage\n", "rank1.jsonl, line 1: not JSON"),
        ("ranks/rank1.jsonl", '{"a": 1}\n', "rank1.jsonl, line 1: it has no step, rank, seconds, "),
        ("ranks/rank1.jsonl", {"seconds": -1.0}, "rank1.jsonl, line 4: seconds is -1.0, expected at least 0"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_its_key(tmp_path: Path, file: str, content: Any, message: str) -> None:
    path = recorded_run(tmp_path) / file
    if isinstance(content, dict):
        rows = path.read_text().splitlines()
        content = "\n".join([*rows[:3], json.dumps(json.loads(rows[3]) | content), *rows[4:]])
    path.write_text(content)
    with pytest.raises(ToolkitError) as raised:
        read(tmp_path)
    assert message in raised.value.message
    assert raised.value.hint is not None


def test_losses_that_are_not_finite_are_unknown_and_no_error(tmp_path: Path) -> None:
    for loss, path in zip((float("inf"), float("-inf")), (recorded_run(tmp_path) / "ranks").iterdir(), strict=True):
        rows = [json.loads(line) | {"loss": loss} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path).losses == (None,) * 8


def test_a_finished_run_with_a_damaged_run_json_is_never_run_again_over_it(tmp_path: Path) -> None:
    spec = comparison("ddp", repeats=1)
    run = recorded_run(tmp_path / "trials" / spec.trials()[0].id)
    (run / "run.json").write_text('{"status": "completed", "wall_')
    with pytest.raises(ToolkitError, match=r"run.json, line 1: not JSON") as raised:
        comparison_runner(spec, tmp_path).run()
    assert raised.value.hint == f"move {run} elsewhere, and `--resume` repeats its run"
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]

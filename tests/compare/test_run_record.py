"""Records of finished runs, read from run folders alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from comparison_records import comparison, comparison_runner, trial

from toolkit.compare.rows import RowKey, Trial
from toolkit.compare.run_record import read_run_record, read_side_run
from toolkit.errors import ToolkitError
from toolkit.record.folder import RunFolder, write_json
from toolkit.record.measurements import MemoryByPhase
from toolkit.record.timeline import PARTS

TRIAL = Trial(row=RowKey(preset="zero2", world_size=2), repeat=0)


def test_a_run_folder_without_a_run_json_is_a_failed_run(tmp_path: Path) -> None:
    ladder = {"bytes_of": "allocated", "load": 10, "forward": 70, "backward": None, "step": None}
    write_json(tmp_path / "failure.json", {"kind": "out_of_memory", "memory_by_phase": ladder})
    found = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
    assert (found.trial, found.status, found.timed_steps, found.peak_host_bytes) == ("zero2-n2-r0", "failed", 0, None)
    assert found.failure is not None
    assert found.failure.kind == "failed"
    assert found.memory_by_phase == MemoryByPhase(**ladder)  # of the phases that it reached


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
    record = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
    assert record.problem is not None
    assert record.problem.layout == found
    assert record.layout == (found if isinstance(found, str) else None)


def test_the_goodput_of_a_run_is_read_with_its_parts(tmp_path: Path) -> None:
    seconds = {f"{part}_seconds": 0.0 for part in PARTS} | {"productive_seconds": 2.0, "lost_seconds": 1.5}
    goodput = {"wall_seconds": 8.0, "idle_seconds": 0.0, "lost_steps": 3, "starts": 2, "fraction": 0.25}
    write_json(tmp_path / "run.json", {"status": "completed", "goodput": seconds | goodput})
    found = read_run_record(TRIAL, RunFolder(tmp_path), tmp_path, untimed_steps=2, position=0)
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
    found = read_side_run(trial("zero2", 0), RunFolder(tmp_path), ["profile", "save"])
    assert (found.communication_fraction, found.exposed_communication_fraction) == (0.4, 0.1)
    assert (found.save_seconds, found.save_bytes) == (2.5, 77)
    assert found.timeline is not None
    assert found.timeline.step == 3
    assert [rank.start_seconds for rank in found.timeline.ranks] == [0.0, 0.25]


RECORDED = Path(__file__).parents[1] / "fixtures" / "recorded_demo_ddp" / "ranks"


def recorded_run(folder: Path) -> RunFolder:
    """A completed run of two ranks and eight steps, as far as a comparison reads it."""
    shutil.copytree(RECORDED, folder / "ranks")
    write_json(folder / "run.json", {"status": "completed", "wall_seconds": 60.0, "command": "run"})
    write_json(folder / "attestation.json", {"ranks": [{"num_params": 10}, {"num_params": 10}]})
    return RunFolder(folder)


def refusal(folder: RunFolder) -> ToolkitError:
    with pytest.raises(ToolkitError) as raised:
        read_run_record(TRIAL, folder, folder.path, untimed_steps=2, position=0)
    return raised.value


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "garbage", "run.json, line 1: not JSON"),
        ("run.json", '{"status": "done"}', "run.json: status is 'done', expected '"),
        ("attestation.json", '{"ranks": [{"parameter_bytes": "1"}]}', "ranks[0].parameter_bytes is '1', expected"),
        ("ranks/rank1.jsonl", "garbage\n", "rank1.jsonl, line 1: not JSON"),
        ("ranks/rank1.jsonl", '{"a": 1}\n', "rank1.jsonl, line 1: it has no step, rank, seconds, "),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_its_key(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = recorded_run(tmp_path)
    (tmp_path / file).write_text(content)
    error = refusal(folder)
    assert message in error.message
    assert error.hint is not None


def test_a_damaged_row_is_named_with_its_line_and_key(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    rows = folder.rank_rows(1).read_text().splitlines()
    rows[3] = json.dumps(json.loads(rows[3]) | {"seconds": -1.0})
    folder.rank_rows(1).write_text("\n".join(rows) + "\n")
    assert "rank1.jsonl, line 4: seconds is -1.0, expected at least 0" in refusal(folder).message


def test_losses_that_are_not_finite_are_unknown_and_no_error(tmp_path: Path) -> None:
    folder = recorded_run(tmp_path)
    for rank, loss in enumerate((float("inf"), float("-inf"))):
        path = folder.rank_rows(rank)
        rows = [json.loads(line) | {"loss": loss} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run_record(TRIAL, folder, tmp_path, untimed_steps=2, position=0)
    assert found.losses == (None,) * 8


def test_a_finished_run_with_a_damaged_run_json_is_never_run_again_over_it(tmp_path: Path) -> None:
    spec = comparison("ddp", repeats=1)
    (trial,) = spec.trials()
    run = tmp_path / "trials" / trial.id
    recorded_run(run)
    (run / "run.json").write_text('{"status": "completed", "wall_')
    with pytest.raises(ToolkitError, match=r"run.json, line 1: not JSON") as raised:
        comparison_runner(spec, tmp_path).run()
    assert raised.value.hint == f"move {run} elsewhere, and `--resume` repeats its run"
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["rank0.jsonl", "rank1.jsonl"]

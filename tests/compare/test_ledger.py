"""The ledger survives a kill at any byte, and a line that is not a record is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from comparison_records import probe, trial

from toolkit.compare.ledger import Ledger, SideRunRecord, comparison_lock, probes_of, side_runs_of, trials_of
from toolkit.compare.rows import RowKey
from toolkit.errors import ToolkitError

ZERO2 = RowKey(preset="zero2", world_size=2)


def test_a_line_cut_off_by_a_kill_is_dropped_at_any_byte(tmp_path: Path) -> None:
    complete = Ledger(tmp_path / "complete.jsonl")
    for repeat in range(2):
        complete.append(trial("ddp", repeat))
    content = complete.path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in [0, 1, first // 2, *range(first - 2, first + 2), len(content) - 2, len(content) - 1, len(content)]:
        torn = Ledger(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:cut])
        kept = [] if cut < first else (["ddp-n2-r0"] if cut < len(content) else ["ddp-n2-r0", "ddp-n2-r1"])
        assert list(torn.read()) == kept
        torn.append(trial("zero2", 0))
        assert list(torn.read()) == [*kept, "zero2-n2-r0"]


def test_a_record_is_read_as_it_was_appended(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    side_run = SideRunRecord.of(trial("zero2", 0), trial="zero2-n2-save", kinds=["save"], save_bytes=7)
    records = [
        trial("zero2", 1),
        trial("zero2", 0),
        trial("zero2-n2", 0),
        probe("zero2", 8),
        probe("zero2", 4),
        side_run,
    ]
    for record in records:
        ledger.append(record)
    found = ledger.read()
    assert list(found.values()) == records
    assert [record.repeat for record in trials_of(found, ZERO2)] == [0, 1]  # a variant may be called `zero2-n2`
    assert list(probes_of(found, ZERO2)) == [4, 8]
    assert (side_runs_of(found, ZERO2, "save"), side_runs_of(found, ZERO2, "profile")) == ([side_run], [])


def test_not_a_number_is_written_as_an_unknown(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(trial("ddp", 0, losses=[2.0, float("nan")], last_loss=float("inf")))
    written = json.loads(ledger.path.read_text(), parse_constant=pytest.fail)
    assert (written["losses"], written["last_loss"]) == ([2.0, None], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": ["1"] * 8}, "step_seconds[0] is '1', expected a valid number"),
        ({"kind": "probe"}, "it has no per_device_train_batch_size"),
        ({"kind": None}, "kind is None, expected trial, probe, side_run"),
        ({"kind": []}, "kind is [], expected trial, probe, side_run"),
    ],
)
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(trial("zero2", 0))
    damaged = json.loads(trial("ddp", 0).model_dump_json()) | changes
    with ledger.path.open("a") as file:
        file.write(json.dumps(damaged) + "\n")
    with pytest.raises(ToolkitError) as raised:
        ledger.read()
    assert raised.value.message.startswith(f"{ledger.path}, line 2: ")
    assert message in raised.value.message
    assert len(raised.value.message) < len(str(ledger.path)) + 250
    assert raised.value.hint is not None
    assert "`--resume` repeats its run" in raised.value.hint


def test_two_runners_never_share_a_folder(tmp_path: Path) -> None:
    running = rf"still running \(process {os.getpid()}\)"
    with comparison_lock(tmp_path), pytest.raises(ToolkitError, match=running), comparison_lock(tmp_path):
        pass
    with comparison_lock(tmp_path):
        pass

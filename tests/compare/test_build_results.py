"""What side runs and the planner add to a row."""

from __future__ import annotations

from comparison_records import trial

from toolkit.compare.build_results import side_run_columns
from toolkit.compare.ledger import SideRunRecord
from toolkit.compare.rows import RowKey


def test_a_row_has_only_the_columns_of_its_own_completed_side_runs() -> None:
    profile = {"communication_fraction": 0.25, "exposed_communication_fraction": 0.1}
    save = {"save_seconds": 3.0, "save_bytes": 7}
    records = [
        SideRunRecord.of(trial("ddp", 0), trial="ddp-n2-profile", kinds=["profile"], **profile),
        SideRunRecord.of(trial("ddp", 0), trial="ddp-n2-save", kinds=["save"], status="failed", **save),
        SideRunRecord.of(trial("zero2", 0), trial="zero2-n2-save", kinds=["save"], **save),
        trial("ddp", 0),
    ]
    by_name = {record.trial: record for record in records}
    ddp = side_run_columns(by_name, RowKey(preset="ddp", world_size=2))
    assert (ddp["communication_fraction"], ddp["save_seconds"]) == (0.25, None)
    assert side_run_columns(by_name, RowKey(preset="zero2", world_size=2))["save_bytes"] == 7

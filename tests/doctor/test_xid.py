"""Xid errors are found in a recorded kernel log, counted, and explained."""

from __future__ import annotations

import os
from pathlib import Path

from recorded_outputs import recorded

from toolkit.doctor.xid import UNKNOWN, XIDS, parse_xids, read_kernel_log


def test_events_are_counted_by_gpu_and_code() -> None:
    events = {(event.bus_id, event.code): event for event in parse_xids(recorded("dmesg.txt"))}
    assert {key: event.count for key, event in events.items()} == {
        ("0000:3b:00", 63): 1,
        ("0000:9d:00", 13): 2,
        ("0000:3b:00", 94): 1,
        ("0000:c3:00", 79): 1,
        ("0000:c3:00", 154): 1,
        ("0000:01:00", 250): 1,
    }
    assert events["0000:9d:00", 13].last.endswith("Graphics Exception: ESR 0x504730=0x11")


def test_a_log_without_xids_has_none() -> None:
    assert parse_xids("[1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15") == []


def test_levels_follow_the_catalogs_immediate_action() -> None:
    levels = {code: meaning.level for code, meaning in XIDS.items()}
    assert {code: levels[code] for code in (48, 64, 74, 79, 95, 119)} == dict.fromkeys(
        (48, 64, 74, 79, 95, 119), "error"
    )
    assert (levels[94], levels[31], levels[43], levels[63]) == ("warning", "warning", "note", "note")
    assert 250 not in XIDS
    assert UNKNOWN.action.startswith("look it up: https://docs.nvidia.com/")


def test_the_kernel_log_of_this_node_is_read_where_this_user_may() -> None:
    restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"
    log = read_kernel_log()
    assert log is not None or (restricted and os.geteuid() != 0)
    assert log is None or len(log.splitlines()) > 1

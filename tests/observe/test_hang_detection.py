"""The thread that writes heartbeats ends with its process, between two writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import cpu_environment, run_warm

SLOW_HEARTBEATS = """
import sys, time
from pathlib import Path
from toolkit.observe import hang_detection
from toolkit.observe.progress import Progress

def write_slowly(ranks, heartbeat):
    (ranks / ".rank0.heartbeat").touch()
    time.sleep(0.5)
    (ranks / ".rank0.heartbeat").replace(ranks / "rank0.heartbeat")

hang_detection.write_heartbeat = write_slowly
folder = Path(sys.argv[1])
hang_detection.Watchdog(Progress(), ranks=folder, rank=0).start()
while not (folder / ".rank0.heartbeat").exists():
    time.sleep(0.01)
"""


@pytest.mark.launch
def test_a_process_that_exits_while_a_heartbeat_is_written_leaves_no_temporary_file(tmp_path: Path) -> None:
    script = tmp_path / "slow_heartbeats.py"
    script.write_text(SLOW_HEARTBEATS)
    ended = run_warm([sys.executable, str(script), str(tmp_path / "ranks")], cpu_environment())
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["rank0.heartbeat", "rank0.stacks"]

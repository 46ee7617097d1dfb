"""Processes that change run.json at the same time."""

import subprocess
import sys
from pathlib import Path

from launching import ROOT

from toolkit.record.folder import RunFolder

WRITERS, CHANGES = 3, 30
CHANGE_OFTEN = f"""
import sys
from pathlib import Path
from toolkit.record.folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
for change in range({CHANGES}):
    folder.update_run(**{{f"writer{{sys.argv[2]}}_{{change}}": change}})
"""


def test_no_fact_is_lost_where_several_processes_change_run_json(tmp_path: Path) -> None:
    """The launcher, rank 0, a rank that fails and its watchdog all do."""
    words = [sys.executable, "-c", CHANGE_OFTEN, str(tmp_path)]
    writers = [subprocess.Popen([*words, str(number)], cwd=ROOT) for number in range(WRITERS)]
    assert [writer.wait() for writer in writers] == [0] * WRITERS
    run = RunFolder(tmp_path).read_run() or {}
    expected = {f"writer{number}_{change}" for number in range(WRITERS) for change in range(CHANGES)}
    assert run.keys() == {"schema_version", *expected}

"""The lines of `timeline.jsonl`, whatever has killed the processes that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
from heartbeats import pulse

from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import write_heartbeat
from toolkit.record.timeline import add_moment, read_timeline


def test_a_line_that_was_cut_off_is_left_out_and_those_after_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    add_moment(path, "start", unix=1.0)
    with path.open("a") as file:
        file.write('{"unix": 2.0, "pha')
    add_moment(path, "train", unix=3.0, step=4)
    assert [(moment.unix, moment.phase, moment.step) for moment in read_timeline(path)] == [
        (1.0, "start", 0),
        (3.0, "train", 4),
    ]


def test_the_last_heartbeat_ends_processes_that_could_not_say_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    folder.rank_rows(0).write_text('{"step": 1}\n')
    add_moment(folder.timeline, "train", unix=50.0)
    write_heartbeat(tmp_path / "ranks", pulse(0, progress=100.0))
    write_heartbeat(tmp_path / "ranks", pulse(1, progress=103.0))
    start_attempt(folder, "resume")
    start_attempt(folder, "resume")  # the heartbeats are gone, and the end is not written again
    assert [(moment.unix, moment.phase) for moment in read_timeline(folder.timeline)] == [
        (50.0, "train"),
        (103.0, "ended"),
    ]


def phases(folder: RunFolder) -> list[str]:
    return [moment.phase for moment in read_timeline(folder.timeline)]


@pytest.mark.parametrize(("continues", "top"), [(True, ["train", "ended", "start"]), (False, ["start"])])
def test_a_resumed_run_continues_the_timeline_and_another_run_begins_its_own(
    continues: bool, top: list[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    folder.rank_rows(0).write_text('{"step": 1}\n')
    folder.log.write_text("earlier\n")
    add_moment(folder.timeline, "train", unix=50.0)
    start_attempt(folder, "resume" if continues else "overwrite")
    add_moment(folder.timeline, "start")
    assert phases(folder) == top

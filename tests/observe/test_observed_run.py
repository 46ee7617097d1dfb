"""A run folder that a node does not see is refused, and an attempt that was replaced leaves its folder alone."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from fork_server import SERVER_VARIABLE, fork_process
from heartbeats import pulse
from launching import cpu_environment

from toolkit.errors import RunFailed, ToolkitError
from toolkit.observe import observed_run
from toolkit.observe.failure_report import report_failure
from toolkit.observe.observed_run import check_visible, claim_folder
from toolkit.observe.progress import Progress
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import is_superseded, read_attempt_id, read_heartbeats, write_attempt_id, write_heartbeat


def test_every_node_without_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [("a", True), ("a", True), ("c", False), ("b", False), ("b", False)]
    with pytest.raises(ToolkitError, match=f"{tmp_path} is not shared: b, c do not see what a has written there"):
        check_visible(tmp_path, gather=lambda _: ranks)
    check_visible(tmp_path, gather=lambda _: ranks[:2])
    # Rank 1's view: the id of rank 0 arrives through the process group, and its own folder does not have it.
    monkeypatch.setattr(observed_run, "VISIBLE_SECONDS", 0.0)
    with pytest.raises(ToolkitError, match="is not shared"):
        claim_folder(tmp_path, writes=False, gather=lambda value: ["id of rank 0"] if value is None else [value])


def test_the_ranks_share_the_id_that_rank_0_has_written(tmp_path: Path) -> None:
    attempt_id, nodes = claim_folder(tmp_path, writes=True, gather=lambda value: [value])
    assert nodes == (os.uname().nodename,)
    assert read_attempt_id(tmp_path / "ranks") == attempt_id
    again, _ = claim_folder(tmp_path, writes=True, gather=lambda value: [value])
    assert is_superseded(tmp_path / "ranks", attempt_id)
    assert not is_superseded(tmp_path / "ranks", again)


def test_heartbeats_of_an_attempt_that_was_replaced_are_not_read(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, pulse(0).model_copy(update={"attempt_id": "new"}))
    write_heartbeat(tmp_path, pulse(1).model_copy(update={"attempt_id": "old"}))
    assert len(read_heartbeats(tmp_path)) == 2
    write_attempt_id(tmp_path, "new")
    assert [heartbeat.rank for heartbeat in read_heartbeats(tmp_path)] == [0]


def test_a_rank_of_an_attempt_that_was_replaced_writes_no_failure(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    write_attempt_id(tmp_path / "ranks", "new")
    assert report_failure(RunFailed("lost"), Progress(output_dir=tmp_path, attempt_id="old")) == 1
    assert not folder.failure_json.exists()
    assert report_failure(RunFailed("lost"), Progress(output_dir=tmp_path, attempt_id="new")) == 1
    assert folder.failure_json.exists()


@pytest.mark.launch
def test_lines_of_both_streams_keep_their_order_on_one_terminal_and_in_the_log(tmp_path: Path) -> None:
    lines = [f"line {number} on {stream}" for number in range(200) for stream in ("stdout", "stderr")]
    program = (
        "import sys; from pathlib import Path; from toolkit.observe.observed_run import copy_output_to\n"
        "copy_output_to(Path('train.log'))\n"
        "for n in range(200):\n"
        "    for name in ('stdout', 'stderr'): print(f'line {n} on {name}', file=getattr(sys, name), flush=True)\n"
    )
    (tmp_path / "prints.py").write_text(program)
    command = [sys.executable, str(tmp_path / "prints.py")]
    with (tmp_path / "printed").open("w") as file, contextlib.chdir(tmp_path):
        streams = {"stdout": file.fileno(), "stderr": file.fileno()}
        process = fork_process(os.environ[SERVER_VARIABLE], command, environment=cpu_environment(), **streams)
        assert process.wait(300) == 0
    assert (tmp_path / "printed").read_text().splitlines() == (tmp_path / "train.log").read_text().splitlines() == lines

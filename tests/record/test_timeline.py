"""The lines of `timeline.jsonl`, whatever has killed their processes, and the goodput of hand-worked timelines."""

from pathlib import Path
from typing import Any

import pytest
from heartbeats import pulse

from toolkit.record.attempts import start_attempt
from toolkit.record.folder import RunFolder
from toolkit.record.heartbeat import write_heartbeat
from toolkit.record.measurements import StepRow
from toolkit.record.timeline import PARTS, Goodput, Moment, add_moment, measure_goodput, read_timeline


def test_a_line_that_was_cut_off_is_left_out_and_those_after_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    add_moment(path, "start", unix=1.0)
    with path.open("a") as file:
        file.write('{"unix": 2.0, "pha')
    add_moment(path, "train", unix=3.0, step=4)
    assert read_timeline(path) == moments("1 start, 3 train 4")


def test_the_last_heartbeat_ends_processes_that_could_not_say_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    folder.rank_rows(0).write_text('{"step": 1}\n')
    add_moment(folder.timeline, "train", unix=50.0)
    write_heartbeat(tmp_path / "ranks", pulse(0, progress=100.0))
    write_heartbeat(tmp_path / "ranks", pulse(1, progress=103.0))
    start_attempt(folder, "resume")
    start_attempt(folder, "resume")  # the heartbeats are gone, and the end is not written again
    assert read_timeline(folder.timeline) == moments("50 train, 103 ended")


def at(unix: float, phase: str, step: int = 0, **facts: Any) -> Moment:
    return Moment(unix=unix, phase=phase, step=step, **facts)


def moments(text: str) -> list[Moment]:
    return [at(float(unix), phase, *map(int, step)) for unix, phase, *step in map(str.split, text.split(","))]


def steps(*seconds: float) -> list[list[StepRow]]:
    row = StepRow.model_construct(own_seconds=0.5, data_seconds=0.0)
    return [
        [row.model_copy(update={"step": number, "rank": rank, "seconds": second}) for rank in (0, 1)]
        for number, second in enumerate(seconds, 1)
    ]


def parts(found: Goodput) -> dict[str, float]:
    seconds = {name: getattr(found, f"{name}_seconds") for name in PARTS}
    assert sum(seconds.values()) == pytest.approx(found.wall_seconds)
    return {name: pytest.approx(second) for name, second in seconds.items() if second}


def test_every_second_of_an_undisturbed_run_has_one_place() -> None:
    start = "100 launch, 101 start, 104 load, 109 attest, 110 train, 113 attest 1, 114 train 1"  # 3 s of training
    rest = "120 evaluate 3, 122 train 3, 123 save 3, 127 end 3, 128 ended"  # after 6 s, and 1 s more
    found = measure_goodput(moments(f"{start}, {rest}"), steps(2.5, 3.0, 3.0))
    # 10 s to the first step and 1 s of checks after it; 10 s of training hold 8.5 s of steps; 1 s to the end
    assert parts(found) == {"productive": 8.5, "startup": 11.0, "evaluation": 2.0, "checkpoint": 4.0, "other": 2.5}
    assert (found.wall_seconds, found.idle_seconds, found.starts, found.lost_steps) == (28.0, 0.0, 1, 0)
    assert found.describe() == "goodput 30 % of 28 s (start-up 39 %, checkpoints 14 %, evaluation 7 %, other 9 %)"


def test_a_rank_waits_for_its_batch_and_for_the_slowest_rank() -> None:
    waits = ({"data_seconds": 0.5, "own_seconds": 1.0}, {"data_seconds": 0.75, "own_seconds": 1.75})
    rows = [row.model_copy(update=facts) for row, facts in zip(steps(3.0)[0], waits, strict=True)]
    found = measure_goodput(moments("0 start, 1 train, 4 end"), [rows])
    assert parts(found) == {"productive": 1.75, "startup": 1.0, "waiting": 1.25}


def test_a_killed_process_loses_its_steps_after_the_checkpoint_and_the_time_until_the_fault_is_found() -> None:
    # steps 5 and 6 take 2 s; then a rank is killed, which the launcher finds at 15
    killed = moments("0 launch, 1 start, 5 train, 9 save 4, 10 train 4")
    restarted = moments("16 start, 20 train 4, 24 end 8, 25 ended")
    timeline = [*killed, at(15, "restart", lost_steps=2, lost_seconds=2.0), *restarted]
    found = measure_goodput(timeline, steps(1, 1, 1, 1, 1, 1, 1, 1))
    lost = {"lost": 5.0, "restart": 5.0}  # 2 s of steps 5 and 6, and 3 s until 15; 5 s until step 4 again
    assert parts(found) == {"productive": 8.0, "startup": 5.0, "checkpoint": 1.0, "other": 1.0, **lost}
    assert (found.starts, found.lost_steps, found.fraction) == (2, 2, pytest.approx(8 / 25))


def test_the_hours_between_two_attempts_are_no_part_of_the_wall_time() -> None:
    stopped = moments("0 launch, 1 start, 5 train, 9 save 4, 10 stopped 4, 11 ended")
    resumed = moments("7211 launch, 7212 start, 7215 train 4, 7219 end 8")
    found = measure_goodput([*stopped, *resumed], steps(1, 1, 1, 1, 1, 1, 1, 1))
    assert parts(found) == {"productive": 8.0, "startup": 5.0, "checkpoint": 1.0, "restart": 4.0, "other": 1.0}
    assert (found.wall_seconds, found.idle_seconds) == (19.0, 7200.0)


def test_a_process_that_torchrun_started_again_was_not_idle_and_notes_the_losses_of_the_one_before() -> None:
    timeline = moments("0 start, 5 train, 12 ended")  # 6 steps of 1 s, of which a checkpoint holds 4; a last heartbeat
    timeline += [at(14, "start", restarted=True), at(18, "train", 4)]
    timeline += [at(19, "train", 5, lost_steps=2, lost_seconds=2.0), at(22, "end", 8)]
    found = measure_goodput(timeline, steps(1, 1, 1, 1, 1, 1, 1, 1))
    assert parts(found) == {"productive": 8.0, "startup": 5.0, "lost": 3.0, "restart": 6.0}


def test_a_clock_that_was_set_back_takes_no_time_away_and_without_a_timeline_there_is_no_goodput() -> None:
    found = measure_goodput(moments("10 start, 12 train, 11 end, 13 ended"), steps(5.0))
    assert parts(found) == {"startup": 2.0, "other": 2.0}
    found = measure_goodput([], steps(1.0))
    assert (found.wall_seconds, found.fraction, found.describe()) == (0.0, None, "goodput n/a")

"""Speed, memory and energy of a run, computed from the ranks' rows."""

from pathlib import Path
from typing import Any

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import (
    MemoryByPhase,
    StepRow,
    drop_rows_after,
    grad_norm,
    measure,
    percentile,
    read_steps,
)
from toolkit.record.training_progress import step_line


def test_a_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    for count, share, expected in ((10, 0.9, 9), (11, 0.9, 10), (1, 0.9, 1), (10, 0.5, 5), (10, 0.0, 1), (10, 1.0, 10)):
        assert percentile(list(range(count, 0, -1)), share) == expected
    assert percentile([], 0.9) is None


def row(rank: int, **measured: Any) -> StepRow:
    facts = {
        **{"step": 1, "rank": rank, "seconds": 1.0, "cpu_seconds": 2.0, "loss": 1.0, "grad_norm": None},
        **{"tokens": 100, "non_padding_tokens": 80, "supervised_tokens": 40, "batch_sha256": f"batch of {rank}"},
        **{"peak_allocated_bytes": None, "peak_reserved_bytes": None, "peak_host_bytes": 1000},
    }
    return StepRow.model_validate(facts | measured)


def test_step_seconds_are_the_slowest_ranks_and_tokens_are_summed_over_ranks() -> None:
    steps = [[row(0, seconds=9.0), row(1, seconds=8.0)], [row(0, seconds=0.5), row(1, seconds=1.0)]]
    steps += [[row(0, seconds=1.0), row(1, seconds=0.25)]]
    measured = measure(steps, untimed_steps=1)
    assert measured.step_seconds == (9.0, 1.0, 1.0)
    assert (measured.summary()["steps"], measured.timed_steps, measured.timed_seconds) == (3, 2, 2.0)
    # 2 steps x 2 ranks x 100 tokens in 2 s, and in 2 x 2 x 2 s of CPU time
    assert (measured.tokens_per_second, measured.tokens_per_cpu_second) == (200, 50)
    assert (measured.non_padding_tokens_per_second, measured.supervised_tokens_per_second) == (160, 80)
    assert (measured.step_seconds_median, measured.step_seconds_p90) == (1.0, 1.0)


def test_speeds_and_peaks_are_those_of_the_preset_and_ranks_that_the_run_ended_under() -> None:
    def steps(preset: str, ranks: int, seconds: float, peak: int) -> list[list[StepRow]]:
        facts = {"preset": preset, "world_size": ranks, "seconds": seconds, "peak_allocated_bytes": peak}
        return [[row(rank, step_of_process=n, **facts) for rank in range(ranks)] for n in (1, 2, 3)]

    measured = measure([*steps("zero2", 2, 1.0, 9), *steps("zero2", 1, 2.0, 8)], untimed_steps=1)
    assert (measured.timed_steps, measured.step_seconds_median, measured.peak_allocated_bytes) == (2, 2.0, 8)
    measured = measure([*steps("zero2", 2, 1.0, 9), *steps("fsdp2", 2, 4.0, 5)], untimed_steps=1)
    assert (measured.timed_step_numbers, measured.tokens_per_second, measured.peak_allocated_bytes) == ((5, 6), 50, 5)
    assert (measured.summary()["steps"], len(measured.losses)) == (6, 6)


def test_ranks_that_share_a_gpu_have_memory_and_losses_and_no_speed() -> None:
    steps = [[row(rank, ranks_per_gpu=2, peak_allocated_bytes=7, own_seconds=0.5) for rank in range(2)]] * 3
    measured = measure(steps, untimed_steps=1)
    assert (measured.peak_allocated_bytes, measured.losses, measured.ranks_per_gpu) == (7, (1.0,) * 3, 2)
    assert (measured.summary()["steps"], measured.timed_steps, measured.step_seconds) == (3, 0, ())
    speeds = (measured.tokens_per_second, measured.step_seconds_median, measured.tokens_per_cpu_second)
    assert (*speeds, measured.timed_seconds, measured.rank_skew) == (None,) * 5
    line = step_line(steps[0], max_steps=3, seconds_left=None)
    assert line == "step 1/3  loss 1.0000  peak 0.0 MiB RSS"


def test_losses_are_means_over_ranks_padding_is_a_share_and_peaks_are_maxima() -> None:
    first = row(0, loss=1.0, non_padding_tokens=70, peak_allocated_bytes=5, peak_host_bytes=900, driver_bytes=7)
    later = row(0, loss=0.5, non_padding_tokens=70, peak_allocated_bytes=6, peak_host_bytes=901, allocator_retries=0)
    other = row(1, loss=2.0, peak_allocated_bytes=7, peak_host_bytes=800, allocator_retries=2)
    last = other.model_copy(update={"loss": 0.5})
    measured = measure([[first, other], [later, last]], untimed_steps=0)
    assert (measured.losses, measured.first_loss, measured.last_loss) == ((1.5, 0.5), 1.5, 0.5)
    assert measured.padding_fraction == 0.25  # 70 and 80 of 100 tokens
    assert (measured.peak_allocated_bytes, measured.peak_host_bytes, measured.peak_rank) == (7, 901, 1)
    assert (measured.peak_driver_bytes, measured.allocator_retries) == (7, 2)
    on_cpu = measure([[row(0, peak_host_bytes=10), row(1, peak_host_bytes=20)]], untimed_steps=0)
    assert (on_cpu.peak_allocated_bytes, on_cpu.peak_host_bytes, on_cpu.peak_rank) == (None, 20, 1)


def reading(at: float, joules: float | None, *reasons: str) -> dict[str, Any]:
    return {"monotonic_seconds": at, "energy_joules": joules, "throttle_reasons": list(reasons)}


def test_energy_is_mean_power_times_the_seconds_of_the_timed_steps_if_every_rank_has_a_counter() -> None:
    first = [{"seconds": 9.0, "gpu_reading": reading(9.0, 0.0, "software power cap")}] * 2  # untimed
    timed = [[{"gpu_reading": reading(10.0, 1000.0)}, {"gpu_reading": reading(10.5, 5000.0)}]]
    timed += [[{"gpu_reading": None}, {"gpu_reading": None}]]
    timed += [[{"gpu_reading": reading(12.0, 1600.0)}, {"gpu_reading": reading(12.5, 5800.0, "hardware slowdown")}]]
    steps = [[row(rank, **step[rank]) for rank in (0, 1)] for step in [first, *timed]]
    measured = measure(steps, untimed_steps=1)
    assert measured.energy_joules == 2100  # (600 / 2 + 800 / 2) W over 3 timed steps of 1 s
    assert measured.throttle_reasons == ("hardware slowdown",)
    # unknown if one rank has no counter
    ones = [[row(0, gpu_reading=reading(at, 100.0 * at)), row(1, gpu_reading=reading(at, None))] for at in (1.0, 2.0)]
    assert measure(ones, untimed_steps=0).energy_joules is None
    assert measure(ones, untimed_steps=0).throttle_reasons == ()
    assert measure([[row(0)]], untimed_steps=0).throttle_reasons is None


def test_memory_by_phase_is_the_maximum_over_ranks() -> None:
    ladder = {"bytes_of": "allocated", "load": 4, "forward": 9, "backward": 8, "step": 16}
    other = {"bytes_of": "allocated", "load": 5, "forward": 7}
    steps = [[row(0, memory_by_phase=ladder), row(1, memory_by_phase=other)], [row(0), row(1)]]
    expected = MemoryByPhase(bytes_of="allocated", load=5, forward=9, backward=8, step=16)
    assert measure(steps, untimed_steps=0).memory_by_phase == expected
    assert measure([[row(0)]], untimed_steps=0).memory_by_phase is None


def test_gradient_norms_of_shards_add_up_as_squares() -> None:
    three, four = ({"local_grad_norm": norm, "grad_norm_ranks": 2} for norm in (3.0, 4.0))
    replica, of_engine = {"local_grad_norm": 5.0, "grad_norm_ranks": 1}, {"grad_norm": 1.5}
    pairs = [(three, four), (replica, replica), (of_engine, of_engine), (three, {}), ({}, {})]
    assert [grad_norm([row(0, **a), row(1, **b)]) for a, b in pairs] == [5.0, 5.0, 1.5, None, None]


def test_steps_are_those_that_all_ranks_completed_and_a_run_that_lost_a_rank_has_both_sizes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_steps(folder) == []
    folder.rank_rows(0).parent.mkdir()
    ranks = {0: [(1, 2), (2, 1), (3, 2), (4, 2)], 1: [(1, 2), (3, 2)]}  # step 4: rank 1 has not written yet
    for rank, steps in ranks.items():
        rows = [row(rank, step=step, world_size=size, own_seconds=1.0 + rank) for step, size in steps]
        folder.rank_rows(rank).write_text("".join(each.model_dump_json() + "\n" for each in rows))
    steps = read_steps(folder)
    assert [[(r.rank, r.step) for r in step] for step in steps] == [[(0, 1), (1, 1)], [(0, 2)], [(0, 3), (1, 3)]]
    measured = measure(steps, untimed_steps=0)
    assert (len(measured.losses), measured.rank_skew, measured.energy_joules) == (3, 2.0, None)


def test_profiled_steps_are_not_timed_and_a_run_without_steps_has_no_speed() -> None:
    steps = [[row(0)], [row(0, seconds=99.0, profiled=True)], [row(0)]]
    measured, nothing = measure(steps, untimed_steps=1), measure([], untimed_steps=2)
    assert (len(measured.losses), measured.timed_steps, measured.tokens_per_second) == (3, 1, 100)
    assert (nothing.losses, nothing.tokens_per_second, nothing.step_seconds_p90) == ((), None, None)
    assert (nothing.peak_rank, nothing.padding_fraction) == (None, None)


def test_rows_before_a_damaged_line_are_kept_where_a_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\nnothing\n{"step": 1}\n{"step"')
    assert [dropped["step"] for dropped in drop_rows_after(path, 2)] == [3]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    drop_rows_after(tmp_path / "rank1.jsonl", 2)
    assert (tmp_path / "rank1.jsonl").read_text() == ""

"""The time of a profiled step, divided into parts and drawn as a timeline."""

from typing import Any

import pytest

from toolkit.observe.profiler import read_trace, step_parts, step_timeline


def test_every_moment_of_a_step_is_in_one_part() -> None:
    lanes: Any = {"compute": [(1, 5), (4, 6), (18, 25)], "communication": [(5, 9)], "data_wait": [(0, 2), (8, 10)]}
    assert step_parts((0, 20), lanes) == {
        "step": 20,
        "compute": 7,  # 1 to 6, 18 to 20
        "communication": 4,
        "exposed_communication": 3,  # 6 to 9
        "data_wait": 2,  # 0 to 1, 9 to 10
        "idle": 8,  # 10 to 18
    }


def event(name: str, start: int, end: int, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "tid": tid}


def test_collation_is_data_wait_on_a_cpu_and_only_kernels_are_compute_on_a_gpu() -> None:
    on_cpu = [
        event("ProfilerStep#0", 0, 100, "user_annotation"),
        event("toolkit.data_wait", 0, 10, "user_annotation"),
        event("aten::stack", 2, 4),
        event("aten::mm", 20, 60),
        event("gloo:all_reduce", 50, 80, tid=2),
    ]
    kernels = [event("gemm", 30, 40, "kernel", 7), event("ncclDevKernel_AllReduce", 35, 55, "kernel", 8)]
    for trace, expected in ((on_cpu, [40, 20, 10]), ([*on_cpu, *kernels], [10, 15, 10])):
        (step,), lanes = read_trace(trace)
        parts = step_parts(step, lanes)
        assert [parts[part] for part in ("compute", "exposed_communication", "data_wait")] == expected


def test_a_timeline_starts_at_its_step_and_leaves_out_what_is_too_short_to_draw() -> None:
    trace = [
        event("ProfilerStep#0", 0, 500, "user_annotation"),
        event("ProfilerStep#1", 1000, 2000, "user_annotation"),
        event("aten::mm", 900, 1100),  # begun before the step
        event("aten::mm", 1300, 1301),  # half a 500th of it
        event("gloo:all_reduce", 1400, 1500, tid=2),
        event("gloo:all_reduce", 1501, 1600, tid=2),  # drawn as one with the first
    ]
    (_, step), lanes = read_trace(trace)
    assert step_timeline(step, lanes, epoch_seconds=5.0) == {
        "start_unix": pytest.approx(5.001),
        "seconds": 0.001,
        "lanes": {"compute": [[0.0, 0.0001]], "communication": [[0.0004, 0.0006]], "data_wait": []},
    }

"""Plans compared with rehearsals: parts are matched by name, differences are relative to the rehearsal."""

import pytest

from toolkit.plan.plan_vs_rehearsal import PartDifference, PlanVerification, compare_parts, training_argv
from toolkit.plan.planned_job import PlannedJob

PLAN = {
    **{"parameter_bytes": 80, "gradient_bytes": 100, "optimizer_bytes": 200},
    "phases": {
        "backward": {
            **{"parameter_bytes": 80, "gradient_bytes": 0, "optimizer_bytes": 200, "activation_bytes": 300},
            **{"logits_bytes": 50, "buffer_bytes": 40, "allocated_bytes": 670},
        }
    },
}


def test_model_states_are_compared_to_the_byte() -> None:
    rows = compare_parts(PLAN, {"parameter_bytes": 100, "gradient_bytes": 100, "optimizer_bytes": 160})
    assert [row.part for row in rows] == ["parameter", "gradient", "optimizer"]
    assert [row.relative for row in rows] == pytest.approx([-0.2, 0.0, 0.25])


def test_parts_of_a_trace_on_fake_tensors_are_summed_up_to_parts_of_the_plan() -> None:
    parts = {"parameter": 80, "optimizer": 200, "forward": 250, "backward": 50, "gathered": 30, "reduction": 10}
    peaks = {"backward": {"total_bytes": 700, "parts": parts | {"logits": 80}}}
    rows = {row.part: row.rehearsed_bytes for row in compare_parts(PLAN, {"peaks": peaks})}
    traced = {"parameter": 80, "gradient": 0, "optimizer": 200, "activation": 300, "logits": 80, "buffer": 40}
    assert rows == {f"backward: {part}": size for part, size in (traced | {"allocated": 700}).items()}
    # The peaks of a GPU have no parts.
    found = {"phase_peaks": {"backward": {"peak_allocated_bytes": 600, "peak_reserved_bytes": 900}}}
    assert [(row.part, row.rehearsed_bytes) for row in compare_parts(PLAN, found)] == [("backward: allocated", 600)]
    assert PartDifference(part="logits", planned_bytes=5, rehearsed_bytes=0).relative is None  # the plan's alone


def test_no_share_of_a_few_bytes_is_shown() -> None:
    sizes = [(3 * 2**30, 1024), (0, 1024), (3 * 2**30, 2 * 2**30), (3 * 2**30, 0)]
    parts = tuple(PartDifference("buffer", *each) for each in sizes)
    _, _, *lines = PlanVerification(preset="ddp", world_size=2, rehearsed_on="fake tensors", parts=parts).lines()
    assert [line.split()[-1] for line in lines] == ["n/a", "+0.0%", "+50.0%", "n/a"]


@pytest.mark.parametrize(("degrees", "loss"), [({}, "chunked"), ({"ep": 2}, "chunked"), ({"tp": 2, "ep": 4}, "full")])
def test_a_rehearsal_has_the_degrees_and_the_loss_of_the_plan(degrees: dict[str, int], loss: str) -> None:
    words = training_argv("model", PlannedJob(**degrees), cpu=False)
    assert words[words.index("--loss") + 1] == loss
    assert {name: int(words[words.index(f"--{name}") + 1]) for name in degrees} == degrees
    assert ("--tp" in words) == ("tp" in degrees)

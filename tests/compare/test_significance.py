"""Intervals of speeds and ratios, against tables and sampling and on a preset compared with itself; ranks; the answer.

The answer names a preset only where the intervals decide: docs/concepts/compare.md has the rule.
"""

import math
import random
import re
import statistics
from typing import Any

import pytest
from comparison_records import aggregate_rows, comparison, row_beside_ddp, trial
from results_documents import GIB, Document, answer_text, console_lines, html_text, markdown_text

from toolkit.compare.significance import difference, mean_interval, ratio_confidence, ratio_interval, student_t


def test_student_t_equals_the_published_tables() -> None:
    tables = {0.95: {1: 12.706, 2: 4.303, 10: 2.228}, 0.99: {2: 9.925, 4: 4.604, 30: 2.750}}
    for confidence, quantiles in tables.items():
        found = {freedom: student_t(confidence, freedom) for freedom in quantiles}
        assert found == pytest.approx(quantiles, abs=5e-4)


def test_intervals_worked_out_by_hand() -> None:
    # logs 0, 0, 0.03: mean 0.01, standard deviation 0.017320508, over sqrt 3 is 0.01; t(0.95, 2) = 4.302653
    own = [1.0, 1.0, math.exp(0.03)]
    low, high = mean_interval(own) or (0, 0)
    assert (math.log(low), math.log(high)) == pytest.approx((0.01 - 0.04302653, 0.01 + 0.04302653), abs=1e-7)
    # equal variances 0.0003: error sqrt(2 * 0.0001), 4 degrees of freedom, t(0.99, 4) = 4.604095
    low, high = ratio_interval(own, [2 * figure for figure in own], 0.99) or (0, 0)
    half = 4.604095 * math.sqrt(2e-4)
    assert (math.log(2 * low), math.log(2 * high)) == pytest.approx((-half, half), abs=1e-6)
    assert difference((low, high)) == "slower"
    # more rows need a higher confidence
    assert [ratio_confidence(n) for n in (0, 1, 5, 10)] == pytest.approx([0.99, 0.99, 0.99, 0.995])


def figures(rng: random.Random, repeats: int, *, between: float, within: float, steps: int = 30) -> list[float]:
    """Speeds of trials whose level varies by `between` from trial to trial, and whose steps vary by `within`."""
    levels = [rng.gauss(0, between) for _ in range(repeats)]
    return [1 / math.exp(statistics.median(rng.gauss(level, within) for _ in range(steps))) for level in levels]


@pytest.mark.parametrize(
    ("between", "within"),
    [(0.05, 0.02), *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(0.003, 0.05), (0.0, 0.1)])],
)
def test_a_preset_differs_from_itself_in_at_most_two_of_a_hundred(between: float, within: float) -> None:
    """An interval over pooled steps would claim a difference in most of those whose trials vary."""
    rng, claims, comparisons = random.Random(0), 0, 400
    for _ in range(comparisons):
        a, b = (figures(rng, 3, between=between, within=within) for _ in range(2))
        claims += difference(ratio_interval(a, b, ratio_confidence(1))) != "no difference seen"
    assert claims <= 0.02 * comparisons


def test_a_difference_of_five_percent_is_mostly_seen_if_trials_vary_by_half_a_percent() -> None:
    rng, seen = random.Random(0), 0
    for _ in range(100):
        a, b = (figures(rng, 3, between=0.005, within=0.02) for _ in range(2))
        seen += difference(ratio_interval([1.05 * f for f in a], b, 0.99)) == "faster"
    assert seen >= 75


def test_all_speeds_count_the_same_steps() -> None:
    """The baseline ran two slow steps more; its speed leaves them out, because the other row stopped before them."""
    short = [trial("other", 0, step_seconds=[9.0, 0.7, *[0.5] * 4], timed_step_numbers=[3, 4, 5, 6])]
    slow_end = [trial("ddp", 0, step_seconds=[9.0, 0.7, 0.5, 0.5, 0.5, 0.5, 5.0, 5.0])]
    rows = aggregate_rows(comparison("ddp", "other", repeats=1), *slow_end, *short)
    assert rows["ddp-n2"].tokens_per_second == pytest.approx(400)
    assert rows["other-n2"].ratio_to_reference == pytest.approx(1.0)


def test_scaling_is_relative_to_the_fewest_processes_of_the_same_preset() -> None:
    """fsdp2 needs two processes, so next to ddp with one and two it has no efficiency of 100 %."""
    trials = [trial("ddp", r, world_size=n, slower=1.25 if n == 2 else 1) for n in (1, 2) for r in range(3)]
    trials += [trial("fsdp2", r) for r in range(3)]
    rows = aggregate_rows(comparison("ddp", "fsdp2", world_sizes=(1, 2), scaling="weak"), *trials)
    found = {name: (row.speed_up, row.scaling_efficiency) for name, row in rows.items()}
    assert found == {"ddp-n1": (1.0, 1.0), "ddp-n2": pytest.approx((1.6, 0.8)), "fsdp2-n2": (None, None)}


def test_rows_are_ranked_only_if_intervals_separate_them() -> None:
    trials = [trial("ddp", repeat) for repeat in range(3)]
    trials += [trial("slow", repeat, slower=1.5) for repeat in range(3)]
    rows = aggregate_rows(comparison("ddp", "slow"), *trials)
    assert [(row.rank, row.difference) for row in rows.values()] == [(1, "reference"), (2, "slower")]
    trials += [trial("alike", repeat, slower=1.001) for repeat in range(3)]
    rows = aggregate_rows(comparison("ddp", "slow", "alike"), *trials)
    assert [row.rank for row in rows.values()] == [None, 3, None]
    assert rows["alike-n2"].difference == "no difference seen"


def test_single_runs_support_no_claim() -> None:
    row = row_beside_ddp(repeats=1, slower=2.0)
    assert row.ratio_to_reference == pytest.approx(0.5)
    claims = ("ratio_interval", "difference", "rank", "tokens_per_second_interval", "step_seconds_interval")
    assert [getattr(row, key) for key in claims] == [None] * 5


Relative = tuple[float, float, tuple[float, float] | None]
"""Memory, ratio and its interval."""
UNDECIDED = "Not decided yet: the speeds of {} differ by less than their intervals: run `--resume --repeats 5`"
BASELINE = (1.0, 1.0, None)


def on_gpus(made_up: Document, repeats: int = 3, **presets: Relative) -> Document:
    """Two H100s; each preset's memory, ratio and interval are relative to ddp."""
    template = next(row for row in made_up["rows"] if row["trial"] == "zero3-n2")
    rows: list[dict[str, Any]] = []
    for name, (memory, ratio, interval) in presets.items():
        is_baseline, speed = name == "ddp", 1000.0 * ratio
        low, high = interval or (0.99, 1.01)
        claim = "faster" if low > 1 else "slower" if high < 1 else "no difference seen"
        rows.append(
            template
            | {
                **{"trial": f"{name}-n2", "preset": name, "rank": None, "repeats": repeats, "scaling_efficiency": None},
                **{"tokens_per_second": speed, "non_padding_tokens_per_second": speed},
                "tokens_per_second_interval": [1000.0 * low, 1000.0 * high] if repeats > 1 else None,
                "peak_allocated_bytes": round(40 * GIB * memory),
                **{"ratio_to_reference": ratio, "ratio_interval": interval},
                "difference": "reference" if is_baseline else claim,
                "parity": "reference" if is_baseline else "agrees",
            }
        )
    method = made_up["method"] | {"repeats": repeats}
    return made_up | {"reference": "ddp", "rows": rows, "trials": [], "method": method}


@pytest.mark.parametrize(
    ("presets", "headline"),
    [
        ({"zero2": (0.75, 0.99, (0.97, 1.01))}, "Take zero2: 25 % less memory than ddp at the same speed"),
        ({"zero2": (0.75, 1.12, (1.08, 1.16))}, "Take zero2: 12 % faster than ddp, with 25 % less memory"),
        ({"zero2": (1.25, 1.12, (1.08, 1.16))}, "Take zero2: 12 % faster than ddp, with 25 % more memory"),
        # up to 5 % slower counts as equally fast, and is said
        ({"zero2": (0.75, 0.98, (0.96, 0.99))}, "Take zero2: 25 % less memory than ddp for 2 % less speed"),
        ({"zero2": (0.75, 0.9, (0.88, 0.92))}, "Take ddp: the fastest of 2"),
        ({"zero2": (1.0, 1.0, (0.98, 1.02))}, "Take ddp: none is faster, and none as fast uses less memory"),
        ({"zero2": (0.75, 0.54, (0.13, 2.2))}, UNDECIDED.format("ddp and zero2")),
        # zero3 is as fast as ddp or not; it would be taken if it were
        (
            {"zero2": (0.75, 1.0, (0.98, 1.02)), "zero3": (0.5, 0.97, (0.85, 1.1))},
            UNDECIDED.format("ddp, zero2 and zero3"),
        ),
        # zero3 is slower, by how much is unclear
        (
            {"zero2": (0.75, 1.0, (0.98, 1.02)), "zero3": (0.5, 0.8, (0.66, 0.95))},
            "Take zero2: 25 % less memory than ddp at the same speed",
        ),
    ],
)
def test_the_preset_with_least_memory_is_taken_of_those_that_none_beats(
    made_up: Document, presets: dict[str, Any], headline: str
) -> None:
    assert answer_text(on_gpus(made_up, ddp=BASELINE, **presets)).splitlines()[0] == headline


def test_single_runs_on_gpus_decide_nothing_and_show_what_memory_is_saved(made_up: Document) -> None:
    results = on_gpus(made_up, repeats=1, ddp=BASELINE, zero2=(0.75, 2.0, None))
    assert answer_text(results).splitlines() == [
        "Not decided yet: single runs have no intervals: run `--resume --repeats 3`",
        "- zero2 uses 25 % less memory than ddp",
    ]


@pytest.mark.parametrize("zero2", [(0.75, 1.1, (0.9, 1.3)), (0.75, 1.0, (0.9, 1.1))])
def test_a_search_whose_ratios_are_unclear_is_continued_by_its_own_command(made_up: Document, zero2: Relative) -> None:
    search = on_gpus(made_up, ddp=BASELINE, zero2=zero2)
    search |= {"method": search["method"] | {"search": True}}
    assert "`toolkit tune` with `--resume` continues the search" in answer_text(search)
    assert "up to 3 runs of each" in markdown_text(search)
    assert "--repeats" not in markdown_text(search)


def test_ranks_that_share_a_gpu_show_memory_and_no_speed(made_up: Document) -> None:
    shared = on_gpus(made_up, ddp=BASELINE, zero2=(0.75, 2.0, (1.9, 2.1)))
    shared |= {"method": shared["method"] | {"ranks_per_gpu": 2}}
    assert answer_text(shared).splitlines() == [
        "Memory, losses and parity only: speeds are n/a, since 2 ranks share a GPU, so no preset is recommended",
        "- zero2 uses 25 % less memory than ddp",
    ]
    text = markdown_text(shared)
    assert "2 ranks on 1 × NVIDIA H100 80GB HBM3" in text
    assert "2 ranks share each GPU: memory, sharding, losses and parity are those of as many GPUs" in text
    assert not {"1,000", "2,000", "Speed", "tokens/s is of all ranks"} & set(re.split(r"[|#\n]\s*|\s*[|\n]", text))
    assert "2,000" not in "\n".join(console_lines(shared)) + html_text(shared)


def test_a_smaller_preset_that_is_slower_is_named_with_its_price(made_up: Document) -> None:
    assert answer_text(made_up).splitlines() == [
        "Take zero2: the fastest of 3",
        "- on 2 × NVIDIA H100 80GB HBM3, fsdp2 uses 31 % less memory than zero2 for 8 % less speed",
        "- on 4 × NVIDIA H100 80GB HBM3, fsdp2 uses 44 % less memory than zero2 for 5 % less speed",
        "- from 2 to 4 processes zero2 becomes 1.86 times as fast (93 % of ideal)",
        "- 1 did not complete (ddp: out_of_memory)",
        "- 1 did not train the same problem (zero1)",
    ]


def test_a_cpu_decides_nothing_and_shows_what_gpus_would_hold(results: Document) -> None:
    for row, share in zip(results["rows"], (1.0, 0.5, 0.25, 0.5), strict=True):
        states = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        row.update({f"planned_gpu_{part}": round(2**20 * share) for part in states})
    assert answer_text(results).splitlines() == [
        "No preset is recommended: a CPU shows memory and training, and its speeds say nothing about GPUs",
        "- ddp and zero2 trained the same problem",
        "- on GPUs, by the plan, zero2 needs least for model states: 1.5 MiB per rank, 50 % less than ddp",
        "- 1 did not complete (zero3: out_of_memory)",
        "- 1 did not train the same problem (fsdp2)",
    ]
    assert "| ddp | completed | 4.0 | 4.0 | 8.0 | 3.0 | 1,500 | 2.0000 |" in markdown_text(results)
    assert '<u class="tick"' not in html_text(results)  # the plan is of mixed precision, the bars are of fp32
    assert '<div class="answer open">' in html_text(results)


def test_single_runs_on_a_cpu_show_no_speed_and_no_ratio(results: Document) -> None:
    for text in (markdown_text(results), html_text(results).split("</style>")[1], "\n".join(console_lines(results))):
        assert not re.search(r"tokens|ratio to|step s|\b400\b|\b0\.75\b|Trials", text)


def test_nothing_is_recommended_when_the_baseline_failed(results: Document) -> None:
    results["rows"][0].update(status="failed", parity=None)
    results["rows"][1]["parity"] = None
    assert answer_text(results).splitlines() == [
        "No preset can be recommended: none trained the same problem",
        "- 2 did not complete (ddp: failed, zero3: out_of_memory)",
        "- 1 did not train the same problem (fsdp2)",
        "- 1 could not be checked against the baseline (zero2)",
    ]


def test_a_row_that_differs_by_design_is_not_recommended(results: Document) -> None:
    results["rows"][1].update(group="ddp_comm_hook int8", parity=None)
    assert "- 1 not ranked here, different by design (zero2 (ddp_comm_hook int8))" in answer_text(results)


def test_nothing_is_said_of_no_rows(results: Document) -> None:
    results["rows"] = []
    assert answer_text(results) == "Nothing was compared: there are no rows"
    assert "Nothing was measured." in html_text(results)

"""The answer names a preset only where the intervals decide: docs/concepts/compare.md has the rule."""

import re
from typing import Any

import pytest
from results_documents import GIB, Document, answer_text, console_lines, html_text, markdown_text

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

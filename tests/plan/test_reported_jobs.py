"""Public jobs of other programs, planned with what their reports say (`fixtures/reported_jobs.csv`).

The half `built` was looked at while the planner was changed; of `kept`, other sources, only the end;
`later` has reports that were collected afterwards, and planned once; so have `fresh`, after which causes were looked
for, `last`, `latest`, of which two were refused at first, `newest`, after which the margin under DeepSpeed was changed,
and `final`. All of these shaped the planner or its limits. `once` and `unseen` were planned once, after every change;
then two causes of `once` were planned, and two margins were chosen on all groups. `after` was planned once after that,
and changed nothing. GB are read as GiB.
Options follow from the reports' words by fixed rules: `eager` attention, fp16, whose program, FSDP1, `nf4` of a script
that prepares its model for kbit training, transformers' upcast logits before October 2024, its default `adamw_torch`
before version 5, Unsloth's full logits of Gemma 3 in April 2025, and the loss of TRL's methods: `upcast` in 2024,
`full` in 2025.
`pytest -s` prints each row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache

import pytest
from measured_jobs import rows
from planned_commands import planned_command

from toolkit.plan.engine_buffers import driver_bytes
from toolkit.plan.memory import DOES_NOT_FIT, FITS, OF_ALL_FSDP1, OF_ALL_OTHER_DEEPSPEED, OF_ALL_UNSHARDED
from toolkit.plan.planner import Plan
from toolkit.units import GIB


@cache
def reported() -> list[tuple[dict[str, str], Plan]]:
    return [(row, planned_command(row["command"])) for row in rows("reported_jobs")]


def of(half: str) -> Iterator[tuple[dict[str, str], Plan]]:
    yield from ((row, plan) for row, plan in reported() if row["half"] == half)


def in_sample() -> Iterator[tuple[dict[str, str], Plan]]:
    yield from ((row, plan) for row, plan in reported() if row["half"] not in ("once", "unseen", "after"))


@pytest.mark.parametrize(
    ("half", "out_of_memory", "wrong"),
    [
        *[("built", 6, 0), ("kept", 6, 0), ("later", 8, 0), ("fresh", 28, 3), ("last", 8, 0), ("latest", 17, 3)],
        *[("newest", 25, 0), ("final", 10, 0), ("once", 24, 2), ("unseen", 30, 5), ("after", 32, 7)],
    ],
)
def test_few_public_jobs_that_ran_out_of_memory_fit_and_none_that_ran_does_not(
    half: str, out_of_memory: int, wrong: int
) -> None:
    ran_out = [plan.verdict for row, plan in of(half) if row["reported"] == "OOM"]
    refused = {row["id"] for row, plan in of(half) if row["reported"] != "OOM" and plan.verdict == DOES_NOT_FIT}
    assert (len(ran_out), ran_out.count(FITS)) == (out_of_memory, wrong)
    # Of three, only the length at which rows are cut is stated; of the fourth, not whether it ran under FSDP or ZeRO-3.
    # Of the fifth, a blog, nothing but the model, the GPUs, rows and batch.
    known = {"latest": {"lf-3716", "lf-3708-4k"}, "newest": {"lf-7197", "openr1-579-10k"}, "once": {"blog-1412"}}
    # Of the next three, how long rows are, or how many; of the last, ZeRO-3 on four V100, all is stated.
    known["after"] = {"unsloth-2937-24k", "llava-528", "litgpt-242", "lf-2931-4"}
    assert refused == known.get(half, set())


def allowance(plan: Plan) -> float:
    """Return how many margins fit between the planned peak and the GPU's memory."""
    memory = plan.memory
    margin = memory.margin.of(memory.planned_peak_bytes, memory.peak.state_bytes)
    return (plan.request.gpu.memory_bytes - memory.planned_peak_bytes) / margin


def has_twice(plan: Plan) -> bool:
    """Return True if the GPU has twice the planned peak."""
    return plan.verdict == FITS and plan.request.gpu.memory_bytes >= 2 * plan.memory.planned_peak_bytes


def test_jobs_that_ran_out_of_memory_and_fit_are_few_and_no_margin_would_tell_them() -> None:
    """Their cause is not in the plan, or not in the report: with twice the planned memory four of 29 ran out of it."""
    fits = [(row, allowance(plan)) for row, plan in in_sample() if plan.verdict == FITS]
    wrong = {row["id"]: room for row, room in fits if row["reported"] == "OOM"}
    for name, room in wrong.items():
        print(f"{name:16} fits by {room:.1f} margins")
    thin = {"lf-6942": "whether GPU or host", "openrlhf-384-eager": "whose numerics"}
    # LLaMA-Factory 0.7 trained on several GPUs in one process (`cli.py`), so under DataParallel; and then?
    thin |= {"lf-3914": "why 19 GiB are not enough"}
    not_known = {"lf-1383", "lf-5709", "ms-swift-4486"}
    assert wrong.keys() == {*thin, *not_known}
    assert len(fits) >= 50
    enough = [row["reported"] == "OOM" for row, _ in fits if row["facts"] == "enough"]
    assert statistics.mean(enough) < 0.15
    twice = [row["reported"] == "OOM" for row, plan in in_sample() if has_twice(plan)]
    assert 0.1 < statistics.mean(twice) < 0.25


def test_no_more_than_one_in_ten_fits_of_jobs_that_ran_out_of_memory_and_shaped_the_planner() -> None:
    ran_out = [plan.verdict for row, plan in in_sample() if row["reported"] == "OOM"]
    print(f"{ran_out.count(FITS)} of {len(ran_out)}")
    assert ran_out.count(FITS) <= len(ran_out) / 10


def test_of_jobs_that_were_planned_unseen_and_ran_out_of_memory_one_in_eight_fits() -> None:
    """At first look twelve of 54 were `fits`; five of them chose the margin of what is not sharded and of ZeRO. Of
    alpaca-lora-344-13b the message says that bitsandbytes 0.38 copied all 8-bit weights to save adapters, and of
    axolotl-2531 facts are missing."""
    planned = [*of("once"), *of("unseen")]
    ran_out = {row["id"]: plan.verdict for row, plan in planned if row["reported"] == "OOM"}
    wrong = {name for name, verdict in ran_out.items() if verdict == FITS}
    assert wrong == {
        *("cookbook-37", "longchat-28-32k", "handbook-22", "ms-swift-3399"),
        *("axolotl-2531", "axolotl-2143", "alpaca-lora-344-13b"),
    }
    assert len(wrong) <= len(ran_out) / 7


def test_of_jobs_planned_once_after_the_margins_were_widened_and_ran_out_of_memory_one_in_five_fits() -> None:
    """Plans of five take less than half of the memory: no margin tells them. All facts are stated of `lf-1936`, a
    reward model under ZeRO-3, and of `lf-2931-2`, which trains all of Llama 7B with offload on two V100."""
    fits = {row["id"]: plan for row, plan in of("after") if row["reported"] == "OOM" and plan.verdict == FITS}
    for name, plan in fits.items():
        print(f"{name:16} {plan.memory.planned_peak_bytes / plan.request.gpu.memory_bytes:.0%}")
    assert fits.keys() == {
        *("lf-1936", "lf-2931-2", "lf-3919-z2off", "ms-swift-2753"),
        *("torchtune-2078-2", "unsloth-7203-2b", "axolotl-1690"),
    }


def test_what_torch_cannot_use_when_a_job_runs_out_is_within_the_margin_of_most() -> None:
    """Torch's own words in 41 public messages: what it holds and no tensor has, after it gave back all it could."""
    shares: dict[str, list[float]] = {}
    for row in rows("out_of_memory_messages"):
        if row["phase"] == "training":
            free, used = float(row["unallocated_gib"]), float(row["allocated_gib"])
            shares.setdefault(row["engine"], []).append(free / (free + used))
    for engine, found in shares.items():
        print(engine, len(found), f"median {statistics.median(found):.1%}", [f"{share:.1%}" for share in sorted(found)])
    whole = [*shares["ddp"], *shares["single"]]
    assert statistics.median(whole) < 0.01
    assert max(shares["zero3"]) < OF_ALL_OTHER_DEEPSPEED
    assert len(shares["zero3"]) == 8
    assert sum(share <= OF_ALL_FSDP1["full"] for share in shares["fsdp1"]) == 5
    assert max(whole) < OF_ALL_UNSHARDED


def test_reported_speeds_lie_inside_the_interval() -> None:
    found = [(float(row["tokens_per_second"]), plan.speed) for row, plan in reported() if row["tokens_per_second"]]
    inside = [
        speed and speed.tokens_per_second_per_gpu[0] <= each <= speed.tokens_per_second_per_gpu[1]
        for each, speed in found
    ]
    assert (sum(map(bool, inside)), len(inside)) == (6, 6)


def test_reported_peaks() -> None:
    errors: dict[str, list[float]] = {}
    for row, plan in reported():
        if row["kind"] in ("smi", "reserved"):
            less = driver_bytes(plan.setup.engine) if row["kind"] == "reserved" else 0
            error = (plan.memory.planned_peak_bytes - less) / GIB / float(row["reported"]) - 1
            print(f"{row['id']:15} {row['half']:6} {row['facts']:7} {error:+.1%} {plan.verdict}")
            errors.setdefault(row["facts"], []).append(abs(error))
    assert statistics.median(errors["enough"]) < 0.1
    assert statistics.median([*errors["enough"], *errors["thin"]]) < 0.11

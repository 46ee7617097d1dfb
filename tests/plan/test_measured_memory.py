"""Planned peaks, compared with those of `fixtures/measured_speed.csv`: allocated, and as nvidia-smi or torch reserved.

`pytest -s` prints the table, with the reason for each row that is not compared.
"""

import statistics
from collections import Counter
from dataclasses import dataclass
from functools import cache

from measured_jobs import MeasuredJob, has_liger, measured, rows, used_mib

from toolkit.plan.engine_buffers import driver_bytes
from toolkit.plan.memory import plan_memory
from toolkit.units import GIB, MIB

# The sources that constants of the plan come from: those of the allocator's reserve, from one GPU.
FITTED = "fms-acceleration"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One published peak and its plan, in bytes."""

    job: MeasuredJob
    kind: str  # `allocated` or `reserved`
    engine: str
    planned: float
    measured: float
    margin: float  # of the verdict

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def why_not(row: dict[str, str]) -> str:
    """Return the reason for which the memory of a row is not compared; empty if it is."""
    notes, single = row["notes"], row["gpus"] == "1"
    if ("bf16-loaded" in row["precision"] and row["method"] == "full") or (
        row["precision"].startswith("pure bf16 (") and not row["lora_r"]
    ):
        return "AdamW's states in bf16, or none allocated yet: ours are fp32"
    if "foak" in notes and not has_liger(row):
        return "cross-entropy in kernels of its own (foak), without Liger's"
    if "baseline-peft-bnb" in notes and single:
        return "`prepare_model_for_kbit_training` made its residual stream fp32, which ours is not"
    if row["method"] == "full" and row["strategy"] == "fsdp" and row["gpus"] == "2":
        return "its peak is that of loading whole fp32 weights: the same for 4 rows and for 8"
    if "offload" in row["strategy"]:
        return "parameters stay on the GPU, which they do not under our preset"
    if "strategy on one GPU not stated" in notes:
        return "its strategy is not stated"
    return ""


@cache
def peaks() -> tuple[list[Peak], Counter[str]]:
    """Return the peaks of every row that states enough, and the reasons of the others."""
    compared, reasons = list[Peak](), Counter[str]()
    for row in rows("measured_speed"):
        if not row["peak_gib"]:
            continue
        job = measured(row, memory=True)
        reason = why_not(row) or job.why_not
        if reason or job.setup is None:
            reasons[reason] += 1
            continue
        setup = job.setup
        plan = plan_memory(setup.shape, setup.preset, world_size=setup.world_size, job=setup.job)
        engine = "one GPU" if setup.world_size == 1 else "FSDP1" if row["strategy"] == "fsdp" else setup.preset.name
        margin = plan.margin.of(plan.planned_peak_bytes, plan.peak.state_bytes)
        figure = float(row["peak_gib"]) * GIB
        context = driver_bytes(setup.engine)
        kinds = {"reserved": plan.planned_peak_bytes - (context if row["peak_kind"] == "reserved" else 0)}
        measured_bytes = {"reserved": figure}
        if row["peak_kind"] == "allocated":
            kinds = {"allocated": plan.peak.allocated_bytes, "reserved": plan.planned_peak_bytes}
            measured_bytes = {"allocated": figure, "reserved": used_mib(row) * MIB}
            if engine == "FSDP1":  # which reserves more, because of `recordStream`
                del kinds["reserved"]
        about = {"job": job, "engine": engine, "margin": margin}
        compared += [
            Peak(**about, kind=kind, planned=size, measured=measured_bytes[kind]) for kind, size in kinds.items()
        ]
    return compared, reasons


def shown(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    low = sum(error < -0.1 for error in errors)
    tenth = sizes[int(0.9 * (len(sizes) - 1) + 0.5)]
    return f"{len(sizes):4} {statistics.median(sizes):7.1%} {tenth:7.1%} {low:4} more than 10 % too low"


def test_published_peaks_are_planned() -> None:
    compared, reasons = peaks()
    print()
    for peak in compared:
        sizes = f"{peak.planned / GIB:6.1f} {peak.measured / GIB:6.1f} GiB {peak.error:+6.1%}"
        print(f"{peak.job.source:17} {peak.job.name:60} {peak.engine:8} {peak.kind:9} {sizes}")
    print(*(f"{count:4} rows not compared: {reason}" for reason, count in reasons.items()), sep="\n")
    groups: dict[tuple[str, ...], list[float]] = {}
    for peak in compared:
        for key in ((peak.kind, peak.engine), (peak.kind, "seen" if peak.job.source == FITTED else "unseen")):
            groups.setdefault(key, []).append(peak.error)
    print("kind, engine or source: rows, median error, one in ten above")
    for key, errors in groups.items():
        print(f"{' '.join(key):25} {shown(errors)}")
    assert statistics.median(map(abs, groups["allocated", "one GPU"])) < 0.02
    assert statistics.median(map(abs, groups["reserved", "unseen"])) < 0.06
    assert sorted(map(abs, groups["reserved", "unseen"]))[-3] < 0.15


def test_the_margin_of_a_verdict_has_most_published_peaks_inside_for_each_engine() -> None:
    inside: dict[str, list[bool]] = {}
    for peak in peaks()[0]:
        if peak.kind == "reserved" and peak.engine != "FSDP1":  # which flattens adapters and frozen weights into one
            inside.setdefault(peak.engine, []).append(abs(peak.planned - peak.measured) <= peak.margin)
    shares = {engine: sum(each) / len(each) for engine, each in inside.items()}
    print(shares)
    assert min(shares.values()) > 0.8  # on one GPU five rows of QwenLM are outside
    assert (sum(map(sum, inside.values())), sum(map(len, inside.values()))) == (30, 35)

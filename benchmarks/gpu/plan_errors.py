"""Errors of plans against measurements and traces, summed up by half, preset and source of activations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from grid import Case

from toolkit.plan.engine_buffers import driver_bytes
from toolkit.plan.training_setup import engine_settings
from toolkit.presets import load_preset

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
QUANTITIES = ("states", "traced", "allocated", "reserved", "step")


def plan_errors(case: Case) -> dict[str, float]:
    """Return planned over measured, minus one, for each quantity that both have."""
    plan, found = case.get("planned"), case["measured"]
    if not plan or found["status"] != "completed":
        return {}
    pairs = {"states": (sum(plan[name] for name in STATES), sum(found[name] for name in STATES))}
    pairs |= peak_pairs(case)
    if found["compute_step_seconds"] and case["world_size"] == 1 and plan["step_seconds"]:
        pairs["step"] = (statistics.mean(plan["step_seconds"]), found["compute_step_seconds"])
    return {name: planned / measured - 1 for name, (planned, measured) in pairs.items()}


def peak_pairs(case: Case) -> dict[str, tuple[int, int]]:
    """Return the planned and the measured bytes of each peak that was measured: on a GPU, or on fake tensors."""
    plan, found, pairs = case["planned"], case["measured"], {}
    if found["peak_allocated_bytes"]:
        pairs["allocated"] = (max(p["allocated_bytes"] for p in plan["phases"].values()), found["peak_allocated_bytes"])
        pairs["reserved"] = (reserved_bytes(case, plan), found["peak_reserved_bytes"])
    if found["peaks"]:
        planned = max(plan["phases"][phase]["allocated_bytes"] for phase in found["peaks"])
        pairs["traced"] = (planned, max(int(peak["total_bytes"]) for peak in found["peaks"].values()))
    return pairs


def reserved_bytes(case: Case, plan: dict[str, Any]) -> int:
    """Return what torch's allocator is planned to reserve: the peak without CUDA's context and the communicators."""
    engine = engine_settings(load_preset(case["preset"]), world_size=case["world_size"], hidden_size=1)
    return int(plan["planned_peak_bytes"]) - driver_bytes(engine)


def recorded(case: Case) -> dict[str, Any]:
    """Return what a record keeps of a case: the job, the outcome and the errors."""
    plan = case.get("planned") or {}
    found = {"status": case["measured"]["status"], "verdict": plan.get("verdict")}
    job = {name: value for name, value in case.items() if name not in ("planned", "measured")}
    return job | found | {"activations_from": plan.get("activations_from", "none"), "errors": plan_errors(case)}


GROUPS: dict[str, Callable[[Case], str]] = {
    "all": lambda _: "all",
    "preset": lambda case: str(case["preset"]),
    "activations": lambda case: str(case["activations_from"]),
}


def summary(rows: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the errors of each half: of all cases, and by preset and source of activations."""
    found = []
    for group, name_of in GROUPS.items():
        for split in ("calibration", "test"):
            half = [row for row in rows if row["split"] == split]
            for name in sorted({name_of(row) for row in half}):
                cases = [row for row in half if name_of(row) == name]
                for what in QUANTITIES if group == "all" else ("traced", "allocated"):
                    signed = [(case["errors"][what], case["id"]) for case in cases if what in case["errors"]]
                    if signed:
                        keys = {"split": split, "group": group, "name": name, "what": what}
                        found.append(keys | _summarize(signed))
    return found


def _summarize(signed: Sequence[tuple[float, str]]) -> dict[str, Any]:
    values = sorted(abs(value) for value, _ in signed)
    worst, worst_case = max(signed, key=lambda pair: abs(pair[0]))
    return {
        "cases": len(values),
        "mean": statistics.mean(values),
        "p95": values[min(len(values) - 1, round(0.95 * len(values)))],
        "worst": worst,
        "worst_case": worst_case,
        "under": sum(value < 0 for value, _ in signed) / len(values),
    }


HEADER = ("half", "cases of", "cases", "mean error", "p95", "planned less", "worst")
SHOWN = {"calibration": ("all",), "test": ("all", "preset", "activations")}


def table_rows(_: dict[str, Any], rows: Sequence[Case]) -> list[tuple[str, ...]]:
    """Return errors of traced peaks as rows of a table."""
    table: list[tuple[str, ...]] = []
    for row in summary(rows):
        if row["what"] == "traced" and row["group"] in SHOWN[row["split"]]:
            name = "all" if row["group"] == "all" else f"`{row['name']}`"
            under = f"{row['under']:.0%}".replace("%", " %")
            mean, p95, worst = (f"{100 * row[key]:.2f} %" for key in ("mean", "p95", "worst"))
            table.append((row["split"], name, str(row["cases"]), mean, p95, under, worst))
    return table

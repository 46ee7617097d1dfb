"""Errors of plans against measurements and traces, summed up by half, preset and method; and wrong verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from grid import Case

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
QUANTITIES = ("states", "traced", "allocated", "reserved", "step")
# Goals on the test half: mean and 95th percentile of the absolute error.
GOALS = {"allocated": (0.02, 0.05), "traced": (0.02, 0.05), "reserved": (0.05, 0.10), "step": (0.08, None)}
# GPUs whose verdicts are checked, from the smallest in the table to the one of the grid.
GPUS = ("t4", "rtx-4090", "a100-40gb", "l40s", "h100")


def plan_errors(case: Case) -> dict[str, float]:
    """Return planned over measured, minus one, for each quantity that both have."""
    plan, found = case.get("planned"), case["measured"]
    if not plan or found["status"] != "completed":
        return {}
    pairs = {"states": (sum(plan[name] for name in STATES), sum(found[name] for name in STATES))}
    if found["peak_allocated_bytes"]:
        pairs["allocated"] = (max(p["allocated_bytes"] for p in plan["phases"].values()), found["peak_allocated_bytes"])
        pairs["reserved"] = (plan["planned_peak_bytes"], found["peak_reserved_bytes"])
    if found["peaks"]:
        pairs["traced"] = (max(plan["phases"][phase]["allocated_bytes"] for phase in found["peaks"]), traced_peak(case))
    if found["compute_step_seconds"] and case["world_size"] == 1 and plan["step_seconds"]:
        pairs["step"] = (statistics.mean(plan["step_seconds"]), found["compute_step_seconds"])
    return {name: planned / measured - 1 for name, (planned, measured) in pairs.items()}


def traced_peak(case: Case) -> int:
    """Return the highest peak on fake tensors."""
    return max(int(peak["total_bytes"]) for peak in case["measured"]["peaks"].values())


def summary(cases: list[Case]) -> list[dict[str, Any]]:
    """Return the errors of each half: of all cases, and by preset, method, checkpointing, source and architecture."""
    rows = []
    for group, name_of in GROUPS.items():
        for split in ("calibration", "test"):
            half = [case for case in cases if case["split"] == split]
            for name in sorted({name_of(case) for case in half}):
                rows += _summarize([case for case in half if name_of(case) == name], split, group, name)
    return rows


GROUPS: dict[str, Callable[[Case], str]] = {
    "all": lambda _: "all",
    "preset": lambda case: str(case["preset"]),
    "method": lambda case: str(case["method"]),
    "checkpointing": lambda case: "recomputed" if case["activation_checkpointing"] else "kept",
    "activations": lambda case: str((case.get("planned") or {}).get("activations_from", "none")),
    "architecture": lambda case: str(case["architecture"]),
}


def _summarize(cases: list[Case], split: str, group: str, name: str) -> list[dict[str, Any]]:
    found = [(case["id"], plan_errors(case)) for case in cases]
    rows = []
    for what in QUANTITIES:
        signed = [(error[what], number) for number, error in found if what in error]
        values = sorted(abs(value) for value, _ in signed)
        if values and (group == "all" or what in ("traced", "allocated")):
            worst = max(signed, key=lambda pair: abs(pair[0]))
            rows.append(
                {
                    **{"split": split, "group": group, "name": name, "what": what, "cases": len(values)},
                    **{"mean": statistics.mean(values), "p95": values[min(len(values) - 1, round(0.95 * len(values)))]},
                    "under": sum(value < 0 for value, _ in signed) / len(values),
                    **{"worst": worst[0], "worst_case": worst[1], "goal": GOALS.get(what)},
                }
            )
    return rows


TABLE_HEADER = ("half", "cases of", "cases", "mean error", "p95", "planned less", "worst")
TABLE_HEADER += ("before: mean", "before: p95", "before: worst")


def traced_rows(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the summary of traced peaks as rows of a table, next to that of an earlier planner."""
    earlier = {(row["split"], row["group"], row["name"]): row for row in before if row["what"] == "traced"}
    table = []
    for row in rows:
        if row["what"] != "traced":
            continue
        old = earlier.get((row["split"], row["group"], row["name"]))
        then = tuple(_percent(old[name]) for name in ("mean", "p95", "worst")) if old else ("n/a",) * 3
        name = {"all": "all"}.get(row["group"], f"`{row['name']}`")
        now = (
            _percent(row["mean"]),
            _percent(row["p95"]),
            f"{row['under']:.0%}".replace("%", " %"),
            _percent(row["worst"]),
        )
        table.append((row["split"], name, str(row["cases"]), *now, *then))
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def out_of_memory_among_fits(cases: list[Case]) -> list[str]:
    """Return the cases with the verdict `fits` that ran out of memory; the goal is none."""
    fits = [case for case in cases if (case.get("planned") or {}).get("verdict") == "fits"]
    return [case["id"] for case in fits if case["measured"]["status"] == "out_of_memory"]


def verdicts_against_traces(cases: list[Case]) -> dict[str, Any]:
    """Count verdicts on several GPUs by whether the traced peak and the planned overhead fit; list the wrong ones."""
    from toolkit.hardware.gpu_table import find_gpu
    from toolkit.plan.memory_verdict import UNCERTAINTY, UNCERTAINTY_UNKNOWN, fit_verdict

    counts: dict[str, int] = {}
    wrong = []
    for case in cases:
        plan = case.get("planned")
        if not plan or case["measured"]["status"] != "completed" or not case["measured"]["peaks"]:
            continue
        peak = plan["phases"][plan["peak_phase"]]
        known = plan.get("activations_from") != "llama"
        for gpu in GPUS:
            memory = find_gpu(gpu).memory_bytes
            word = fit_verdict(
                planned_peak_bytes=plan["planned_peak_bytes"],
                exact_bytes=sum(peak[name] for name in STATES),
                memory_bytes=memory,
                uncertainty=UNCERTAINTY if known else UNCERTAINTY_UNKNOWN,
            )
            fits = traced_peak(case) + plan["overhead_bytes"] <= memory
            key = f"{word}, {'would fit' if fits else 'would not fit'}"
            counts[key] = counts.get(key, 0) + 1
            if (word, fits) in (("fits", False), ("does_not_fit", True)):
                wrong.append(f"{case['id']} on {gpu}: {key}")
    return {"cards": list(GPUS), "said": counts, "wrong": wrong}

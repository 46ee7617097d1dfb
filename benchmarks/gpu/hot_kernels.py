"""The most expensive kernels of a profiled step, and the gaps between kernels, from the Chrome trace of a run.

A gap belongs to the kernel before it, whose end the next one did not follow at once: the GPU waited for Python, for a
launch, or for data. On a CPU torch's operators stand for kernels.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from toolkit.observe.profiler import GPU_CATEGORIES, STEP_EVENT_PREFIX

SHOWN, GAPS_SHOWN, NAME_CHARACTERS = 20, 10, 90
Row = dict[str, Any]


def hot_kernels(trace: Path) -> Row:
    """Return seconds of the profiled steps, of the GPU's work and gaps in them, and the largest of both by name."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    on_host = [event for event in complete if event.get("cat") == "user_annotation"]  # the GPU's are beside them
    steps = sorted({(e["ts"], e["ts"] + e["dur"]) for e in on_host if e["name"].startswith(STEP_EVENT_PREFIX)})
    kernels = [event for event in complete if event.get("cat") in GPU_CATEGORIES]
    if not kernels:
        kernels = [e for e in complete if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
        kernels = [e for e in kernels if e["tid"] == kernels[0]["tid"]]
    if not kernels or not steps:
        return {"step_seconds": None, "busy_seconds": None, "gap_seconds": None, "kernels": [], "gaps": []}
    kernels.sort(key=lambda event: event["ts"])
    by_kernel, by_gap = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    end, last, busy, gaps = kernels[0]["ts"], "", 0.0, 0.0
    for event in kernels:
        name, start, stop = event["name"][:NAME_CHARACTERS], event["ts"], event["ts"] + event["dur"]
        by_kernel[name].append(event["dur"] / 1e6)
        if last and start > end:
            by_gap[last].append((start - end) / 1e6)
            gaps += (start - end) / 1e6
        busy += max(0.0, stop - max(end, start)) / 1e6  # kernels of several streams overlap
        if stop > end:
            end, last = stop, name
    return {
        "step_seconds": sum(stop - start for start, stop in steps) / 1e6,
        "busy_seconds": busy,
        "gap_seconds": gaps,
        "kernels": _largest(by_kernel, SHOWN),
        "gaps": _largest(by_gap, GAPS_SHOWN),
    }


def _largest(groups: dict[str, list[float]], count: int) -> list[Row]:
    rows = [{"name": name, "seconds": sum(each), "count": len(each)} for name, each in groups.items()]
    return sorted(rows, key=lambda row: -row["seconds"])[:count]


def table_lines(found: Row) -> list[str]:
    """Return both tables as lines: milliseconds, share of the work or of the gaps, count, name."""
    lines = []
    for what, whole in (("kernels", found["busy_seconds"]), ("gaps", found["gap_seconds"])):
        lines.append(f"{what}: {1000 * (whole or 0):.1f} ms of {1000 * (found['step_seconds'] or 0):.1f} ms")
        for row in found[what]:
            share = row["seconds"] / whole if whole else 0
            name = f"after {row['name']}" if what == "gaps" else row["name"]
            lines.append(f"  {1000 * row['seconds']:9.2f} ms {share:6.1%} {row['count']:6d} x  {name}")
    return lines

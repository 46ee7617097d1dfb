"""What a rehearsal found, for people: bytes by part, and what it cannot tell.

>>> part_rows({"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8})
[('parameter', 4), ('gradient', 4), ('optimizer', 8), ('together', 16)]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.units import MIB, gib, seconds

PARTS = ("parameter", "gradient", "optimizer")


def part_rows(facts: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Each part of the model states, and all of them."""
    rows = [(part, int(facts[f"{part}_bytes"])) for part in PARTS]
    return [*rows, ("together", sum(held for _, held in rows))]


def result_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """A finished rehearsal as `toolkit rehearse --json` gives it."""
    names = ("preset", "training_arguments", "versions", "hardware", "git_commit", "measurement_version")
    return {**run["rehearsal"], "device": run["spec"]["device"], **{name: run[name] for name in names}}


def result_lines(run: Mapping[str, Any]) -> list[str]:
    """A finished rehearsal's run.json in lines."""
    facts = run["rehearsal"]
    spec, device = run["spec"], run["spec"]["device"]
    weights = "random weights" if facts["random_weights"] else "the model's weights"
    batch = f"{spec['per_device_train_batch_size']} rows of up to {spec['data']['max_seq_length']:,} tokens"
    lines = [
        f"rank {facts['rank']} of {facts['world_size']} under {run['preset']}, on this machine's {device}:"
        f" {facts['num_trainable_params']:,} of {facts['num_params']:,} parameters trained, {weights}, {batch}",
        "model states that this rank holds, read back from the live objects in the first step:",
        *(f"  {part:<10} {held:>18,} bytes  {gib(held):>10}" for part, held in part_rows(facts)),
    ]
    if facts["fake_tensors"]:
        return [*lines, *_traced_lines(facts)]
    return [*lines, *(_gpu_lines(facts) if device == "cuda" else _cpu_lines(facts))]


def _traced_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = ["highest moment of each phase on fake tensors:"]
    for phase, peak in facts["peaks"].items():
        parts = ", ".join(f"{part} {gib(size)}" for part, size in peak["parts"].items() if size >= MIB)
        lines.append(f"  {phase:<10} {gib(peak['total_bytes']):>10}: {parts}")
    return [*lines, _not_told(facts)]


def _gpu_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"peak of {facts['steps']} steps by the allocator:"]
    for phase, peaks in facts["phase_peaks"].items():
        allocated, reserved = peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]
        lines.append(f"  {phase:<10} {gib(allocated):>10} allocated, {gib(reserved):>10} reserved")
    step = seconds(facts["compute_step_seconds"])
    return [*lines, f"a step's compute alone: {step}", _not_told(facts)]


def _cpu_lines(facts: Mapping[str, Any]) -> list[str]:
    host = f"host memory of this process at most: {gib(facts['peak_host_bytes'])} (fp32 on a CPU, libraries included)"
    return [host, _not_told(facts)]


def _not_told(facts: Mapping[str, Any]) -> str:
    return f"not told by a rehearsal: {'; '.join(facts['not_told'])}"

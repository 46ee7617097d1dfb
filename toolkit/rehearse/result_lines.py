"""The results of a rehearsal as JSON and as lines: bytes by part, and what is not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.units import MIB, gib, seconds

PARTS = ("parameter", "gradient", "optimizer")


def part_rows(facts: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the bytes of each part of the model states, and of all of them.

    >>> part_rows({"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8})
    [('parameter', 4), ('gradient', 4), ('optimizer', 8), ('total', 16)]
    """
    rows = [(part, int(facts[f"{part}_bytes"])) for part in PARTS]
    return [*rows, ("total", sum(size for _, size in rows))]


def result_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `toolkit rehearse --json` prints, from a finished rehearsal's run.json."""
    names = ("preset", "training_arguments", "versions", "hardware", "git_commit", "measurement_version")
    return {**run["rehearsal"], "device": run["spec"]["device"], **{name: run[name] for name in names}}


def result_lines(run: Mapping[str, Any]) -> list[str]:
    """Return what `toolkit rehearse` prints, from a finished rehearsal's run.json."""
    facts = run["rehearsal"]
    spec, device = run["spec"], run["spec"]["device"]
    weights = "random weights" if facts["random_weights"] else "the model's weights"
    batch = f"{spec['per_device_train_batch_size']} rows of up to {spec['data']['max_seq_length']:,} tokens"
    lines = [
        f"rank {facts['rank']} of {facts['world_size']} under {run['preset']}, on this node's {device}:"
        f" {facts['num_trainable_params']:,} of {facts['num_params']:,} parameters trained, {weights}, {batch}",
        "model states of this rank, read back from the live objects in the first step:",
        *(f"  {part:<10} {size:>18,} bytes  {gib(size):>10}" for part, size in part_rows(facts)),
    ]
    if facts["fake_tensors"]:
        return [*lines, *_traced_lines(facts)]
    return [*lines, *(_gpu_lines(facts) if device == "cuda" else _cpu_lines(facts))]


def _traced_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = ["peak of each phase on fake tensors:"]
    for phase, peak in facts["peaks"].items():
        parts = ", ".join(f"{part} {gib(size)}" for part, size in peak["parts"].items() if size >= MIB)
        lines.append(f"  {phase:<10} {gib(peak['total_bytes']):>10}: {parts}")
    return [*lines, _not_measured(facts)]


def _gpu_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = [f"peak of {facts['steps']} steps by the allocator:"]
    for phase, peaks in facts["phase_peaks"].items():
        allocated, reserved = peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"]
        lines.append(f"  {phase:<10} {gib(allocated):>10} allocated, {gib(reserved):>10} reserved")
    step = seconds(facts["compute_step_seconds"])
    return [*lines, f"compute of a step, without communication: {step}", _not_measured(facts)]


def _cpu_lines(facts: Mapping[str, Any]) -> list[str]:
    host = f"peak host memory of this process: {gib(facts['peak_host_bytes'])} (fp32 on a CPU, libraries included)"
    return [host, _not_measured(facts)]


def _not_measured(facts: Mapping[str, Any]) -> str:
    return f"not measured by a rehearsal: {'; '.join(facts['not_measured'])}"

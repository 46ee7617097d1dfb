"""Say in one sentence what a comparison showed, and in notes what it did not.

>>> summary_sentence(results)                            # doctest: +SKIP
'On 2 CPU processes, 6 presets ran at 290 (zero3) to 410 tokens/s (ddp) in single runs, unranked; ...'
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.compare.report import facts
from toolkit.compare.report.cells import percent, speed
from toolkit.compare.results import Results, Row

Named = tuple[str, Row]
"""A row with the label that the report gives it."""

CPU_SPEEDS = "speeds on CPU (gloo) say nothing about GPUs"


def summary_sentence(results: Results) -> str:
    """How fast the rows ran, what holds least, what did not finish; an order only where there is one to claim."""
    results = facts.honest(results)
    named = list(zip(facts.labels(results), results["rows"], strict=True))
    if not named:
        return "Nothing was compared: there are no rows."
    clauses = [clause for size in _world_sizes(results) for clause in _size_clauses(results, named, size)]
    clauses += _left_out(named)
    if facts.on_cpu(results):
        clauses.append(CPU_SPEEDS)
    return "; ".join(clauses) + "."


def title(results: Results) -> str:
    """What was compared, and on what."""
    sizes = _world_sizes(results)
    places = _and([machine(results, size) for size in sizes]) if sizes else results["environment"]["device"]
    return f"Comparison: {_presets(len({row['preset'] for row in results['rows']}))} on {places}"


def notes(results: Results) -> list[str]:
    """What a reader must know before quoting a figure."""
    said = ["Bytes are of one rank, the largest; tokens/s is of all ranks together, over the timed steps only."]
    if single_runs(results):
        said.insert(0, "Single runs, not ranked by significance: a small difference may be noise.")
    if facts.on_cpu(results):
        said.append(f"{CPU_SPEEDS[0].upper()}{CPU_SPEEDS[1:]}; bytes held by a rank do carry over.")
        said.append("A CPU has no allocator peak: peak memory is resident host memory (RSS), libraries included.")
    if any(facts.differs(row) for row in results["rows"]):
        said.append("Parity failed: the row did not train the reference's problem, so its speed is not compared.")
    if any(facts.finished(row) and row["parity"] is None for row in results["rows"]):
        said.append("A row whose parity is n/a could not be checked against the reference, and is not compared.")
    return said


def single_runs(results: Results) -> bool:
    """Whether no preset ran twice with the same number of processes."""
    trials = [(row["preset"], row["world_size"]) for row in results["rows"]]
    return len(trials) == len(set(trials))


def machine(results: Results, world_size: int) -> str:
    """What the processes ran on: `2 CPU processes`, `2 × NVIDIA H100`."""
    if facts.on_cpu(results):
        return f"{world_size} CPU {'process' if world_size == 1 else 'processes'}"
    names = {gpu["name"] for gpu in results["environment"]["gpus"]}
    return f"{world_size} × {names.pop() if len(names) == 1 else 'GPU'}"


def _world_sizes(results: Results) -> list[int]:
    return sorted({row["world_size"] for row in results["rows"]})


def _size_clauses(results: Results, named: Sequence[Named], world_size: int) -> list[str]:
    """Fastest and smallest among the rows with one number of processes."""
    here = [(label, row) for label, row in named if row["world_size"] == world_size]
    fit = [(label, row) for label, row in here if facts.comparable(row) and row["tokens_per_second"] is not None]
    start = "On" if world_size == min(row["world_size"] for _, row in named) else "on"
    return [
        f"{start} {machine(results, world_size)}, " + _fastest(results, fit, len(here)),
        *_smallest(results, fit, world_size),
    ]


def _fastest(results: Results, fit: Sequence[Named], num_rows: int) -> str:
    if not fit:
        return f"none of {_presets(num_rows)} can be ranked"
    top = max(row["tokens_per_second"] or 0.0 for _, row in fit)
    first = [label for label, row in fit if speed(row["tokens_per_second"]) == speed(top)]
    among = (
        _presets(num_rows) if len(fit) == num_rows else f"the {len(fit)} of {_presets(num_rows)} that can be compared"
    )
    if len(fit) == 1:
        return f"{first[0]} ran at {speed(top)} tokens/s, with no comparable row beside it"
    if len(first) > 1:
        return f"{_and(first)} ran at the same highest speed of {among} ({speed(top)} tokens/s)"
    if single_runs(results):
        slowest, least = min(((label, row["tokens_per_second"] or 0.0) for label, row in fit), key=lambda pair: pair[1])
        return (
            f"{among} ran at {speed(least)} ({slowest}) to {speed(top)} tokens/s ({first[0]}) in single runs, unranked"
        )
    return f"{first[0]} trained fastest of {among} ({speed(top)} tokens/s)"


def _smallest(results: Results, fit: Sequence[Named], world_size: int) -> list[str]:
    """The row with the fewest model-state bytes beside the reference; the fastest of equals."""
    reference = facts.reference_row(results, world_size)
    whole = facts.model_state_bytes(reference) if reference else None
    held = [
        (held_bytes, -(row["tokens_per_second"] or 0.0), label, row)
        for label, row in fit
        if (held_bytes := facts.model_state_bytes(row)) is not None and row is not reference
    ]
    if not whole or not held:
        return []
    least, _, label, row = min(held, key=lambda entry: entry[:2])
    if least >= whole:
        return [f"none holds fewer model-state bytes a rank than {results['reference']}"]
    ratio = row["ratio_to_reference"]
    pace = "" if ratio is None else f" at {ratio:.2f} x its speed"
    return [f"{label} holds {percent(least / whole)} of {results['reference']}'s model-state bytes a rank{pace}"]


def _left_out(named: Sequence[Named]) -> list[str]:
    """The rows that take no part in the order, each with its reason."""
    failed = [f"{label}: {row['status']}" for label, row in named if not facts.finished(row)]
    other = [label for label, row in named if facts.differs(row)]
    unknown = [label for label, row in named if facts.finished(row) and row["parity"] is None]
    clauses = []
    if failed:
        clauses.append(f"{len(failed)} did not finish ({', '.join(failed)})")
    if other:
        clauses.append(f"{len(other)} did not train the same problem ({', '.join(other)})")
    if unknown:
        clauses.append(f"{len(unknown)} could not be checked against the reference ({', '.join(unknown)})")
    return clauses


def _presets(count: int) -> str:
    return f"{count} {'preset' if count == 1 else 'presets'}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

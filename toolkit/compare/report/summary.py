"""Say in one sentence what a comparison showed, and in notes what it did not.

>>> summary_sentence(results)                            # doctest: +SKIP
'On 2 CPU processes, 6 presets ran at 290 (zero3) to 410 tokens/s (ddp) in single runs, unranked; ...'
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.compare.report import facts
from toolkit.compare.report.cells import percent, speed
from toolkit.compare.results import NOT_SUPPORTED, Results, Row

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
    clauses += [*_scaling(results), *_largest_batches(named), *_left_out(named)]
    if facts.on_cpu(results):
        clauses.append(CPU_SPEEDS)
    return "; ".join(clauses) + "."


def title(results: Results) -> str:
    """What was compared, and on what."""
    sizes = _world_sizes(results)
    last = machine(results, sizes[-1]) if sizes else results["environment"]["device"]
    places = _and([*map(str, sizes[:-1]), last])
    return f"Comparison: {_presets(len({row['preset'] for row in results['rows']}))} on {places}"


def notes(results: Results) -> list[str]:
    """What a reader must know before quoting a figure."""
    said = ["Bytes are of one rank, the largest; tokens/s is of all ranks together, over the timed steps only."]
    if single_runs(results):
        said.insert(0, "Single runs, not ranked by significance: a small difference may be noise.")
    else:
        method = results["method"]
        sure = f"a difference is claimed only where the ratio's ({100 * method['ratio_confidence']:.4g} %) leaves 1 out"
        said.insert(0, f"Intervals: {method['interval']}; {sure}.")
    if facts.on_cpu(results):
        said.append(f"{CPU_SPEEDS[0].upper()}{CPU_SPEEDS[1:]}; bytes held by a rank do carry over.")
        said.append("A CPU has no allocator peak: peak memory is resident host memory (RSS), libraries included.")
    if any(facts.differs(row) for row in results["rows"]):
        said.append("Parity failed: the row did not train the reference's problem, so its speed is not compared.")
    said += [*_efficiency_notes(results), *_throttling(results)]
    if any(facts.finished(row) and row["parity"] is None and row["group"] is None for row in results["rows"]):
        said.append("A row whose parity is n/a could not be checked against the reference, and is not compared.")
    return said


def _efficiency_notes(results: Results) -> list[str]:
    said = []
    if any(row["mfu"] is not None for row in results["rows"]):
        dtype = results["job"]["compute_dtype"]
        said.append(
            f"MFU: all parameters and causal attention, padding included, of the GPU's dense {dtype} peak; HFU: with"
            " what is computed again."
        )
    if results["price_per_gpu_hour"] is not None:
        said.append(f"Cost: of a million non-padding tokens, at {results['price_per_gpu_hour']:g} a GPU-hour.")
    return said


def _throttling(results: Results) -> list[str]:
    rows = zip(facts.labels(results), results["rows"], strict=True)
    held = [f"{label} ({', '.join(row['throttle_reasons'])})" for label, row in rows if row["throttle_reasons"]]
    return [f"GPU clocks were held down during timed steps: {', '.join(held)}."] if held else []


def single_runs(results: Results) -> bool:
    """Whether no row was repeated, so that none has an interval."""
    return not any(facts.repeated(row) for row in results["rows"])


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
    here = [(_without_size(label, row), row) for label, row in named if row["world_size"] == world_size]
    fit = [(label, row) for label, row in here if facts.comparable(row) and row["tokens_per_second"] is not None]
    fit = [(label, row) for label, row in fit if row["group"] is None]
    start = "On" if world_size == min(row["world_size"] for _, row in named) else "on"
    place = f"{start} {machine(results, world_size)}, "
    repeated = [(label, row) for label, row in fit if facts.repeated(row)]
    if len(repeated) > 1 and len(repeated) == len(fit):
        fits = any(facts.out_of_memory(row) for _, row in here)
        return [place + _leader(fit, len(here), fits=fits), *_trade(results, fit, world_size)]
    return [place + _fastest(fit, len(here)), *_smallest(results, fit, world_size)]


def _without_size(label: str, row: Row) -> str:
    """The clause says the number of processes."""
    return row["preset"] if label == f"{row['preset']} n{row['world_size']}" else label


def _leader(fit: Sequence[Named], num_rows: int, *, fits: bool) -> str:
    """The fastest, if intervals separate it from every other; else those between which no difference was seen."""
    label, top = _top(fit)
    close = [name for name, row in fit if row is not top and top["rank"] is None and not facts.separated(row, top)]
    among = _presets(num_rows) if len(fit) == num_rows else f"the {len(fit)} of {num_rows} that can be compared"
    if close:
        return f"no difference in speed is seen between {_and([label, *close])}, the fastest of {among}"
    which = "that fits" if fits else f"of {among}"
    return f"{label} is the fastest {which} ({speed(top['tokens_per_second'])} tokens/s)"


def _trade(results: Results, fit: Sequence[Named], world_size: int) -> list[str]:
    """The row that needs least memory beside the fastest, or beside the reference where none is."""
    name, base = _top(fit)
    if any(row is not base and not facts.separated(row, base) for _, row in fit):
        reference = facts.reference_row(results, world_size)
        name, base = next(((label, row) for label, row in fit if row is reference), (name, base))
    whole = _memory(results, base)
    held = [(size, label, row) for label, row in fit if (size := _memory(results, row)) is not None and row is not base]
    if not whole or not held:
        return []
    least, label, row = min(held, key=lambda entry: entry[0])
    less = percent(1 - least / whole)
    if least >= whole or less == percent(0):
        return [f"none {'holds fewer model-state bytes' if facts.on_cpu(results) else 'uses less memory'} than {name}"]
    what = f"holds {less} fewer model-state bytes" if facts.on_cpu(results) else f"uses {less} less memory"
    return [f"{label} {what} {_price(row, base)}" + ("" if base is _top(fit)[1] else f" than {name}")]


def _price(row: Row, base: Row) -> str:
    """What it costs in speed; nothing is claimed where intervals overlap."""
    if not facts.separated(row, base):
        return "with no difference seen in speed"
    ratio = (row["tokens_per_second"] or 0.0) / (base["tokens_per_second"] or 1.0)
    return f"for {percent(1 - ratio)} less speed" if ratio < 1 else f"and is {percent(ratio - 1)} faster"


def _memory(results: Results, row: Row) -> int | None:
    return facts.model_state_bytes(row) if facts.on_cpu(results) else facts.peak_bytes(results, row)


def _top(fit: Sequence[Named]) -> Named:
    return max(fit, key=lambda named: named[1]["tokens_per_second"] or 0.0)


def _scaling(results: Results) -> list[str]:
    """How the reference scales from the fewest to the most processes."""
    rows = [row for row in results["rows"] if row["preset"] == results["reference"] and row["scaling_efficiency"]]
    if len(rows) < 2:
        return []
    first, last = min(rows, key=lambda row: row["world_size"]), max(rows, key=lambda row: row["world_size"])
    return [
        f"from {first['world_size']} to {last['world_size']} processes {results['reference']} becomes"
        f" {last['speed_up'] or 0.0:.2f} times as fast ({percent(last['scaling_efficiency'])} of ideal)"
    ]


def _largest_batches(named: Sequence[Named]) -> list[str]:
    """Where each row's largest micro-batch was searched, what was found."""
    ran = [
        f"{row['per_device_train_batch_size']} ({label})"
        for label, row in named
        if any(probe["status"] == "completed" for probe in row["probes"] or ())
    ]
    return [f"the largest micro-batch that runs is {', '.join(ran)}"] if ran else []


def _fastest(fit: Sequence[Named], num_rows: int) -> str:
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
    slowest, least = min(((label, row["tokens_per_second"] or 0.0) for label, row in fit), key=lambda pair: pair[1])
    return f"{among} ran at {speed(least)} ({slowest}) to {speed(top)} tokens/s ({first[0]}) in single runs, unranked"


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
    absent = [label for label, row in named if row["status"] == NOT_SUPPORTED]
    failed = [f"{label}: {row['status']}" for label, row in named if not facts.finished(row) and label not in absent]
    other = [label for label, row in named if facts.differs(row)]
    unknown = [label for label, row in named if facts.finished(row) and row["parity"] is None and not row["group"]]
    grouped = [f"{label} ({row['group']})" for label, row in named if facts.finished(row) and row["group"]]
    clauses = []
    if failed:
        clauses.append(f"{len(failed)} did not finish ({', '.join(failed)})")
    if absent:
        clauses.append(f"{len(absent)} cannot run here ({', '.join(absent)})")
    if other:
        clauses.append(f"{len(other)} did not train the same problem ({', '.join(other)})")
    if grouped:
        clauses.append(f"different by design, so not ranked here: {', '.join(grouped)}")
    if unknown:
        clauses.append(f"{len(unknown)} could not be checked against the reference ({', '.join(unknown)})")
    return clauses


def _presets(count: int) -> str:
    return f"{count} {'preset' if count == 1 else 'presets'}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

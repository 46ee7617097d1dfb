"""Parity of each row, and what sets a row apart from the reference by design.

    judged(row, trials_by_row, comparison)["parity"]        # 'agrees'

A row is what all its repeats are: one that trained another problem is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.compare import parity
from toolkit.compare.trials import Comparison, row_name
from toolkit.runs import status

Row = dict[str, Any]
# What a row that differs by design may have otherwise than the reference.
FREE_BY_DESIGN = ("master_dtype", "optimizer_dtype", "global_batch_size", "learning_rate")


def group_of(comparison: Comparison, preset: str, num_processes: int, trials: Sequence[Row]) -> str | None:
    """What sets a row apart from the reference by design; None where nothing does."""
    own, other = (comparison.arguments(name, num_processes) for name in (preset, comparison.reference))
    labels = []
    if own.get("ddp_comm_hook") != other.get("ddp_comm_hook"):
        labels.append(f"ddp_comm_hook {own.get('ddp_comm_hook', 'none')}")
    promises = comparison.promises
    if promises[preset]["quantises"] != promises[comparison.reference]["quantises"]:
        labels.append("quantised communication")
    masters = {trial["problem"]["promised_masters"] for trial in trials} - {None, parity.CONTRACT_DTYPE}
    if masters:
        labels.append(f"{masters.pop()} masters")
    batch = "per_device_train_batch_size"
    if str(own.get(batch)) != str(other.get(batch)):
        labels.append(f"{batch} {own.get(batch)}")
    return ", ".join(labels) or None


def judged(row: Row, by_row: Mapping[str, Sequence[Row]], comparison: Comparison) -> Row:
    """`parity` and `parity_message` of a row."""
    unknown: Row = {"parity": None, "parity_message": None}
    if row["status"] != status.COMPLETED:
        return unknown
    references = _completed(by_row.get(row_name(comparison.reference, row["world_size"]), []))
    if not references:
        return unknown
    own = by_row[row["trial"]]
    by_design = row["group"] is not None
    message = _problem(own, references, by_row, comparison, by_design=by_design)
    if message is not None:
        return {"parity": "parity failed", "parity_message": message}
    if row["preset"] == comparison.reference:
        return {"parity": "reference", "parity_message": None}
    if by_design:
        return {"parity": None, "parity_message": f"differs by design: {row['group']}; its losses are not judged"}
    return {"parity": "agrees", "parity_message": None}


def _problem(
    trials: Sequence[Row],
    references: Sequence[Row],
    by_row: Mapping[str, Sequence[Row]],
    comparison: Comparison,
    *,
    by_design: bool,
) -> str | None:
    """The first thing that is not the reference's, with both values; None where nothing is."""
    fewest = _completed(by_row.get(row_name(comparison.reference, min(comparison.num_processes)), []))
    for trial in trials:
        found = (
            parity.promise_broken(trial, comparison.promised(trial["preset"], trial["world_size"]))
            or _other_facts(trial, references[0], fewest[:1], comparison, by_design=by_design)
            or _other_training(trial, references, comparison, by_design=by_design)
        )
        if found is not None:
            return found if len(trials) == 1 else f"repeat {trial['repeat']}: {found}"
    return parity.untimed_step_in_timing(trials)


def _other_facts(
    trial: Row, reference: Row, fewest: Sequence[Row], comparison: Comparison, *, by_design: bool
) -> str | None:
    """A fact unlike that of the reference beside it, or of the reference with the fewest processes."""
    free = FREE_BY_DESIGN if by_design else ()
    batch = ("global_batch_size",) if comparison.scaling == "strong" else ()
    here = [name for name in (*parity.EVERYWHERE, *parity.HERE) if name not in free]
    everywhere = [name for name in (*parity.EVERYWHERE, *batch) if name not in free]
    found = parity.unlike(trial, reference, names=here)
    return found or next((said for other in fewest if (said := parity.unlike(trial, other, names=everywhere))), None)


def _other_training(trial: Row, references: Sequence[Row], comparison: Comparison, *, by_design: bool) -> str | None:
    """Batches unlike the reference's, which only a batch of its own explains; other steps timed than was asked;
    losses outside its band."""
    batch = "per_device_train_batch_size"
    own, other = (comparison.arguments(row["preset"], row["world_size"]) for row in (trial, references[0]))
    found = None
    if str(own.get(batch)) == str(other.get(batch)):
        found = parity.other_batches(trial, references[0]) or parity.other_counts(trial, references[0])
    found = found or parity.other_timing(trial, untimed_steps=comparison.untimed_steps)
    return found or (None if by_design else parity.outside_band(trial, references))


def _completed(trials: Sequence[Row]) -> list[Row]:
    return [trial for trial in trials if trial["status"] == status.COMPLETED]

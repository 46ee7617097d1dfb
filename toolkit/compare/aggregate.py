"""Make rows of trials: figures over repeats, parity, ratios and ranks.

Each trial is checked against the baseline's, and the trials of a row are combined. Every speed of a row counts the same
steps: those that all trials with its number of processes have timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.compare.ledger import LedgerRecord, TrialRecord
from toolkit.compare.parity import check_parity, design_group
from toolkit.compare.rows import NOT_SUPPORTED, Failure, Row, RowKey, RunRecord
from toolkit.compare.significance import common_steps, compare_with_baseline, mean_interval, rank_of, speeds_of
from toolkit.compare.specification import ComparisonSpec
from toolkit.record.columns import Repeats, column_of
from toolkit.record.measurements import MemoryByPhase, max_memory_by_phase, percentile

_Rule = Callable[[list[Any]], Any]
# What a row takes from one of its repeats: every key that both have.
FROM_TRIAL = tuple(key for key in Row.model_fields if key in RunRecord.model_fields)


def aggregate_trials(
    records: Mapping[str, LedgerRecord], spec: ComparisonSpec, unsupported: Mapping[str, str]
) -> tuple[list[Row], list[RunRecord]]:
    """Return rows in the order of the options, and trials in running order. `unsupported`: row name to reason."""
    by_row: dict[RowKey, list[TrialRecord]] = {row: [] for row in spec.rows()}
    trials = []
    for trial in spec.trials():
        if isinstance(record := records.get(trial.id), TrialRecord):
            by_row[trial.row].append(record)
            trials.append(record)
    common = {size: common_steps([trial for trial in trials if trial.world_size == size]) for size in spec.world_sizes}
    rows = []
    for key, repeats in by_row.items():
        group = design_group(spec, key, repeats)
        if key.name in unsupported:
            rows.append(
                Row(
                    trial=key.name,
                    preset=key.preset,
                    world_size=key.world_size,
                    status=NOT_SUPPORTED,
                    message=unsupported[key.name],
                    group=group,
                    failure=Failure(kind=NOT_SUPPORTED),
                )
            )
        elif repeats:
            rows.append(_row(key, repeats, common[key.world_size]).updated(group=group))
    rows = [row.updated(**check_parity(row, by_row, spec)) for row in rows]
    speeds = {
        row.key: speeds_of(by_row[row.key], common[row.world_size], padding=False) for row in rows if row.has_speed
    }
    rows = [row.updated(**compare_with_baseline(row, rows, speeds, spec.baseline(row.world_size))) for row in rows]
    rows = [row.updated(rank=rank_of(row, rows, speeds)) for row in rows]
    parity = {row.key: {"parity": row.parity, "parity_message": row.parity_message} for row in rows if row.parity}
    return rows, [trial.updated(**parity.get(trial.key, {})) for trial in trials]  # without the speeds of a failed row


def _row(key: RowKey, trials: Sequence[TrialRecord], steps: int) -> Row:
    """One row of its repeats: completed if all that ran are, otherwise what its first failed repeat is."""
    completed = [trial for trial in trials if trial.completed]
    failed = next((trial for trial in trials if not trial.completed), None)
    order = sorted(zip(speeds_of(trials, steps), range(len(trials)), strict=True))
    middle = trials[order[(len(order) - 1) // 2][1] if steps else 0]  # of the median speed, the slower of two
    shown = failed or middle
    values = {key: getattr(shown, key) for key in FROM_TRIAL}
    values |= {"trial": key.name, "repeats": len(completed)} | _over_repeats(trials, FROM_ALL_REPEATS)
    if failed is not None:
        if completed:
            values["message"] = f"{len(completed)} of {len(trials)} repeats completed; {failed.message}"
    else:
        values |= _over_repeats(trials, FROM_COMPLETED_REPEATS) | _speeds(trials, steps)
        by_peak = "peak_host_bytes" if values["peak_allocated_bytes"] is None else "peak_allocated_bytes"
        values["peak_rank"] = max(trials, key=lambda trial: getattr(trial, by_peak) or 0).peak_rank
    speed, padding = values["tokens_per_second"], values["padding_fraction"]
    values["non_padding_tokens_per_second"] = None if speed is None or padding is None else speed * (1 - padding)
    return Row.model_validate(values)


def _speeds(trials: Sequence[TrialRecord], steps: int) -> dict[str, Any]:
    """Speeds over the first timed steps; unknown where none is timed, or where no tokens were counted."""
    speeds = speeds_of(trials, steps) if steps else []
    if not speeds or min(speeds) <= 0:
        return {key: None for key in FROM_TRIAL if column_of(Row, key).is_speed}
    timed = [[trial.step_seconds[number - 1] or 0.0 for number in trial.timed_step_numbers[:steps]] for trial in trials]
    medians = [statistics.median(seconds) for seconds in timed]
    return {
        "timed_steps": steps,
        "tokens_per_second": statistics.geometric_mean(speeds),
        "tokens_per_second_per_gpu": statistics.geometric_mean(speeds) / trials[0].world_size,
        "tokens_per_second_interval": mean_interval(speeds),
        "step_seconds_median": statistics.geometric_mean(medians),
        "step_seconds_p90": statistics.geometric_mean([percentile(seconds, 0.9) or 0.0 for seconds in timed]),
        "step_seconds_interval": mean_interval(medians),
    }


def _over_repeats(trials: Sequence[TrialRecord], rules: Mapping[Repeats, _Rule]) -> dict[str, Any]:
    """The keys of a row whose declaration has one of these rules."""
    columns = {key: column_of(Row, key).repeats for key in FROM_TRIAL}
    return {
        key: rules[repeats]([getattr(trial, key) for trial in trials])
        for key, repeats in columns.items()
        if repeats is not None and repeats in rules
    }


def _if_all_known(reduce: Callable[[list[float]], float]) -> _Rule:
    """A repeat without the figure, or with zero steps in it, leaves the row without it too."""
    return lambda values: reduce(values) if all(values) else None


def _if_any_known(reduce: _Rule) -> _Rule:
    """Repeats without the figure do not count."""
    return lambda values: reduce(known) if (known := [value for value in values if value is not None]) else None


def _largest(values: list[Any]) -> Any:
    return max_memory_by_phase(values) if isinstance(values[0], MemoryByPhase) else max(values)


FROM_COMPLETED_REPEATS: Mapping[Repeats, _Rule] = {
    Repeats.GEOMETRIC_MEAN: _if_all_known(statistics.geometric_mean),
    Repeats.MEDIAN: _if_all_known(statistics.median),
    Repeats.LARGEST: _if_any_known(_largest),
}
FROM_ALL_REPEATS: Mapping[Repeats, _Rule] = {
    Repeats.MEDIAN_OF_ALL: _if_any_known(statistics.median),
    Repeats.LARGEST_OF_ALL: _if_any_known(_largest),
    Repeats.UNION_OF_ALL: _if_any_known(lambda lists: sorted(set().union(*lists))),
}

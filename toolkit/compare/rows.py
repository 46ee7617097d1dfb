"""A trial's row, from its run folder; and what a row is worth beside the reference's.

A row never compares itself: parity and ratio are filled in when all rows are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.compare.trials import Trial
from toolkit.runs import status
from toolkit.runs.folder import RunFolder, read_json
from toolkit.runs.steps import measure, read_steps

Row = dict[str, Any]

# Largest relative difference of the first step's loss: the same weights and batches, before any update.
FIRST_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}


def row_of(trial: Trial, folder: RunFolder, comparison_folder: Path, *, untimed_steps: int) -> Row:
    """Everything that one finished trial shows; nothing but its run folder is read."""
    run = folder.read_run() or {}
    failure = read_json(folder.failure_json)
    return {
        "trial": trial.id,
        "preset": trial.preset,
        "world_size": trial.num_processes,
        "status": run.get("status", status.FAILED),
        "message": None if failure is None else failure.get("message"),
        "phase": None if failure is None else failure.get("phase"),
        "parity": None,
        "parity_message": None,
        "ratio_to_reference": None,
        **_speed(folder, trial, untimed_steps),
        **_memory(folder),
        "wall_seconds": run.get("wall_seconds"),
        "run_folder": str(folder.path.relative_to(comparison_folder)),
        "command": run.get("command", ""),
    }


def _speed(folder: RunFolder, trial: Trial, untimed_steps: int) -> Row:
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
    tokens_per_second = measured.tokens_per_second
    return {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_gpu": None if tokens_per_second is None else tokens_per_second / trial.num_processes,
        "tokens_per_cpu_second": measured.tokens_per_cpu_second,
        "supervised_tokens_per_second": measured.supervised_tokens_per_second,
        "padding_fraction": measured.padding_fraction,
        "timed_steps": measured.timed_steps,
        "timed_seconds": measured.timed_seconds,
        "step_seconds_median": measured.step_seconds_median,
        "step_seconds_p90": measured.step_seconds_p90,
        "first_loss": measured.losses[0] if measured.losses else None,
        "last_loss": measured.losses[-1] if measured.losses else None,
        "losses": measured.losses,
        "step_seconds": measured.step_seconds,
        "grad_norms": measured.grad_norms,
        "batch_sha256": measured.batch_sha256,
        "peak_allocated_bytes": measured.peak_allocated_bytes,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "peak_host_bytes": measured.peak_host_bytes,
        "peak_rank": measured.peak_rank,
    }


def _memory(folder: RunFolder) -> Row:
    """Model states of the rank that holds most of each, as attested."""
    attested = read_json(folder.attestation_json) or {}
    ranks = attested.get("ranks") or [{}]
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return {
        **{part: max((rank[part] for rank in ranks if part in rank), default=None) for part in parts},
        "num_params": ranks[0].get("num_params"),
        "num_trainable_params": ranks[0].get("num_trainable_params"),
        "compute_dtype": ranks[0].get("compute_dtype"),
        "initial_weights_sha256": ranks[0].get("initial_weights_sha256"),
        "attestation_sha256": attested.get("sha256"),
    }


def with_parity(rows: list[Row], reference: str) -> list[Row]:
    """Each row beside the reference's row of the same world size; a row that differs gets no ratio."""
    references = {row["world_size"]: row for row in rows if row["preset"] == reference}
    return [_beside(row, references.get(row["world_size"])) for row in rows]


def _beside(row: Row, reference: Row | None) -> Row:
    if row["status"] != status.COMPLETED or reference is None or reference["status"] != status.COMPLETED:
        return row | {"parity": None, "parity_message": None, "ratio_to_reference": None}
    if row is reference:
        return row | {"parity": "reference", "ratio_to_reference": 1.0}
    problem = difference(row, reference)
    ratio = None if problem else _ratio(row["tokens_per_second"], reference["tokens_per_second"])
    return row | {
        "parity": "parity failed" if problem else "agrees",
        "parity_message": problem,
        "ratio_to_reference": ratio,
    }


def difference(row: Row, reference: Row) -> str | None:
    """Why a row did not train the reference's problem, or None: weights, batches, then the first loss."""
    against = f"those of {reference['preset']}"
    if row["num_trainable_params"] != reference["num_trainable_params"]:
        return f"{row['num_trainable_params']} trainable parameters, {reference['num_trainable_params']} in {against}"
    if row["initial_weights_sha256"] != reference["initial_weights_sha256"]:
        return f"its initial weights are not {against}"
    if row["batch_sha256"] != reference["batch_sha256"]:
        return f"its batches, or their order, are not {against}"
    return _first_loss_difference(row, reference)


def _first_loss_difference(row: Row, reference: Row) -> str | None:
    own, other = row["first_loss"], reference["first_loss"]
    allowed = FIRST_LOSS_TOLERANCE.get(row["compute_dtype"], 0.0)
    relative = abs(own - other) / abs(other) if other else abs(own)
    if relative <= allowed:
        return None
    return (
        f"first loss {own:.6f} against {other:.6f} of {reference['preset']}"
        f" (relative {relative:.1e}, allowed {allowed:.0e})"
    )


def _ratio(own: float | None, other: float | None) -> float | None:
    return own / other if own is not None and other else None

"""A trial's row, from its run folder alone: what it measured, and the facts of the problem that it trained.

row = row_of(trial, RunFolder(folder / "trials" / trial.id), folder, untimed_steps=2, position=0)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.compare.readings import trial_readings
from toolkit.compare.trials import Trial
from toolkit.runs import status
from toolkit.runs.folder import RunFolder, read_json
from toolkit.runs.steps import Measured, measure, read_steps

Row = dict[str, Any]

# What each rank attests and parity is judged by; a fact that ranks do not share is a list of theirs.
ATTESTED = (
    "world_size",
    "engine",
    "sharding",
    "compute_dtype",
    "master_dtype",
    "optimizer_dtype",
    "reduce_dtype",
    "gradient_clipping",
    "activation_checkpointing",
    "num_trainable_params",
    "initial_weights_sha256",
    "ddp_comm_hook",
    "packing",
)
# What the training script understood, with defaults filled in.
SPECIFIED = ("global_batch_size", "learning_rate", "seed", "max_steps")


def row_of(trial: Trial, folder: RunFolder, comparison_folder: Path, *, untimed_steps: int, position: int) -> Row:
    """Everything that one finished trial shows; nothing but its run folder is read."""
    run = folder.read_run() or {}
    failure = read_json(folder.failure_json)
    measured = measure(read_steps(folder), untimed_steps=untimed_steps)
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
        **_speed(measured, trial),
        **_memory(folder),
        **trial_readings(folder, measured),
        "wall_seconds": run.get("wall_seconds"),
        "run_folder": str(folder.path.relative_to(comparison_folder)),
        "command": run.get("command", ""),
        "repeat": trial.repeat,
        "position": position,
        "startup_seconds": startup_seconds(run),
        "failure": failure_facts(run, failure, measured),
        "problem": problem_facts(run, read_json(folder.attestation_json) or {}),
    }


def startup_seconds(run: Row) -> float | None:
    """From launch until training begins, attesting the weights before it included."""
    begun = next((when for phase, when in run.get("phases") or [] if phase == "train"), None)
    return None if begun is None or "started_unix" not in run else float(begun - run["started_unix"])


def failure_facts(run: Row, failure: Row | None, measured: Measured) -> Row | None:
    """Kind, phase and bytes of a trial that did not complete; None of one that did."""
    if run.get("status") == status.COMPLETED:
        return None
    said = failure or {}
    peaks = (said.get("peak_bytes"), measured.peak_allocated_bytes or measured.peak_host_bytes)
    return {
        "kind": run.get("status", status.FAILED),
        "phase": said.get("phase"),
        "step": said.get("step"),
        "rank": said.get("rank"),
        "predicted_bytes": None,
        "measured_bytes": max((peak for peak in peaks if peak), default=None),
    }


def problem_facts(run: Row, attested: Row) -> Row:
    """What was trained, from what the ranks attest and from the arguments that the script understood."""
    ranks, spec = attested.get("ranks") or [], run.get("spec") or {}
    facts = {fact: _of_all([rank.get(fact) for rank in ranks]) for fact in ATTESTED}
    promised = (attested.get("promised") or {}).get("master_dtype")
    return facts | {fact: spec.get(fact) for fact in SPECIFIED} | {"ranks": len(ranks), "promised_masters": promised}


def _of_all(values: list[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else (values or None)


def _speed(measured: Measured, trial: Trial) -> Row:
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
        "step_tokens": measured.step_tokens,
        "step_non_padding_tokens": measured.step_non_padding_tokens,
        "step_supervised_tokens": measured.step_supervised_tokens,
        "timed_step_numbers": measured.timed_step_numbers,
        "rank_skew": measured.rank_skew,
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
    }

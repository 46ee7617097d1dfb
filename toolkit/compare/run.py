"""Run a comparison: each trial in fresh processes, each finished one in the ledger before the next starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from toolkit.compare.ledger import LEDGER_FILE, Ledger
from toolkit.compare.results import SCHEMA_VERSION, Results
from toolkit.compare.rows import Row, row_of, with_parity
from toolkit.compare.trials import Comparison, Trial
from toolkit.hardware.container import cpu_limit, memory_limit_bytes
from toolkit.hardware.machine import describe_machine, disk_facts, git_commit, gpu_links, library_versions
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.restarts import Limits
from toolkit.launch.run import run_training
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.runs.argv import integer, read_arguments
from toolkit.runs.folder import RunFolder

DEFAULT_SEED = 42  # transformers' TrainingArguments
DEFAULT_BATCH = 8


class Stopped(Exception):
    """A signal ended the comparison; the ledger holds what was finished."""


def run_trials(
    comparison: Comparison,
    folder: Path,
    presets: dict[str, str],
    *,
    retry_failed: bool,
    timeout_seconds: float | None,
    on_start: Callable[[Trial], None],
    on_line: Callable[[str], None],
    on_finish: Callable[[Trial, Row, bool], None],
    nvme: Mapping[str, NvmeDisk | None],
) -> None:
    """Run every trial that the ledger lacks. `presets` maps a preset's name to what `load_preset` takes.

    Raises Stopped when a signal ended a trial.
    """
    ledger = Ledger(folder / LEDGER_FILE)
    for trial in comparison.trials():
        done = ledger.read().get(trial.id)
        if done is not None and not (retry_failed and done["status"] != status.COMPLETED):
            on_finish(trial, done, True)
            continue
        on_start(trial)
        run_folder = RunFolder(folder / "trials" / trial.id)
        if (run_folder.read_run() or {}).get("status") != status.COMPLETED:  # else killed before the ledger's line
            result = run_training(
                load_preset(presets[trial.preset]),
                num_processes=trial.num_processes,
                training_argv=comparison.training_argv(run_folder.path),
                output_dir=run_folder.path,
                cpu=comparison.cpu,
                on_line=on_line,
                timeout_seconds=timeout_seconds,
                nvme=nvme.get(trial.preset),
                limits=Limits(stop_minutes=0),  # a trial is repeated whole
            )
            if result.status == status.INTERRUPTED:
                raise Stopped
        row = row_of(trial, run_folder, folder, untimed_steps=comparison.untimed_steps)
        ledger.append(row)
        on_finish(trial, row, False)


def results_of(comparison: Comparison, folder: Path) -> Results:
    """The comparison's results from its ledger alone, in the order of its trials."""
    finished = Ledger(folder / LEDGER_FILE).read()
    rows = [finished[trial.id] for trial in comparison.trials() if trial.id in finished]
    results: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "reference": comparison.reference,
        "environment": _environment(comparison, folder),
        "job": _job(comparison, rows),
        "rows": with_parity(rows, comparison.reference),
    }
    return cast(Results, results)


def _environment(comparison: Comparison, folder: Path) -> dict[str, Any]:
    machine = describe_machine()
    return {
        "device": "cpu" if comparison.cpu else "cuda",
        "gpus": [] if comparison.cpu else machine["gpus"],
        **{key: machine[key] for key in ("cpu", "cpu_count", "host_memory_bytes", "python", "system")},
        "versions": {name: found for name, found in library_versions().items() if found is not None},
        "git_commit": git_commit(Path(__file__).parent),
        "disk": disk_facts(folder),
        "links": None if comparison.cpu else gpu_links(),
        "memory_limit_bytes": memory_limit_bytes(),
        "cpu_limit": cpu_limit(),
    }


def _job(comparison: Comparison, rows: list[Row]) -> dict[str, Any]:
    arguments = read_arguments(comparison.training_arguments)
    dtypes = sorted({row["compute_dtype"] for row in rows if row["compute_dtype"]})
    return {
        "model": str(arguments["model_name_or_path"]),
        "dataset": str(arguments["dataset"]),
        "training_arguments": comparison.training_arguments,
        "untimed_steps": comparison.untimed_steps,
        "seed": integer(arguments, "seed", DEFAULT_SEED),
        "per_device_train_batch_size": integer(arguments, "per_device_train_batch_size", DEFAULT_BATCH),
        "gradient_accumulation_steps": integer(arguments, "gradient_accumulation_steps", 1),
        "compute_dtype": ", ".join(dtypes) or "n/a",
    }

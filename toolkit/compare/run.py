"""Run a comparison: each trial in fresh processes, each finished one in the ledger before the next starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from toolkit.compare.aggregate import compared
from toolkit.compare.claims import confidence_of
from toolkit.compare.efficiency import shape_of_model
from toolkit.compare.intervals import METHOD
from toolkit.compare.ledger import LEDGER_FILE, Ledger
from toolkit.compare.reported import with_readings
from toolkit.compare.results import SCHEMA_VERSION, Results
from toolkit.compare.rows import Row, row_of
from toolkit.compare.trials import Comparison, Trial
from toolkit.errors import ToolkitError
from toolkit.hardware.container import cpu_limit, memory_limit_bytes
from toolkit.hardware.machine import describe_machine, disk_facts, git_commit, gpu_links, library_versions
from toolkit.launch.nvme import NvmeDisk
from toolkit.launch.restarts import Limits
from toolkit.launch.run import run_training
from toolkit.presets import load_preset
from toolkit.runs import status
from toolkit.runs.argv import DEFAULT_BATCH, integer, read_arguments
from toolkit.runs.folder import RunFolder
from toolkit.runs.rehearsals import refuse_rehearsals

DEFAULT_SEED = 42  # transformers' TrainingArguments
# Ranks notice within seconds that the launcher is gone; a save that is under way may take longer.
ORPHAN_SECONDS = 120.0


class Stopped(Exception):
    """A signal ended the comparison; the ledger holds what was finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Telling:
    """What is told while trials run."""

    start: Callable[[str], None]
    line: Callable[[str], None]
    finish: Callable[[str, Row, bool], None]
    """A trial's name, its row, and whether the ledger had it."""
    skip: Callable[[str, str], None]
    """A trial's name, and why it is not run."""
    probe: Callable[[str, Row], None]
    """A run that is no trial, and its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs trials of one comparison into its folder."""

    comparison: Comparison
    folder: Path
    timeout_seconds: float | None
    nvme: Mapping[str, NvmeDisk | None]
    telling: Telling

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / LEDGER_FILE)

    def run(self, unsupported: Mapping[str, str], *, retry_failed: bool) -> None:
        """Every trial that the ledger lacks; after a failure no other repeat of its row is tried.

        Raises Stopped when a signal ended a trial.
        """
        refuse_rehearsals([self.folder / "trials" / trial.id for trial in self.comparison.trials()])
        retried = self._failed() if retry_failed else set()
        for position, trial in enumerate(self.comparison.trials()):
            if trial.row in unsupported:
                continue
            finished = {name: row for name, row in self.ledger.read().items() if name not in retried}
            done = finished.get(trial.id)
            if done is not None:
                self.telling.finish(trial.id, done, True)
            elif failed := failed_repeat(finished, trial):
                self.telling.skip(trial.id, f"{failed['trial']} ended as {failed['status']}")
            else:
                self.telling.start(trial.id)
                run_folder = self.train(trial, self.folder / "trials" / trial.id)
                self.record(trial, run_folder, position)
                retried.discard(trial.id)

    def _failed(self) -> set[str]:
        """Trials in the ledger that did not complete."""
        return {name for name, row in self.ledger.read().items() if row["status"] != status.COMPLETED}

    def train(self, trial: Trial, path: Path, extra: Sequence[str] = ()) -> RunFolder:
        """One run in fresh processes; one that was complete before the ledger's line was written is kept."""
        run_folder, comparison = RunFolder(path), self.comparison
        wait_until_free(run_folder)
        if (run_folder.read_run() or {}).get("status") == status.COMPLETED:
            return run_folder
        argv = comparison.training_argv(trial.preset, trial.num_processes, path)
        result = run_training(
            load_preset(comparison.loads[trial.preset]),
            num_processes=trial.num_processes,
            training_argv=[*argv, *extra],
            output_dir=path,
            cpu=comparison.cpu,
            on_line=self.telling.line,
            timeout_seconds=self.timeout_seconds,
            nvme=self.nvme.get(trial.preset),
            limits=Limits(stop_minutes=0),  # a trial is repeated whole
        )
        if result.status == status.INTERRUPTED:
            raise Stopped
        return run_folder

    def record(self, trial: Trial, run_folder: RunFolder, position: int) -> None:
        """The trial's line in the ledger."""
        row = row_of(trial, run_folder, self.folder, untimed_steps=self.comparison.untimed_steps, position=position)
        self.ledger.append(row)
        self.telling.finish(trial.id, row, False)


def wait_until_free(folder: RunFolder, seconds: float = ORPHAN_SECONDS) -> None:
    """Let the processes of a runner that was killed end first; they hold the folder.

    Raises ToolkitError when they still do after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            held = folder.hold()
        except ToolkitError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
            continue
        if held is not None:
            os.close(held)
        return


def failed_repeat(finished: Mapping[str, Row], trial: Trial) -> Row | None:
    """Another repeat of the same row that failed: what ran out of memory once does so again, and costs as much."""
    name = f"{trial.row}-r"
    same = (row for key, row in finished.items() if key.startswith(name) and key != trial.id)
    return next((row for row in same if row["status"] != status.COMPLETED), None)


def results_of(
    comparison: Comparison,
    folder: Path,
    unsupported: Mapping[str, str],
    *,
    price_per_gpu_hour: float | None = None,
) -> Results:
    """The comparison's results from its ledger, rows in the order that was asked for."""
    finished = Ledger(folder / LEDGER_FILE).read()
    rows, trials = compared(finished, comparison, unsupported)
    environment = _environment(comparison, folder)
    rows = with_readings(
        rows,
        trials,
        finished,
        comparison=comparison,
        shape=shape_of_model(_job(comparison, rows)["model"]),
        environment=environment,
        price_per_gpu_hour=price_per_gpu_hour,
    )
    results: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "reference": comparison.reference,
        "environment": environment,
        "job": _job(comparison, rows),
        "rows": rows,
        "trials": trials,
        "method": _method(comparison, rows),
        "price_per_gpu_hour": price_per_gpu_hour,
    }
    return cast(Results, results)


def _method(comparison: Comparison, rows: list[Row]) -> dict[str, Any]:
    return {
        "repeats": comparison.repeats,
        "order_seed": comparison.order_seed,
        "interval": METHOD if comparison.repeats > 1 else "none: single runs",
        "ratio_confidence": confidence_of(rows),
        "target_interval": comparison.target_interval,
        "scaling": comparison.scaling,
    }


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
    dtypes = sorted({row["compute_dtype"] for row in rows if row.get("compute_dtype")})
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

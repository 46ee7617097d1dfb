"""Runs beside the trials that no speed counts: one with a profile, a whole checkpoint, or both, for each row.

    words_of(("profile", "save"), untimed_steps=2)[:4]      # ['--max_steps', '4', '--profile_steps', '3:4']

Each is a line in the ledger like a trial, so a comparison that is resumed repeats none of them; and one can be asked
for later, of a comparison that is finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from toolkit.compare.extra_facts import of_kind
from toolkit.compare.readings import extra_readings
from toolkit.compare.rows import row_of
from toolkit.compare.run import Runner
from toolkit.compare.trials import Trial, row_name
from toolkit.runs import status

Row = dict[str, Any]
PROFILED_STEPS = 2


def words_of(kinds: tuple[str, ...], *, untimed_steps: int) -> list[str]:
    """Training arguments of such a run: a few steps, the profiled ones after the untimed ones."""
    last = untimed_steps + PROFILED_STEPS
    words = ["--max_steps", str(last)]
    if "profile" in kinds:
        words += ["--profile_steps", f"{untimed_steps + 1}:{last}"]
    if "save" in kinds:
        words += ["--save_strategy", "steps", "--save_steps", str(last)]
    return words


def run_extras(
    runner: Runner, unsupported: Mapping[str, str], *, kinds: tuple[str, ...], retry_failed: bool = False
) -> None:
    """One such run for each row that completed, as far as the ledger lacks it. Raises Stopped as trials do."""
    for preset, n in runner.comparison.rows():
        name = row_name(preset, n)
        finished = runner.ledger.read()
        missing = tuple(kind for kind in kinds if _lacks(finished, name, kind, retry_failed))
        if name not in unsupported and missing and _completed(finished, name):
            _run(runner, Trial(preset=preset, num_processes=n, repeat=0), missing)


def _run(runner: Runner, trial: Trial, kinds: tuple[str, ...]) -> None:
    name = f"{trial.row}-{'-'.join(kinds)}"
    words = words_of(kinds, untimed_steps=runner.comparison.untimed_steps)
    runner.telling.start(name)
    run_folder = runner.train(trial, runner.folder / "extras" / name, words)
    for checkpoint in run_folder.path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # it was measured, and nobody trains on from it
    row = row_of(trial, run_folder, runner.folder, untimed_steps=runner.comparison.untimed_steps, position=0)
    row |= {"trial": name, "kinds": list(kinds)} | extra_readings(run_folder)
    runner.ledger.append(row)
    runner.telling.finish(name, row, False)


def _lacks(finished: Mapping[str, Row], name: str, kind: str, retry_failed: bool) -> bool:
    rows = of_kind(finished, name, kind)
    return not rows or (retry_failed and rows[-1]["status"] != status.COMPLETED)


def _completed(finished: Mapping[str, Row], name: str) -> bool:
    """Whether any trial of the row did: what ran out of memory would do so again."""
    trials = [row for key, row in finished.items() if key.startswith(f"{name}-r") and "kinds" not in row]
    return any(row["status"] == status.COMPLETED for row in trials)

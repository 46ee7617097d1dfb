"""Side runs: one more run of each row, with a profile, a complete checkpoint, or both. No speed counts them.

>>> side_run_arguments(["profile"], untimed_steps=2)
['--max_steps', '4', '--profile_steps', '3:4']

Each is a record in the ledger, like a trial: a resumed comparison repeats none, and a finished one can be resumed with
more of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from toolkit.compare.ledger import SideRunKind, side_runs_of, trials_of
from toolkit.compare.rows import RowKey
from toolkit.compare.run_record import read_run_record, read_side_run
from toolkit.compare.runner import Runner
from toolkit.compare.specification import Trial

PROFILED_STEPS = 2


def side_run_arguments(kinds: Sequence[SideRunKind], *, untimed_steps: int) -> list[str]:
    """Return the training arguments of a side run: a few steps, of which the profiled ones are the last."""
    last = untimed_steps + PROFILED_STEPS
    words = ["--max_steps", str(last)]
    if "profile" in kinds:
        words += ["--profile_steps", f"{untimed_steps + 1}:{last}"]
    if "save" in kinds:
        words += ["--save_strategy", "steps", "--save_steps", str(last)]
    return words


def run_side_runs(
    runner: Runner, unsupported: Mapping[str, str], *, kinds: Sequence[SideRunKind], retry_failed: bool = False
) -> None:
    """Run what the ledger lacks, one run for each row with a completed trial.

    Raises ComparisonInterrupted on a signal.
    """
    for row in runner.spec.rows():
        records = runner.ledger.read()
        last = {kind: next(reversed(side_runs_of(records, row, kind)), None) for kind in kinds}
        missing = [kind for kind, run in last.items() if run is None or (retry_failed and not run.completed)]
        # A row without a completed trial ran out of memory, and would do so again.
        if row.name not in unsupported and missing and any(trial.completed for trial in trials_of(records, row)):
            _run(runner, row, missing)


def _run(runner: Runner, row: RowKey, kinds: Sequence[SideRunKind]) -> None:
    name, untimed_steps = f"{row.name}-{'-'.join(kinds)}", runner.spec.untimed_steps
    runner.progress.start(name)
    arguments = side_run_arguments(kinds, untimed_steps=untimed_steps)
    run_folder = runner.start_run(row, runner.folder / "extras" / name, arguments)
    for checkpoint in run_folder.path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # its size and seconds are recorded; nothing resumes from it
    trial = Trial(row=row, repeat=0)
    measured = read_run_record(trial, run_folder, runner.folder, untimed_steps=untimed_steps)
    record = read_side_run(measured.updated(trial=name), run_folder, kinds)
    runner.ledger.append(record)
    runner.progress.finish(record)

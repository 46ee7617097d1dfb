"""What is seen while trials run: bars on a terminal, one line when a trial starts and one when it ends elsewhere.

with Screen(6) as screen: ...
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.compare.rows import Row
from toolkit.runs import status
from toolkit.units import number, seconds

STEP_LINE = re.compile(r"^step (\d+)/(\d+) ")


def talk() -> Console:
    """Where a person is talked to."""
    return Console(stderr=True, highlight=False, soft_wrap=True)  # a pipe keeps one line a trial


class Screen:
    """Of `total` trials."""

    def __init__(self, total: int) -> None:
        self.console = talk()
        self.total, self.finished = total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=self.console) if self.console.is_terminal else None
        self.trials = self.bars.add_task("trials", total=total) if self.bars else None
        self.steps: Any = None
        self.trial = ""

    def __enter__(self) -> None:
        (self.bars or nullcontext()).__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.bars:
            self.bars.__exit__(*exception)

    def start(self, trial: str) -> None:
        self.trial = trial
        if self.bars:
            self.steps = self.bars.add_task(f"{trial}: starting", total=None)
        else:
            self.console.print(f"[{self.finished + 1}/{self.total}] {trial}: starting", markup=False)
        sys.stderr.flush()

    def line(self, text: str) -> None:
        """A line of the trial's own output: its steps move the bar."""
        match = STEP_LINE.match(text)
        if match and self.bars and self.steps is not None:
            completed, total = int(match[1]), int(match[2])
            shown = total if total > 0 else None
            self.bars.update(self.steps, completed=completed, total=shown, description=self.trial)

    def finish(self, trial: str, row: Row, from_ledger: bool) -> None:
        self.finished += 1
        if self.bars and self.steps is not None and not from_ledger:
            self.bars.remove_task(self.steps)
            self.steps = None
        if self.bars and self.trials is not None:
            self.bars.update(self.trials, completed=self.finished)
        note = "already in the ledger" if from_ledger else f"in {seconds(row['wall_seconds'])}"
        if row["status"] == status.COMPLETED:
            words = (
                f"completed, {number(row['tokens_per_second'], 0)} tokens/s, last loss {number(row['last_loss'], 4)}"
            )
        else:
            words = f"{row['status']}: {row['message']}"
        self.console.print(f"[{self.finished}/{self.total}] {trial}: {words} ({note})", markup=False)

    def probe(self, name: str, row: Row) -> None:
        """A run that is no trial, and so not counted."""
        phase = f" in phase {row['phase']}" if row.get("phase") else ""
        self.console.print(f"probe {name}: {row['status']}{phase} (in {seconds(row['wall_seconds'])})", markup=False)

    def skip(self, trial: str, why: str) -> None:
        """A trial that is not run."""
        self.finished += 1
        self.console.print(f"[{self.finished}/{self.total}] {trial}: not run, since {why}", markup=False)

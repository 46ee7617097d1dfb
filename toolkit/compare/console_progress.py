"""Progress of a comparison: bars on a terminal, else one line when a trial starts and one when it ends."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.compare.rows import RunRecord
from toolkit.units import number, seconds

STEP_LINE = re.compile(r"^step (\d+)/(\d+) ")


def stderr_console() -> Console:
    """Return a console for messages; stdout is for data."""
    return Console(stderr=True, highlight=False, soft_wrap=True)  # a pipe gets one line per trial


class ConsoleProgress:
    """Progress of `total` trials and side runs on stderr. A context manager."""

    def __init__(self, total: int) -> None:
        self.console = stderr_console()
        self.total, self.finished = total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, console=self.console) if self.console.is_terminal else None
        self.trials = self.bars.add_task("trials", total=total) if self.bars else None
        self.steps: Any = None
        self.current = ""

    def __enter__(self) -> None:
        (self.bars or nullcontext()).__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.bars:
            self.bars.__exit__(*exception)

    def start(self, name: str) -> None:
        """Add a bar for the steps of the run."""
        self.current = name
        if self.bars:
            self.steps = self.bars.add_task(f"{name}: starting", total=None)
        else:
            self.console.print(f"[{self.finished + 1}/{self.total}] {name}: starting", markup=False)
        sys.stderr.flush()

    def output_line(self, line: str) -> None:
        """Advance the bar when the line reports a step."""
        match = STEP_LINE.match(line)
        if match and self.bars and self.steps is not None:
            completed, total = int(match[1]), int(match[2]) or None
            self.bars.update(self.steps, completed=completed, total=total, description=self.current)

    def finish(self, record: RunRecord, *, from_ledger: bool = False) -> None:
        """Print the outcome, with the speed or the message."""
        self.finished += 1
        if self.bars and self.steps is not None and not from_ledger:
            self.bars.remove_task(self.steps)
            self.steps = None
        if self.bars and self.trials is not None:
            self.bars.update(self.trials, completed=self.finished)
        note = "already in the ledger" if from_ledger else f"in {seconds(record.wall_seconds)}"
        if record.completed:
            speed, loss = number(record.tokens_per_second, 0), number(record.last_loss, 4)
            outcome = f"completed, {speed} tokens/s, last loss {loss}"
        else:
            outcome = f"{record.status}: {record.message}"
        self.console.print(f"[{self.finished}/{self.total}] {record.trial}: {outcome} ({note})", markup=False)

    def finish_probe(self, record: RunRecord) -> None:
        """Print the outcome; probes are not counted."""
        ended = record.status + (f" in phase {record.phase}" if record.phase else "")
        self.console.print(f"probe {record.trial}: {ended} (in {seconds(record.wall_seconds)})", markup=False)

    def skip(self, name: str, reason: str) -> None:
        """Print the reason; a skipped trial counts as finished."""
        self.finished += 1
        self.console.print(f"[{self.finished}/{self.total}] {name}: not run, since {reason}", markup=False)

"""Lines of a run's progress on rank 0, with the figures of all ranks, at no cost to a step.

A thread reads what the ranks have written: there is no collective for it, and no step waits for a file.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from toolkit.record.training_progress import newest_steps, step_line, untrained_steps

if TYPE_CHECKING:
    from toolkit.observe.observed_run import ObservedRun

SECONDS_BETWEEN_LINES = 1.0
# Ranks end a step together; a network file system may show their rows later.
LAST_ROW_SECONDS = 2.0


class StepLines:
    """Prints the newest step that all ranks have finished, at most once per second, and always the last one."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        self.max_steps = 0
        """Steps of the training; 0 before that is known, and where it never is."""
        self.stop_after_steps: int | None = None
        """Steps of this process, where it ends earlier."""
        self.resumed_step = self.printed_step = run.resumed_step
        self.every_step = False
        """True where each step is logged: then each has a line, as far back as the ends of the rows' files reach."""
        self.warned = False
        self.first_seen = (0, 0.0)
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, resumed_step: int) -> None:
        """Follow the steps after one: a script of somebody's says only here where it resumes."""
        self.resumed_step = self.printed_step = resumed_step
        if self.run.writes and not self.run.single_process:
            self.ended.clear()
            self.thread = threading.Thread(target=self._follow, name="step lines", daemon=True)
            self.thread.start()

    def end(self) -> None:
        if self.thread is None:
            return
        self.ended.set()
        self.thread.join()
        deadline = time.monotonic() + LAST_ROW_SECONDS
        while self.printed_step < self.run.progress.step and time.monotonic() < deadline:
            self.print_newest()
            time.sleep(0.01)

    def _follow(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LINES if self.printed_step > self.resumed_step else 0.1):
            if self.run.progress.step > self.printed_step:  # otherwise no rank's file is read
                self.print_newest()

    def print_newest(self) -> None:
        """Print the newest step, unless it is printed already, and once that the gradient is exactly zero."""
        steps = newest_steps(self.run.folder, ranks=self.run.world_size, resumed_step=self.resumed_step)
        if not steps or (step := steps[-1][0].step) <= self.printed_step:
            return
        now = time.monotonic()
        if not self.first_seen[0]:
            self.first_seen = step, now
        done, printed, self.printed_step = step - self.first_seen[0], self.printed_step, step
        limit = self.stop_after_steps and self.resumed_step + self.stop_after_steps
        last = min(filter(None, (self.max_steps, limit)), default=0)
        left = (now - self.first_seen[1]) / done * (last - step) if done and last > step else None
        new = [each for each in steps[:-1] if self.every_step and each[0].step > printed]
        lines = [step_line(each, max_steps=last, seconds_left=None) for each in new]
        lines.append(step_line(steps[-1], max_steps=last, seconds_left=left))
        if not self.warned and (untrained := untrained_steps(steps)):
            self.warned = True
            lines.append(
                "warning: grad_norm was exactly 0 in steps {} to {}: nothing is learned there".format(*untrained)
            )
        sys.stdout.write("\n".join([*lines, ""]))  # in one piece: another thread prints too
        sys.stdout.flush()

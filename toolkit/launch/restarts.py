"""Start a run again after a fault that is not the job's own, and ask a run to save and stop.

restarts = Restarts(folder, max_restarts=3)
while restarts.again(result, outcome): ...
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.launch.conclude import RunResult
from toolkit.launch.process import STOP_MINUTES, Outcome
from toolkit.runs import status
from toolkit.runs.checkpoints import latest_complete
from toolkit.runs.folder import RunFolder
from toolkit.runs.pulses import read_pulses
from toolkit.runs.steps import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long a run may hang or take to stop, and how often it is started again."""

    hang_timeout_minutes: float | None = None
    """None: the ranks' own default; 0: no limit."""
    stop_minutes: float = STOP_MINUTES
    """After a first signal, for a checkpoint; 0 ends the run at once."""
    max_restarts: int = 0


@dataclass(slots=True)
class Restarts:
    """The restarts of one run; `run.json` keeps them."""

    folder: RunFolder
    max_restarts: int
    done: list[dict[str, Any]] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """What a restart adds to the training arguments; the last of two equal flags counts."""
        return ["--resume_from_checkpoint", "latest"] if self.done else []

    def again(self, result: RunResult, outcome: Outcome) -> bool:
        """Whether to start again; if so, the folder is made ready for it, its checkpoints and rows kept."""
        if len(self.done) >= self.max_restarts or not may_restart(result, outcome):
            return False
        failure = result.failure or {}
        checkpoint = latest_complete(self.folder.path)
        resumed, reached = (checkpoint.step if checkpoint else 0), steps_reached(self.folder)
        self.done.append(
            {
                "rank": failure.get("rank"),
                "step": failure.get("step"),
                "status": result.status,
                "message": failure.get("message"),
                "resumed_from_step": resumed,
                "lost_steps": max(0, reached - resumed),
            }
        )
        self.folder.failure_json.unlink(missing_ok=True)
        self.folder.forget_pulses()
        self.folder.update_run(restarts=self.done)
        return True

    def line(self) -> str:
        """What is said at a restart."""
        last = self.done[-1]
        return (
            f"{last['status']}: {last['message']}\n"
            f"restart {len(self.done)} of {self.max_restarts}, from step {last['resumed_from_step']}"
            f" ({last['lost_steps']} steps lost)"
        )


def may_restart(result: RunResult, outcome: Outcome) -> bool:
    """Only what another start may cure: a rank killed or hanging, host memory; never what the job itself is."""
    if outcome.interrupted or outcome.timed_out:
        return False
    killed = "seen_by_peer" in (result.failure or {})
    return killed or result.status in (status.TIMED_OUT, status.HOST_OUT_OF_MEMORY)


def steps_reached(folder: RunFolder) -> int:
    """Optimizer steps that every rank finished, by the ranks' rows."""
    last = [max((row["step"] for row in read_rows(path)), default=0) for path in folder.path.glob("ranks/rank*.jsonl")]
    return min(last, default=0)


def ask_ranks_to_stop(folder: RunFolder, say: Callable[[str], None]) -> bool:
    """SIGTERM to each rank itself: their launcher would kill them after 30 s. False where there is none to ask."""
    pulses = [pulse for pulse in read_pulses(folder.path / "ranks") if pulse.process is not None]
    for pulse in pulses:
        with contextlib.suppress(OSError):
            os.kill(pulse.pid, signal.SIGTERM)
    if pulses:
        say("stopping: every rank ends its step and saves; a second signal ends the run at once")
    return bool(pulses)

"""Which rank was killed by a signal: it cannot speak, and its peers only see their connection break.

>>> killed_rank("rank      : 1 (local_rank: 1)\\n  exitcode  : -9 (pid: 7)  (SIGKILL)")
Killed(rank=1, signal='SIGKILL')
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

# The root cause as torch's elastic agent prints it (torch/distributed/elastic/multiprocessing/errors, torch 2.13).
_ENDED = re.compile(r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: -(?P<number>\d+) ")
ROOT_CAUSE = "Root Cause (first observed failure)"
# The agent itself ends the other ranks with these.
_BY_THE_AGENT = (signal.SIGTERM, signal.SIGINT)


class Killed(NamedTuple):
    """A rank, and the signal that ended it."""

    rank: int
    signal: str


def killed_rank(log: str) -> Killed | None:
    """The rank that failed first, if a signal ended it; what the agent then did to the others is no cause."""
    found = [
        (int(match["rank"]), int(match["number"]))
        for match in _ENDED.finditer(log.rpartition(ROOT_CAUSE)[2])
        if int(match["number"]) not in _BY_THE_AGENT
    ]
    return Killed(found[-1][0], signal.Signals(found[-1][1]).name) if found else None

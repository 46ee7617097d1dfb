"""The statuses of a run, and the exit code of each.

>>> {name: code for name in STATUSES if (code := exit_code_of(name)) != 1}
{'completed': 0, 'out_of_memory': 3, 'host_out_of_memory': 3}
"""

from __future__ import annotations

from typing import Literal, get_args

from toolkit.errors import EXIT_DONE, EXIT_INVALID_INPUT, EXIT_OUT_OF_MEMORY, EXIT_RUN_FAILED

RunStatus = Literal[
    "planned",
    "running",
    "completed",
    "out_of_memory",
    "host_out_of_memory",
    "timed_out",
    "diverged",
    "attestation_failed",
    "failed",
    "interrupted",
]
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
PLANNED, RUNNING, COMPLETED, OUT_OF_MEMORY, HOST_OUT_OF_MEMORY, *_ = STATUSES
*_, TIMED_OUT, DIVERGED, ATTESTATION_FAILED, FAILED, INTERRUPTED = STATUSES


def exit_code_of(status: str, *, invalid_input: bool = False) -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 invalid input, 3 out of memory."""
    if invalid_input:
        return EXIT_INVALID_INPUT
    if status == COMPLETED:
        return EXIT_DONE
    return EXIT_OUT_OF_MEMORY if status in (OUT_OF_MEMORY, HOST_OUT_OF_MEMORY) else EXIT_RUN_FAILED

"""What several commands print: messages go to stderr, data goes to stdout."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.entry_point import print_message
from toolkit.hardware.gpus import ON_CPU_MESSAGE


def print_failure(status: str, failure: Mapping[str, object]) -> None:
    """Print why a run failed, with what to do about it.

    The run's log is relayed only up to the failure, so this is where the user reads it.
    """
    print_message(f"error: {status}: {failure['message']}")
    if failure.get("hint"):
        print_message(f"  hint: {failure['hint']}")


def print_device(on_cpu: bool, choice: bool | None) -> None:
    """Say that a run uses the CPU where the user did not choose it."""
    if on_cpu and choice is None:
        print_message(ON_CPU_MESSAGE)

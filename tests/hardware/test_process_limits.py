"""Limits of this process, set and lowered for real in a child."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import pytest

from toolkit.hardware.process_limits import locked_memory_limit_bytes, open_files_limit, processes_limit


def in_child(check: Callable[[], bool]) -> bool:
    """Return what a check returns in a forked child, whose limits it may change."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_the_soft_limits_are_reported() -> None:
    def check() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, 1000))
        resource.setrlimit(resource.RLIMIT_NPROC, (700, 800))
        return (open_files_limit(), processes_limit()) == (500, 700)

    assert in_child(check)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has the capability to give up")
def test_the_capability_to_lock_memory_overrides_the_limit() -> None:
    def check() -> bool:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * 2**20, 8 * 2**20))
        with_capability = locked_memory_limit_bytes()
        os.setresuid(65534, 65534, 65534)
        return (with_capability, locked_memory_limit_bytes()) == (None, 8 * 2**20)

    assert in_child(check)

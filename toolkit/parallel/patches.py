"""Changes to installed libraries, made once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable

patched_once: Callable[[Callable[[], None]], Callable[[], None]] = functools.cache
"""Decorator of a function that changes a library: a second call does nothing."""

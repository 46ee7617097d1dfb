"""Torch files mapped into memory and let go of again, so that pages read once do not stay.

A mapped page counts as this process's memory until the mapping is gone; after `BUDGET_BYTES` read all are dropped.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

BUDGET_BYTES = 64 * 2**20


class TorchFiles:
    """`torch.load(mmap=True)` of several files, dropped together when they have been read enough."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes, self.read_bytes = budget_bytes, 0
        self.loaded: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self.loaded:
            self.loaded[path] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        return self.loaded[path]

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, and its bytes counted."""
        self.read_bytes += tensor.nbytes
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def rest(self) -> None:
        """Between two parameters: drop the mappings if enough was read. No view may be alive."""
        if self.read_bytes >= self.budget_bytes:
            self.close()

    def close(self) -> None:
        self.loaded.clear()
        self.read_bytes = 0
        gc.collect()

"""What is alive while a model trains on fake tensors: each storage once, with the phase that allocated it.

    memory = LiveMemory()
    with FakeTensorMode(), memory:
        with memory.phase("forward"):
            ...
    memory.peaks["forward"].total_bytes

Bytes are of storages as they are asked for, without an allocator's rounding and fragmentation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Live:
    """One storage that is alive."""

    serial: int
    tag: str
    storage: weakref.ref[Any]
    bytes: int
    """As last looked at."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a phase: what was alive, by serial number."""

    total_bytes: int = 0
    held: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Serial number -> tag and bytes."""


class LiveMemory(TorchDispatchMode):  # type: ignore[misc]
    """Sees every allocation below autograd; `peaks` holds each phase's highest moment."""

    def __init__(self, *, wide: int) -> None:
        super().__init__()
        self.wide = wide
        """The vocabulary's size: a tensor whose last dimension it is holds logits or their gradient."""
        self.live: dict[int, Live] = {}
        self.live_bytes = 0
        self.resized: dict[int, Live] = {}
        """What an engine frees and fills again while the storage lives: its size is looked up each time."""
        self.born = 0
        self.phase_name = "load"
        self.tags: list[str] = []
        self.blind = False
        self.peaks: dict[str, Peak] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # first as DTensor, whose operations on what this rank holds come here again
        result = func(*args, **(kwargs or {}))
        if self.blind:
            return result
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any([self._see(tensor) for tensor in new]):  # all of them, not the first
            self._note_peak()
        return result

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is allocated now belongs to this phase."""
        before, self.phase_name = self.phase_name, name
        try:
            yield
        finally:
            self.phase_name = before

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """What is allocated now is not real."""
        before, self.blind = self.blind, True
        try:
            yield
        finally:
            self.blind = before

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """What is allocated now is for this."""
        self.tags.append(tag)
        try:
            yield
        finally:
            self.tags.pop()

    def known(self, tensors: Iterable[torch.Tensor]) -> None:
        """Storages that were there before and do not count."""
        for tensor in tensors:
            self._see(tensor)
            entry = self.live[tensor.untyped_storage()._cdata]
            self.live_bytes -= entry.bytes
            entry.bytes = 0

    def serials(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Which storages tensors are in, of those that were seen."""
        found = (self.live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {entry.serial for entry in found if entry is not None}

    def _see(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return False
        logits = tensor.dim() > 1 and tensor.shape[-1] == self.wide
        tag = self.tags[-1] if self.tags else "logits" if logits else self.phase_name
        self.born += 1
        entry = Live(self.born, tag, weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self.live[key] = entry
        self.live_bytes += entry.bytes
        if self.tags:
            self.resized[key] = entry
        return True

    def _forget(self, key: int) -> None:
        entry = self.live.pop(key, None)
        self.resized.pop(key, None)
        self.live_bytes -= entry.bytes if entry is not None else 0

    def _look_again(self) -> None:
        """Summing all storages at each allocation would take as long as the trace itself."""
        for entry in list(self.resized.values()):
            storage = entry.storage()
            now = 0 if storage is None else storage.nbytes()
            self.live_bytes += now - entry.bytes
            entry.bytes = now

    def _note_peak(self) -> None:
        self._look_again()
        if self.live_bytes > self.peaks.get(self.phase_name, Peak()).total_bytes:
            held = {entry.serial: (entry.tag, entry.bytes) for entry in self.live.values() if entry.bytes}
            self.peaks[self.phase_name] = Peak(self.live_bytes, held)

"""Track which tensors are alive while a model trains on fake tensors: each storage once, by the phase that made it.

    memory = LiveMemory(vocab_size=32_000)
    with FakeTensorMode(), memory:
        with memory.phase("forward"):
            ...
    memory.peaks["forward"].total_bytes

Bytes are those requested for storages, without an allocator's rounding and fragmentation.
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
class LiveStorage:
    """One storage that is alive."""

    serial: int
    tag: str
    storage: weakref.ref[Any]
    bytes: int
    """Size when last read: engines resize storages."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The highest point of a phase and the storages that were alive at it."""

    total_bytes: int = 0
    storages: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Tag and bytes by serial number."""


class LiveMemory(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that sees every allocation below autograd; `peaks` has the highest point of each phase."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        """A tensor whose last dimension this is holds logits or their gradient."""
        self.live: dict[int, LiveStorage] = {}
        self.live_bytes = 0
        self.resizable: dict[int, LiveStorage] = {}
        """Storages that an engine frees and refills: their size is read each time."""
        self.num_tracked = 0
        self.phase_name = "load"
        self.tags: list[str] = []
        self.is_paused = False
        self.peaks: dict[str, MemoryPeak] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: its operations on local shards arrive here again
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any([self._track(tensor) for tensor in new]):  # a list: all of them, not up to the first
            self._update_peak()
        return result

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute allocations inside to this phase."""
        before, self.phase_name = self.phase_name, name
        try:
            yield
        finally:
            self.phase_name = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore allocations inside, which no real run makes."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Attribute allocations inside to a purpose instead of to the phase."""
        self.tags.append(tag)
        try:
            yield
        finally:
            self.tags.pop()

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors as zero bytes: they existed before."""
        for tensor in tensors:
            self._track(tensor)
            entry = self.live[tensor.untyped_storage()._cdata]
            self.live_bytes -= entry.bytes
            entry.bytes = 0

    def serials(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the serial numbers of the tensors' storages, as far as they are tracked."""
        found = (self.live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {entry.serial for entry in found if entry is not None}

    def _track(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return False
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size
        tag = self.tags[-1] if self.tags else "logits" if is_logits else self.phase_name
        self.num_tracked += 1
        forget = weakref.ref(storage, lambda _: self._forget(key))
        entry = LiveStorage(self.num_tracked, tag, forget, storage.nbytes())
        self.live[key] = entry
        self.live_bytes += entry.bytes
        if self.tags:
            self.resizable[key] = entry
        return True

    def _forget(self, key: int) -> None:
        entry = self.live.pop(key, None)
        self.resizable.pop(key, None)
        self.live_bytes -= entry.bytes if entry is not None else 0

    def _read_sizes(self) -> None:
        """Only of resizable storages: summing up all of them at each allocation would double the time of a trace."""
        for entry in list(self.resizable.values()):
            storage = entry.storage()
            size = 0 if storage is None else storage.nbytes()
            self.live_bytes += size - entry.bytes
            entry.bytes = size

    def _update_peak(self) -> None:
        self._read_sizes()
        if self.live_bytes > self.peaks.get(self.phase_name, MemoryPeak()).total_bytes:
            storages = {entry.serial: (entry.tag, entry.bytes) for entry in self.live.values() if entry.bytes}
            self.peaks[self.phase_name] = MemoryPeak(self.live_bytes, storages)

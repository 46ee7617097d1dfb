"""What torch's compiler has done on this rank: compiled modules, graphs, graph breaks and failed guards."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


def compiled_modules(model: Any) -> int:
    """Return how many modules of a model run compiled."""
    return sum(module._compiled_call_impl is not None for module in model.modules())


@contextlib.contextmanager
def uncompiled_forward() -> Iterator[None]:
    """Run compiled layers without their compiled code: for a forward of unusual shapes that runs once."""
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerEvents:
    """What the compiler has done in this process so far, or between two readings."""

    graphs: int
    """Graphs that were compiled; those of later readings are recompilations."""
    graph_breaks: Counter[str]
    """Places where a graph ends in the middle of a layer, by the first line of torch's reason."""
    guard_failures: Counter[str]
    """Why a graph that was compiled earlier did not fit."""

    @classmethod
    def read(cls) -> CompilerEvents:
        """Read torch's own counters."""
        from torch._dynamo.utils import counters, guard_failures

        return cls(
            graphs=counters["stats"]["unique_graphs"],
            graph_breaks=Counter({_first_line(why): n for why, n in counters["graph_break"].items()}),
            guard_failures=Counter(_first_line(why) for found in guard_failures.values() for why in found),
        )

    def since(self, earlier: CompilerEvents) -> CompilerEvents:
        """Return what happened after an earlier reading."""
        return CompilerEvents(
            graphs=self.graphs - earlier.graphs,
            graph_breaks=self.graph_breaks - earlier.graph_breaks,
            guard_failures=self.guard_failures - earlier.guard_failures,
        )

    def counts(self) -> dict[str, int]:
        """Return the keys of a step's row."""
        return {"compiled_graphs": self.graphs, "graph_breaks": self.graph_breaks.total()}

    def warning(self, *, step: int, rank: int) -> str | None:
        """Return the line to print if any of this happened in a timed step, with the reason; None if nothing did."""
        if not self.graphs and not self.graph_breaks:
            return None
        parts = [f"{self.graphs} graphs compiled"] if self.graphs else []
        parts += [f"{self.graph_breaks.total()} graph breaks"] if self.graph_breaks else []
        reasons = [*self.graph_breaks, *self.guard_failures]
        why = f": {reasons[0]}" if reasons else ""
        return f"warning: {' and '.join(parts)} in step {step} on rank {rank}, which is timed{why}"


def _first_line(reason: str) -> str:
    return str(reason).strip().partition("\n")[0].strip()

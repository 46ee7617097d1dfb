"""Compile a model layer by layer, and count what the compiler does on this rank.

`torch.compile` on the whole model generates code for every layer; the layers of a decoder are the same code, so that
compiling one of them is enough (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). `module.compile`
works in place: the layers keep their class, their names and their hooks, so that DDP, DeepSpeed and FSDP2 wrap them as
they wrap any others. accelerate's `compile_regions` is not used: under DDP it compiles embedding, norm and output head
too, each with kernels of its own, and leaves `_orig_mod.` in the names of the parameters.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks

from toolkit.job.compilation import Compilation


def compile_layers(model: Any, compilation: Compilation, *, lengths_vary: bool) -> int:
    """Compile each decoder layer in place, before the engine wraps the model; return how many there are.

    A model without repeated layers is compiled as a whole. Where the lengths of batches vary, the layers are compiled
    for any length at once: torch would otherwise compile for the first length, and again at the second.
    """
    layers = list(_repeated_layers(model))
    for layer in layers if lengths_vary else []:
        layer.register_forward_pre_hook(torch.compiler.disable(_mark_lengths), with_kwargs=True)
    for module in layers or [model]:
        module.compile(backend=compilation.backend, mode=compilation.mode)
    return len(layers) or 1


def _repeated_layers(module: Any) -> Iterator[Any]:
    """The outermost lists of equal modules: not the experts inside of a layer."""
    if is_repeated_blocks(module):
        yield from module
    else:
        for child in module.children():
            yield from _repeated_layers(child)


# Dimensions of a layer's inputs that may be the length of the sequences, by the number of dimensions: of positions,
# of hidden states and rotary embeddings, and of a mask.
_LENGTH_DIMENSIONS = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}


def _mark_lengths(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark the length of a layer's inputs as dynamic, before the layer is called.

    `dynamic=True` would do so for the sizes of the weights too, which FSDP2 replaces in every forward: tracing the
    layers of a tiny model then takes 19 s of CPU time instead of 4.
    """
    tensors = list(_tensors([*args, *kwargs.values()]))
    length = tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else None  # hidden states come first
    for tensor in tensors:
        for dimension in _LENGTH_DIMENSIONS.get(tensor.dim(), ()):
            if tensor.shape[dimension] == length:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


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

"""Compile a model layer by layer: the layers of a decoder are the same code, so that compiling one of them is enough.

`module.compile` works in place: layers keep class, names and hooks, and engines wrap them like any others. accelerate's
`compile_regions` compiles embedding, norm and head too under DDP, and leaves `_orig_mod.` in the parameters' names.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks
from torch.utils._pytree import tree_leaves

from toolkit.job.job import Compilation


def start_compiler(compilation: Compilation) -> None:
    """Compile what all kernels need, in a thread: the first step would wait for it, with one core."""
    if compilation.backend == "inductor":
        _start(_prepare_cpp)


def _start(work: Callable[..., object], *args: object) -> threading.Thread:
    """A daemon, which a run that ends early does not wait for."""
    thread = threading.Thread(target=work, args=args, name="inductor-cpp", daemon=True)
    thread.start()
    return thread


def _prepare_cpp() -> None:
    """Probe the CPU's instruction sets at once and precompile inductor's header, unless this node has them."""
    with contextlib.suppress(Exception):  # the first kernel meets it again, and reports it
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

        names = x86_isa_checker()
        sets = [each for each in supported_vec_isa_list if all(name in names for name in str(each).split())]
        for probe in [_start(bool, each) for each in sets]:  # inductor itself probes one after the other
            probe.join()
        CppPythonBindingsCodeCache.load_async("", submit_fn=lambda _: None)  # compiles the header, and no kernel


def compile_layers(model: Any, compilation: Compilation, *, lengths_vary: bool) -> int:
    """Compile each decoder layer, or a model without repeated layers, in place; return how many modules were compiled.

    Where lengths vary, they are compiled for any length at once: torch would otherwise compile twice.
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

    With `dynamic=True` the sizes of the weights, which FSDP2 replaces, would be too: 19 s for a tiny model, not 4.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    length = tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else None  # hidden states come first
    for tensor in tensors:
        for dimension in _LENGTH_DIMENSIONS.get(tensor.dim(), ()):
            if tensor.shape[dimension] == length:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)

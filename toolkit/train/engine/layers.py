"""Layers of a decoder: compiled one by one, and checkpointed so that attention's outputs are kept.

Layers are the same code, so that compiling one of them is enough. `module.compile` works in place: they keep class,
names and hooks, and engines wrap them like any others. accelerate's `compile_regions` compiles embedding, norm and head
too under DDP, and leaves `_orig_mod.` in the parameters' names.

With `--activation_checkpointing_selective` only the rest of a layer is recomputed. The backward of attention's kernels
reads their inputs, which are recomputed, their output, and one statistic per query and head. Keeping the last two saves
the second run of the kernel (DistFlashAttn, https://arxiv.org/abs/2310.03294, section 3.3). torch's selective
checkpointing keeps them by operator, as torchtitan's mode `selective` does, beside matrix products.
"""

import contextlib
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from toolkit.engines.tensors import compiled_modules
from toolkit.errors import ToolkitError
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


# -- activation checkpointing that keeps what attention's kernels return

# SDPA's kernels, torch's `varlen_attn`, and flash-attn 2 and 3, from a package or from the hub.
KERNELS = re.compile(r"aten::_scaled_dot_product_\w+_attention\w*|torch_attn::_varlen_attn|\w+::_flash_attn_\w*forward")
kept: Counter[str] = Counter()  # how often the output of each kernel was kept, in this process


def keep_attention(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether an operator's output is kept: a policy of torch's selective checkpointing.

    Raises ToolkitError for attention with dropout: what is recomputed after it would draw other random numbers.
    """
    name = operator.name()
    if not KERNELS.fullmatch(name):
        return CheckpointPolicy.PREFER_RECOMPUTE
    names = [argument.name for argument in operator._schema.arguments]
    if dropout := (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"):
        why = f"--activation_checkpointing_selective does not work with dropout in attention, which is {dropout} here"
        raise ToolkitError(why, hint="leave it out, or set the attention dropout in the model's config.json to 0")
    kept[name] += 1
    return CheckpointPolicy.MUST_SAVE


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, keep_attention)


def prepare_checkpoints(model: Any, *, selective: bool) -> None:
    """Change what checkpoints the layers of a wrapped model: FSDP2's wrappers, or transformers' function.

    accelerate's wrappers do not restore the random state (1.15, `fsdp2_apply_ac`), so that dropout would differ when it
    is recomputed, and the gradient be wrong.
    """
    for module, name, function in _checkpoints(model):
        how: dict[str, Any] = {"preserve_rng_state": True} if isinstance(module, CheckpointWrapper) else {}
        how |= {"context_fn": CONTEXTS} if selective else {}
        if how:
            setattr(module, name, functools.partial(function, **how))


def keeps_attention(model: Any) -> bool:
    """Return True if layers are checkpointed with the policy, and it has kept outputs or was compiled with them."""
    functions = (function for _, _, function in _checkpoints(model))
    given = any(getattr(function, "keywords", {}).get("context_fn") is CONTEXTS for function in functions)
    return given and bool(kept or compiled_modules(model))


def _checkpoints(model: Any) -> Iterator[tuple[Any, str, Any]]:
    for module in model.modules():
        name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
        if (function := getattr(module, name, None)) is not None:
            yield module, name, function

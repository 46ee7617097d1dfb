"""Activation checkpointing that keeps what attention's kernels return, so that only the rest of a layer is recomputed.

A kernel's backward reads its inputs, which are recomputed, its output, and one statistic per query and head. Keeping
the last two saves the second run of the kernel (DistFlashAttn, https://arxiv.org/abs/2310.03294, section 3.3). torch's
selective checkpointing keeps them by operator, as torchtitan's mode `selective` does, beside matrix products.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from toolkit.engines.tensors import compiled_modules
from toolkit.errors import ToolkitError

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

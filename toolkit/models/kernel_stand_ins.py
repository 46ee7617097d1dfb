"""Stand-ins for the kernels of linear attention and state-space layers, which save what the kernels save.

Without flash-linear-attention, mamba-ssm and causal-conv1d, transformers computes these layers in Python: it loops over
the chunks of a row, which on fake tensors takes minutes, and saves each intermediate. Nobody trains so. Each stand-in
allocates the output, saves what the kernel's `save_for_backward` has, and in the backward allocates what the kernel
allocates at once. Read in flash-linear-attention (`ops/gated_delta_rule/chunk.py`, `ops/kda/chunk.py`), mamba-ssm
(`ops/triton/ssd_combined.py`, `ops/selective_scan_interface.py`) and causal-conv1d (`causal_conv1d_interface.py`), all
of summer 2026.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

CHUNK = 64  # tokens per chunk of flash-linear-attention; mamba-ssm's is an argument
SCAN_CHUNK = 2048  # but for Mamba 1


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    """A kernel by what it allocates: `made` is called with the inputs, for (output, saved, and a backward's buffers).

    Inputs are saved too, but for those of which the kernel saves another form.
    """

    @staticmethod
    def forward(ctx: Any, made: Callable[..., Any], *inputs: Any) -> Any:
        output, saved, ctx.buffers = made(*inputs)
        ctx.save_for_backward(*saved)
        ctx.inputs = [(each.shape, each.dtype, each.device) for each in inputs]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        buffers = ctx.buffers()
        shapes = zip(ctx.needs_input_grad[1:], ctx.inputs, strict=True)
        gradients = [torch.empty(i[0], dtype=i[1], device=i[2]) if needed else None for needed, i in shapes]
        del buffers, gradient
        return None, *gradients


def _delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, *, attention_matrices: int = 1, **_: Any) -> Any:
    """Gated and Kimi delta rules: keys and queries normalised, decays summed up, and one or two matrices per chunk."""

    def made(query: Any, key: Any, value: Any, g: Any, beta: Any) -> Any:
        rows, length, heads, width = value.shape
        key_heads, key_width = key.shape[2:]
        matrices = [value.new_empty(rows, length, heads, CHUNK) for _ in range(attention_matrices)]
        statistics = [query.new_empty(rows, length, key_heads, dtype=torch.float32) for _ in range(2)]
        saved = [torch.empty_like(query), torch.empty_like(key), *statistics, value, torch.empty_like(g), beta]
        # the decays as they came, beside their sums, where each channel of a key has one
        saved += [*matrices, *([g] if attention_matrices > 1 else [])]

        def buffers() -> Any:
            states = [value.new_empty(rows, -(-length // CHUNK), heads, key_width, width) for _ in range(2)]
            keys = [value.new_empty(rows, length, heads, key_width) for _ in range(3)]
            return states, keys, [torch.empty_like(value) for _ in range(3)]

        return torch.empty_like(value), saved, buffers

    return _Kernel.apply(made, query, key, value, g, beta), None


def _convolution(hidden_states: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
    """Its input and weights; the activation is recomputed."""
    del activation

    def made(states: Any, weight: Any, *bias: Any) -> Any:
        return torch.empty_like(states), [states, weight, *bias], lambda: None

    return _Kernel.apply(made, hidden_states, weight, *([] if bias is None else [bias]))


def _selective_scan(*inputs: Any, D: Any = None, z: Any = None, delta_bias: Any = None, **_: Any) -> Any:  # noqa: N803
    """Mamba 1: its inputs with neighbouring tokens, fp32 states at the ends of chunks, and what the gate multiplies."""

    def made(*inputs: Any) -> Any:
        inputs = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in inputs)
        (rows, width, length), states = inputs[0].shape, inputs[2].shape[1]
        ends = inputs[0].new_empty(rows, width, -(-length // SCAN_CHUNK), 2 * states, dtype=torch.float32)
        gated = [] if z is None else [torch.empty_like(inputs[0])]
        return torch.empty_like(inputs[0]), [*inputs, ends, *gated], lambda: None

    return _Kernel.apply(made, *inputs, *(each for each in (D, z, delta_bias) if each is not None))


def _mamba2(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,  # noqa: N803 - mamba-ssm's names
    D: Any,  # noqa: N803
    chunk_size: int,
    rmsnorm_weight: Any = None,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int = 64,
    ngroups: int = 1,
    **_: Any,
) -> Any:
    """Convolution, scan, gated norm and output projection in one: the projected input and the scan's output."""
    heads = A.shape[0]
    width = heads * headdim

    def made(projected: Any, *weights: Any) -> Any:
        rows, length, total = projected.shape
        state_size = (total - 2 * width - heads) // (2 * ngroups)
        scanned = projected.new_empty(rows, length, width)
        statistics = [projected.new_empty(rows, length, ngroups, dtype=torch.float32)] if has_norm else []

        def buffers() -> Any:
            chunks = -(-length // chunk_size)
            states = [
                projected.new_empty(rows, chunks, heads, headdim, state_size, dtype=torch.float32) for _ in range(2)
            ]
            return states, [projected.new_empty(rows, length, width + 2 * ngroups * state_size) for _ in range(2)]

        saved = [projected, *weights, scanned, *statistics]
        return torch.empty_like(scanned), saved, buffers

    has_norm = rmsnorm_weight is not None
    weights = [each for each in (conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight) if each is not None]
    output = _Kernel.apply(made, zxbcdt, *weights)
    # The product with the projection is part of the kernel: its input is recomputed, so the product saves no rows.
    return output if outproj_weight is None else _Projection.apply(output, outproj_weight, outproj_bias)


class _Projection(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, states: Any, weight: Any, bias: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            states, weight = states.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(weight)
        ctx.described = states.shape, states.dtype, bias
        return torch.nn.functional.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (weight,), (shape, dtype, bias) = ctx.saved_tensors, ctx.described
        needed = ctx.needs_input_grad
        return (
            gradient.new_empty(shape, dtype=dtype) if needed[0] else None,
            torch.empty_like(weight) if needed[1] else None,
            torch.empty_like(bias) if needed[2] and bias is not None else None,
        )


# By the names of the functions in transformers 5.23 whose place the kernels take (`use_kernel_func_from_hub_…`).
STAND_INS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": functools.partial(_delta_rule, attention_matrices=2),
    "causal_conv1d_fn": _convolution,
    "mamba2_split_conv1d_scan_combined": _mamba2,
    "mamba_selective_scan": _selective_scan,
}


@contextlib.contextmanager
def with_kernels() -> Iterator[None]:
    """Let transformers' models that are imported by now call the stand-ins."""
    replaced = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers.models.") and "modeling_" in module_name:
            for name, stand_in in STAND_INS.items():
                if name in vars(module):
                    replaced.append((module, name, vars(module)[name]))
                    setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)

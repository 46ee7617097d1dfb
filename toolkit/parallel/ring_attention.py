"""Context parallelism: accelerate's ring attention over FSDP2, and what a CPU needs for it.

A sequence is divided into `2 * cp` pieces, of which each rank holds an early and a late one, so that causal attention
gives every rank the same work. Rows are therefore padded to a multiple of `2 * cp` tokens: torch 2.13 stops in a tensor
error at 65 tokens, and at 66 it divides unevenly and says nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from toolkit.parallel.layout import ParallelLayout


def context_parallel_config(layout: ParallelLayout) -> Any:
    """Return accelerate's `ParallelismConfig` of a layout with context parallelism."""
    from accelerate import ParallelismConfig

    return ParallelismConfig(cp_size=layout.cp, dp_shard_size=layout.dp_shard)


@functools.cache
def ring_attention_on_cpu() -> None:
    """Give torch's context parallelism the attention kernels of a CPU; it dispatches CUDA's alone.

    Two handlers over torch's own ring templates. They wrap what they return, so no sharding rule is needed.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def unwrapped(values: Any) -> list[Any]:
        return [value._local_tensor if isinstance(value, DTensor) else value for value in values]

    def wrapped(mesh: Any, parts: Any) -> tuple[Any, ...]:
        return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts)

    def forward(op: Any, args: Any, kwargs: Any) -> Any:
        del op
        mesh, kwargs = args[0].device_mesh, dict(kwargs)
        if kwargs.pop("attn_mask", None) is not None:
            raise NotImplementedError("ring attention takes no mask")
        query, key, value, dropout, causal = (*unwrapped(args), 0.0, False)[:5]
        if dropout:
            raise NotImplementedError("the attention kernel of a CPU has no dropout")
        if key.shape[1] != query.shape[1]:  # the kernel has no grouped queries
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        parts = ring._templated_ring_attention(
            mesh.get_group(), 2, forward_op, query, key, value,
            is_causal=causal, dropout_p=0.0, scale=kwargs.get("scale"),
        )  # fmt: skip
        return wrapped(mesh, parts)

    def backward(op: Any, args: Any, kwargs: Any) -> Any:
        del op
        mesh, scale = args[1].device_mesh, kwargs.get("scale")
        gradient, query, key, value, out, logsumexp, _, causal = unwrapped(args)

        def kernel(
            *, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, scale: Any
        ) -> Any:
            return backward_op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)

        parts = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, kernel, grad_out=gradient, grad_out_name="grad_out",
            query=query, key=key, value=value, out=out, logsumexp=logsumexp, is_causal=causal, scale=scale,
        )  # fmt: skip
        return wrapped(mesh, parts)

    ring.custom_ops[forward_op], ring.custom_ops[backward_op] = forward, backward

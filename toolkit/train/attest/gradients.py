"""Look at the gradients once, in the moment between reduction and the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.train.attest.readings import is_fsdp2
from toolkit.train.attest.tensors import dtype_names, local_bytes, uncompiled
from toolkit.train.comm_hooks import registered_hook

Facts = dict[str, Any]


def read_gradients(trainer: Any) -> Facts:
    """Bytes of the reduced gradients that this rank holds, and the dtype that they travelled in."""
    wrapped = uncompiled(trainer.model_wrapped)
    reduce_dtype: str | None
    if hasattr(wrapped, "zero_optimization_stage"):
        tensors = deepspeed_gradients(wrapped)
        reduce_dtype = str(wrapped.communication_data_type).removeprefix("torch.")
    else:
        tensors = [p.grad for p in wrapped.parameters() if p.grad is not None]
        hook = registered_hook(wrapped)
        sent = None if hook is None else "+".join(sorted(hook.counter.dtypes))
        reduce_dtype = sent or fsdp2_reduce_dtype(wrapped) or dtype_names(tensors)
    return {
        "gradient_bytes": local_bytes(tensors),
        "gradient_dtype": dtype_names(tensors),
        "reduce_dtype": reduce_dtype,
    }


def deepspeed_gradients(engine: Any) -> list[Any]:
    """Under ZeRO-1 the whole gradients; later stages keep this rank's partition. Reduction buckets are not counted."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        flat = zero.grad_partitions_flat_buffer
        return [flat] if flat is not None else [p.grad for p in zero.fp32_partitioned_groups_flat if p.grad is not None]
    if stage < 2:
        return [p.grad for p in engine.module.parameters() if p.grad is not None]
    offloaded = [p.grad for p in zero.single_partition_of_fp32_groups if p.grad is not None]
    return offloaded or [g for group in zero.averaged_gradients.values() for g in (group or [])]


def fsdp2_reduce_dtype(wrapped: Any) -> str | None:
    """The dtype of the reduce-scatter, from the mixed-precision policy of the groups."""
    if not is_fsdp2(wrapped):
        return None
    from toolkit.train.attest.readings import fsdp_groups

    group = next(group for module in wrapped.modules() if is_fsdp2(module) for group in fsdp_groups(module))
    policy, parameter = group.mp_policy, next(wrapped.parameters())
    return str(policy.reduce_dtype or policy.param_dtype or parameter.dtype).removeprefix("torch.")


def watch_deepspeed_gradients(engine: Any, look: Callable[[], None]) -> None:
    """Call `look` once, when the first step's gradients are at their fullest.

    ZeRO-1 holds whole gradients through backward and drops the other ranks' part when it reduces them; later
    stages hold their partition until the optimizer step frees it.
    """
    stage = engine.zero_optimization_stage()
    _call_first(engine.optimizer, "reduce_gradients" if stage < 2 else "step", look)


def _call_first(target: Any, method: str, look: Callable[[], None]) -> None:
    """Put `look` in front of the next call of a method, once."""
    original = getattr(target, method)

    def first(*args: Any, **kwargs: Any) -> Any:
        delattr(target, method)  # the class's own method again
        look()
        return original(*args, **kwargs)

    setattr(target, method, first)

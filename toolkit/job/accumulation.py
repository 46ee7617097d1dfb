"""Gradients between accumulation steps: shards, or whole on every GPU until the last one.

FSDP2 can do both. Reduced in every accumulation step, gradients are fp32 shards, and each accumulation step sends them.
Reduced in the last one, whole gradients in the compute dtype wait on every GPU. The Trainer decides by
`sync_each_batch` in `accelerator_config.gradient_accumulation_kwargs` (transformers 5.23, `_run_epoch`; without it, all
but the last accumulation step run under `Accelerator.no_sync`). Every other engine has one way of its own.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError, shown

SHARDED, WHOLE = "sharded", "whole"
ACCUMULATE = (SHARDED, WHOLE)
KWARGS, SWITCH = "gradient_accumulation_kwargs", "sync_each_batch"


def chosen_accumulate(accumulate: str | None, accelerator_config: Mapping[str, Any]) -> str | None:
    """Return the user's choice, made by `accumulate` or in `accelerator_config`; None without one.

    Raises ToolkitError where the two contradict each other.

    >>> chosen_accumulate(None, {"gradient_accumulation_kwargs": {"sync_each_batch": True}})
    'sharded'
    """
    if accumulate not in (None, *ACCUMULATE):
        raise ToolkitError(f"accumulate is {shown(accumulate)}, expected {' or '.join(ACCUMULATE)}")
    kwargs = accelerator_config.get(KWARGS) or {}
    if not isinstance(kwargs, Mapping):
        raise ToolkitError(f"accelerator_config {KWARGS} is {shown(kwargs)}, expected keys and values")
    switch = kwargs.get(SWITCH)
    if not isinstance(switch, bool | None):
        raise ToolkitError(f"accelerator_config {SWITCH} is {shown(switch)}, expected true or false")
    configured = None if switch is None else SHARDED if switch else WHOLE
    if accumulate is not None and configured is not None and accumulate != configured:
        raise ToolkitError(
            f"accumulate is {accumulate}, but accelerator_config has {SWITCH}: {str(switch).lower()}, which means"
            f" {configured}",
            hint="leave one of them out",
        )
    return accumulate or configured


def with_accumulate(accelerator_config: Mapping[str, Any], accumulate: str) -> dict[str, Any]:
    """Return an `accelerator_config` that puts a choice in effect, with everything else as it was given.

    >>> with_accumulate({"even_batches": False}, "sharded")
    {'even_batches': False, 'gradient_accumulation_kwargs': {'sync_each_batch': True}}
    """
    kwargs = dict(accelerator_config.get(KWARGS) or {})
    return {**accelerator_config, KWARGS: {**kwargs, SWITCH: accumulate == SHARDED}}

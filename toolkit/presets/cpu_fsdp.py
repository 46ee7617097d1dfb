"""FSDP2 on a CPU: for rehearsals and tests, where accelerate would silently run DDP instead.

accelerate 1.15 turns only MULTI_GPU (and other accelerators) into FSDP: on a CPU `AcceleratorState` keeps
MULTI_CPU, although an FSDP plugin was given. This finishes what it left out. The attestation proves that it worked.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def enable_fsdp_on_cpu() -> None:
    """Let an FSDP plugin be in force on MULTI_CPU too; nothing changes for a run without FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    from accelerate.state import AcceleratorState

    original = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return  # it is already

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _finish(self, kwargs.get("fsdp_plugin"))

    AcceleratorState.__init__ = init


def _finish(state: Any, fsdp_plugin: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    if fsdp_plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    if state._mixed_precision != "no":
        fsdp_plugin.set_mixed_precision(state._mixed_precision)
    if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # memory is pinned for a GPU, and none is there
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = fsdp_plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP

"""FSDP2 on a CPU, which accelerate 1.15 replaces by DDP without a word."""

from __future__ import annotations

import functools
from typing import Any

from toolkit.engines.fsdp2 import uses_fsdp


def enable_fsdp_on_cpu(*, for_any_script: bool = False) -> None:
    """Let accelerate run FSDP2 on a CPU, for rehearsals and tests; a run without FSDP is not affected.

    `for_any_script`: FSDP2 may also be switched on by a script's own `TrainingArguments` later.

    accelerate 1.15 turns MULTI_GPU (and other accelerators) into FSDP, but keeps MULTI_CPU although an FSDP plugin was
    given, and would silently run DDP. The run-time verification of each run checks that FSDP2 is in effect.
    """
    if not uses_fsdp() and not for_any_script:
        return
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return  # patched already

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning memory needs a GPU
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init

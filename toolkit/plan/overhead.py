"""GPU memory that no tensor asks for: CUDA, the communication library, and what the allocator loses.

    >>> overhead_bytes(engine, allocated_bytes=60 * 2**30)  # zero3 on several ranks
    5505443430

Ranges that others measured are in `docs/plan.md`; the values here are inside them. None was measured by us, there was
no GPU at hand: `too_close` is as wide as that deserves.
"""

from __future__ import annotations

from toolkit.plan.engine import Engine
from toolkit.units import MIB

# A CUDA context with cuBLAS and its kernels: 0.5 to 0.9 GiB are reported.
CONTEXT_BYTES = 700 * MIB
# The first NCCL communicator: 0.4 to 1.5 GiB are reported; a second one where ranks also form groups.
COMMUNICATOR_BYTES = 800 * MIB
# torch's allocator takes memory from the driver in blocks of 2 MiB (small) and 20 MiB (large).
ROUNDING_BYTES = 64 * MIB
# Share of allocated memory that is reserved and not usable at the peak. Reported: ZeRO-2 36.2 of 36.5 GB used, FSDP1
# 43.9 of 70.1 GB, which streams and `recordStream` explain and FSDP2 does without. The others are assumed.
FRAGMENTATION = {"none": 0.02, "ddp": 0.02, "fsdp2": 0.04, "replicate": 0.02, "shard_optimizer": 0.02}
FRAGMENTATION |= {"shard_grad_op": 0.02, "full_shard": 0.06, "hybrid_shard": 0.06}


def overhead_bytes(engine: Engine, *, allocated_bytes: int) -> int:
    """Beside what is allocated."""
    groups = 0 if engine.world_size == 1 else 2 if engine.sharding == "hybrid_shard" else 1
    key = engine.sharding if engine.kind == "deepspeed" else engine.kind
    lost = int(allocated_bytes * FRAGMENTATION[key])
    return CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + ROUNDING_BYTES + lost

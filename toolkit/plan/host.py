"""Host memory of a machine, all its ranks together, and bytes on its disk.

    >>> host_memory(engine, weights, states, job).peak_bytes

Offloaded tensors are page-locked, and torch's allocator of such memory rounds every block up to a power of two
(`CachingHostAllocator`), so that a block of 5 GiB takes 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.plan.engine import Engine
from toolkit.plan.job import Job
from toolkit.plan.states import FP32, STATES, ModelStates
from toolkit.plan.weights import Weights
from toolkit.units import MIB

# The training script, deepspeed and peft imported, nothing loaded: 476 MB resident at most (torch's CPU build).
# CUDA's libraries add to it on a GPU; that was not measured.
PROCESS_BYTES = 500 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Of one machine."""

    loading_bytes: int
    training_bytes: int
    early_bytes: int
    """Offloaded before the first step; Adam's states come with it."""
    disk_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The worse of the two."""
        return max(self.loading_bytes, self.training_bytes)


def host_memory(engine: Engine, weights: Weights, states: ModelStates, job: Job) -> HostMemory:
    """Of the machine with the most ranks."""
    ranks = min(engine.world_size, job.gpus_per_machine)
    processes = ranks * PROCESS_BYTES
    early = ranks * sum(_early_blocks(engine, weights, states))
    return HostMemory(
        loading_bytes=processes + _loading(engine, weights, ranks) + (early if engine.shards_parameters else 0),
        early_bytes=early,
        training_bytes=processes + early + ranks * _late_bytes(engine, states),
        disk_bytes=ranks * _disk(engine, states),
    )


def _loading(engine: Engine, weights: Weights, ranks: int) -> int:
    """fp32 weights in host memory until they are on the GPU: every rank its own, under FSDP2 only rank 0's
    (`fsdp_cpu_ram_efficient_loading`), under ZeRO-3 a tensor at a time."""
    whole = FP32 * (weights.num_trained + weights.num_frozen - weights.num_quantized) + weights.quantized_bytes
    if engine.kind == "fsdp2":
        return whole
    if engine.shards_parameters:
        return ranks * FP32 * weights.largest
    return ranks * whole


def _late_bytes(engine: Engine, states: ModelStates) -> int:
    """What a rank keeps in host memory from its first step on: DeepSpeed too leaves Adam's states to that
    (`initialize_optimizer_states`)."""
    if engine.offload_optimizer != "cpu":
        return 0
    if engine.kind == "fsdp2":
        return states.gradient_bytes + states.optimizer_bytes
    return STATES * (states.optimizer_bytes // (STATES + FP32))


def _early_blocks(engine: Engine, weights: Weights, states: ModelStates) -> Iterator[int]:
    """What a rank keeps in host memory as soon as its engine is made, block by block."""
    if engine.offload_optimizer is None:
        return
    if engine.kind == "fsdp2":
        yield states.parameter_bytes
        return
    share = states.optimizer_bytes // (STATES + FP32)
    rounded = _power_of_two if engine.pins else int
    bit16 = engine.element_bytes
    if engine.offload_optimizer == "cpu":
        yield rounded(FP32 * share)  # masters
    yield rounded(FP32 * share)  # gradients as the optimizer reads them
    yield rounded(bit16 * share)  # the updated parameters on their way back, or ZeRO-3's partition of gradients
    if not engine.shards_parameters:
        yield rounded(bit16 * weights.largest_trained)
    elif engine.offload_param == "cpu":
        yield rounded(states.parameter_bytes - states.gathered_bytes)
    if engine.offload_optimizer == "nvme":
        yield 4 * FP32 * min(share, engine.sub_group)  # buffers that a sub-group is read into (docs/nvme.md)


def _disk(engine: Engine, states: ModelStates) -> int:
    """On NVMe: masters, states and the gradients that are swapped with them, and parameter shards (docs/nvme.md)."""
    total = 0
    if engine.offload_optimizer == "nvme":
        total += states.optimizer_bytes + FP32 * (states.optimizer_bytes // (STATES + FP32))
    if engine.offload_param == "nvme":
        total += states.parameter_bytes - states.gathered_bytes
    return total


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length() if size else 0

"""Host memory of one node, all its ranks together, and bytes on its disk.

Offloaded tensors are page-locked, and torch's allocator for such memory rounds every block up to a power of two
(`CachingHostAllocator`): a block of 5 GiB takes 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.plan.engine_settings import EngineSettings
from toolkit.plan.model_states import ADAM_BYTES, FP32_BYTES, JobWeights, ModelStates
from toolkit.plan.planned_job import PlannedJob
from toolkit.units import MIB

# The training script with deepspeed and peft imported and nothing loaded: at most 476 MB resident (torch's CPU build).
# CUDA's libraries add to it on a GPU; that has not been measured.
PROCESS_BYTES = 500 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of one node."""

    loading_bytes: int
    training_bytes: int
    before_first_step_bytes: int
    """Offloaded states that exist before the first step; Adam's states are created in it."""
    disk_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The larger of loading and training."""
        return max(self.loading_bytes, self.training_bytes)


def host_memory(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> HostMemory:
    """Return the host memory of the node with the most ranks."""
    ranks = min(engine.world_size, job.gpus_per_node)
    processes = ranks * PROCESS_BYTES
    offloaded = ranks * sum(_offloaded_blocks(engine, weights, states))
    loading = processes + _loading(engine, weights, ranks)
    staged = _staged(engine, weights, states, ranks) if job.async_save else 0
    return HostMemory(
        loading_bytes=loading + (offloaded if engine.shards_parameters else 0),
        before_first_step_bytes=offloaded,
        training_bytes=processes + offloaded + ranks * _created_in_first_step(engine, states) + staged,
        disk_bytes=ranks * _disk(engine, states),
    )


def _loading(engine: EngineSettings, weights: JobWeights, ranks: int) -> int:
    """Weights until they are on the GPU: every rank's own, under FSDP2 only rank 0's
    (`fsdp_cpu_ram_efficient_loading`), under ZeRO-3 one tensor at a time. If an engine shards 4-bit weights, rank 0
    quantizes all of them first (`toolkit/train/model/four_bit.py`)."""
    parameters = weights.held_bytes(engine.element_bytes)
    if engine.sharded_at_load:  # each rank reads its own parts of one tensor after the other
        return ranks * weights.largest_bytes(engine.element_bytes)
    if engine.kind == "fsdp2" or (engine.shards_parameters and weights.in_4bit):
        return parameters
    if engine.shards_parameters:
        return ranks * weights.largest_bytes(engine.element_bytes)
    return ranks * parameters


def _created_in_first_step(engine: EngineSettings, states: ModelStates) -> int:
    """Adam's states, which DeepSpeed too creates in the first step (`initialize_optimizer_states`)."""
    if engine.offload_optimizer != "cpu":
        return 0
    if engine.kind == "fsdp2":
        return states.gradient_bytes + states.optimizer_bytes
    return ADAM_BYTES * _optimizer_elements(states)


def _staged(engine: EngineSettings, weights: JobWeights, states: ModelStates, ranks: int) -> int:
    """Copies of what `--async_save` writes: each rank's shards. Of a model that was sharded at load rank 0 gathers the
    weights instead; adapters, which it writes at once, are not copied."""
    trained = FP32_BYTES * weights.num_trained
    if engine.sharded_at_load:
        return ranks * states.optimizer_bytes + (0 if weights.num_frozen else trained)
    share = trained // engine.shard_ranks if weights.num_frozen else states.parameter_bytes
    return ranks * (share + states.optimizer_bytes)


def _optimizer_elements(states: ModelStates) -> int:
    """Elements of a rank's optimizer partition under DeepSpeed."""
    return states.optimizer_bytes // (ADAM_BYTES + FP32_BYTES)


def _offloaded_blocks(engine: EngineSettings, weights: JobWeights, states: ModelStates) -> Iterator[int]:
    """Blocks of host memory that one rank allocates when its engine is built."""
    if engine.offload_optimizer is None:
        return
    if engine.kind == "fsdp2":
        yield states.parameter_bytes - states.persistent_bytes
        return
    elements = _optimizer_elements(states)
    rounded = _power_of_two if engine.pins_memory else int
    if engine.offload_optimizer == "cpu":
        yield rounded(FP32_BYTES * elements)  # master weights
    yield rounded(FP32_BYTES * elements)  # gradients as the optimizer reads them
    # Updated parameters on their way back to the GPU, or ZeRO-3's partition of the gradients.
    yield rounded(engine.element_bytes * elements)
    if not engine.shards_parameters:
        yield rounded(engine.element_bytes * weights.largest_trained)
    elif engine.offload_param == "cpu":
        yield rounded(states.parameter_bytes - states.persistent_bytes)
    if engine.offload_optimizer == "nvme":
        # Buffers that a sub-group is read into (docs/how-to/optimizers.md).
        yield 4 * FP32_BYTES * min(elements, engine.sub_group)


def _disk(engine: EngineSettings, states: ModelStates) -> int:
    """NVMe: master weights, Adam's states and gradients, and parameter shards (docs/how-to/optimizers.md)."""
    swapped = 0
    if engine.offload_optimizer == "nvme":
        swapped += states.optimizer_bytes + FP32_BYTES * _optimizer_elements(states)
    if engine.offload_param == "nvme":
        swapped += states.parameter_bytes - states.persistent_bytes
    return swapped


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length() if size else 0

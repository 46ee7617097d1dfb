"""Memory of an engine apart from its model states on the GPU: buffers, CUDA's overhead, host memory and disk.

Read in the source of deepspeed 0.19.8, torch 2.13 and accelerate 1.15, named at each figure. One H200 was
compared (docs/evidence/gpu.md); published ranges for the overhead are in `docs/concepts/plan.md`.

Offloaded tensors are page-locked, and torch's allocator for such memory rounds every block up to a power of two
(`CachingHostAllocator`): a block of 5 GiB takes 8.
"""

from dataclasses import dataclass

from toolkit.engines.engine import EngineSettings
from toolkit.engines.planned import ModelStates
from toolkit.engines.zero import optimizer_elements
from toolkit.models.job_weights import FP32_BYTES, JobWeights
from toolkit.plan.planned_job import PlannedJob
from toolkit.units import GIB, MIB, gib

# A CUDA context with cuBLAS and its kernels: 0.5 to 0.9 GiB are reported.
CONTEXT_BYTES = 700 * MIB
# The first NCCL communicator: 0.4 to 1.5 GiB are reported. Ranks that also form groups need a second one.
COMMUNICATOR_BYTES = 800 * MIB
# torch's allocator takes memory from the driver in blocks of 2 MiB (small) and 20 MiB (large).
ROUNDING_BYTES = 64 * MIB
# Reserved beside what is allocated at the peak: blocks that fit nothing else. Model states stay where they are;
# activations come and go with every layer, and the full logits are copied, cast and shifted by a row. Shares of these,
# from what fms-acceleration measured with both figures on one GPU (21 jobs); they hold for ZeRO-2 and ZeRO-3 of other
# sources (docs/evidence/plan-accuracy.md). FSDP1 reserves more, because of `recordStream`, which FSDP2 does not use.
UNUSABLE_OF_ACTIVATIONS, UNUSABLE_OF_LOGITS = 0.12, 0.45
# The same with `expandable_segments`, whose blocks grow in pages of 2 MiB: a block that is too small is no loss. What
# stays was not measured; a part of the rounding of each tensor, so the same for both. It saves nothing in DeepSpeed's
# step: of one full fine-tune under ZeRO-3, ms-swift reports 42 GiB without and 44 with it.
UNUSABLE_IF_EXPANDABLE = 0.03
# The largest logits of those jobs. Two public jobs with 34 and 47 GiB of logits fitted GPUs on which the share of 45 %
# alone would have taken 15 and 21 GiB.
LARGEST_FITTED_LOGITS_BYTES = 18 * GIB

# The training script with deepspeed and peft imported and nothing loaded: at most 476 MB resident (torch's CPU build).
# CUDA's libraries add to it on a GPU; that has not been measured.
PROCESS_BYTES = 500 * MIB


def overhead_bytes(
    engine: EngineSettings,
    *,
    activation_bytes: int,
    logits_bytes: int,
    step_bytes: int = 0,
    expandable_segments: bool = False,
) -> int:
    """Return the GPU memory that belongs to no tensor: CUDA context, NCCL, rounding and fragmentation.

    `step_bytes` are allocated in the step of a full fine-tune.
    """
    shared = min(logits_bytes, LARGEST_FITTED_LOGITS_BYTES)
    unusable = int(UNUSABLE_OF_ACTIVATIONS * activation_bytes + UNUSABLE_OF_LOGITS * shared)
    if expandable_segments:
        unusable = int(UNUSABLE_IF_EXPANDABLE * (activation_bytes + logits_bytes))
    return driver_bytes(engine) + ROUNDING_BYTES + unusable + int(engine.traits.fragments_in_step * step_bytes)


def driver_bytes(engine: EngineSettings) -> int:
    """Return what is in use beside torch's allocator: CUDA's context and NCCL's communicators."""
    return CONTEXT_BYTES + engine.num_groups * COMMUNICATOR_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of one node, all its ranks together."""

    loading_bytes: int
    training_bytes: int
    before_first_step_bytes: int  # offloaded states that exist before the first step; Adam's states are created in it
    disk_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The larger of loading and training."""
        return max(self.loading_bytes, self.training_bytes)

    @property
    def disk_text(self) -> str:
        """What is on the node's disk, for people, after its host memory; empty where nothing is."""
        return f", {gib(self.disk_bytes)} on its disk" if self.disk_bytes else ""


def host_memory(engine: EngineSettings, weights: JobWeights, states: ModelStates, job: PlannedJob) -> HostMemory:
    """Return the host memory of the node with the most ranks."""
    ranks = min(engine.world_size, job.gpus_per_node)
    processes, offloaded = ranks * PROCESS_BYTES, ranks * sum(engine.traits.offloaded_blocks(engine, weights, states))
    # NVMe has master weights, Adam's states and gradients, and parameter shards (docs/how-to/optimizers.md).
    on_disk = 0
    if engine.offload_optimizer == "nvme":
        on_disk += states.optimizer_bytes + FP32_BYTES * optimizer_elements(engine, states)
    if engine.offload_param == "nvme":
        on_disk += states.parameter_bytes - states.persistent_bytes
    created = engine.traits.created_on_host(engine, weights, states) if engine.offload_optimizer == "cpu" else 0
    staged = _staged(engine, weights, states, ranks) if job.async_save else 0
    return HostMemory(
        loading_bytes=processes + _loading(engine, weights, ranks) + (offloaded if engine.shards_parameters else 0),
        before_first_step_bytes=offloaded,
        training_bytes=processes + offloaded + ranks * (created + checkpointed_on_host(engine, weights, job)) + staged,
        disk_bytes=ranks * on_disk,
    )


def checkpointed_on_host(engine: EngineSettings, weights: JobWeights, job: PlannedJob) -> int:
    """Return what one rank keeps there of a micro-batch: the input of each layer, in page-locked blocks."""
    if not (job.activation_checkpointing and job.activation_checkpointing_offload):
        return 0
    element = FP32_BYTES if engine.autocasts and not weights.frozen else engine.element_bytes
    rows = -(-job.tokens_per_forward // engine.ranks_per_sequence)
    block = rows * weights.shape.hidden_size * element
    return weights.shape.num_layers * (1 << (block - 1).bit_length())


def _loading(engine: EngineSettings, weights: JobWeights, ranks: int) -> int:
    """Weights until they are on the GPU: every rank's own, under FSDP2 only rank 0's
    (`fsdp_cpu_ram_efficient_loading`), under ZeRO-3 one tensor at a time. If an engine shards 4-bit weights, rank 0
    quantizes all of them first (`toolkit/train/model/four_bit.py`)."""
    if engine.sharded_at_load:  # each rank reads its own parts of one tensor after the other
        return ranks * weights.largest_bytes(engine.element_bytes)
    if engine.traits.loads_once(engine, weights):
        return weights.held_bytes(engine.element_bytes)
    largest_or_all = weights.largest_bytes if engine.shards_parameters else weights.held_bytes
    return ranks * largest_or_all(engine.element_bytes)


def _staged(engine: EngineSettings, weights: JobWeights, states: ModelStates, ranks: int) -> int:
    """Copies of what `--async_save` writes: each rank's shards. Of a model that was sharded at load rank 0 gathers the
    weights instead; adapters, which it writes at once, are not copied."""
    trained = FP32_BYTES * weights.num_trained
    if engine.sharded_at_load:
        return ranks * states.optimizer_bytes + (0 if weights.num_frozen else trained)
    share = trained // engine.shard_ranks if weights.num_frozen else states.parameter_bytes
    return ranks * (share + states.optimizer_bytes)

"""Planned seconds of an optimizer step, tokens per second and MFU, each as a range from best to worst case.

Nothing here was fitted to or checked on a GPU by this project. Rates are published measurements, each with its source;
`tests/plan/test_step_time.py` checks the range against MosaicML's published A100 runs (docs/concepts/communication.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.hardware.gpu_table import GIGA, Gpu
from toolkit.models.flops import flops_of
from toolkit.models.optimizers import OPTIMIZERS, UpdatedTensor
from toolkit.models.shape import ModelShape
from toolkit.parallel.layout import DIMENSIONS
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Collective, Interconnect, Range
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import TrainingSetup, stage_shape

# Best measured share of the dense peak in a large bf16 matrix multiplication (stas00/ml-engineering,
# compute/accelerator, "Maximum Achievable Matmul FLOPS", 2025); the highest of these for GPUs without an entry.
BEST_MATMUL_SHARE = {
    "a100-40gb": 0.869,
    "a100-80gb": 0.869,
    "a100-40gb-pcie": 0.811,
    "a100-80gb-pcie": 0.811,
    "h100-sxm": 0.803,
    "gh200-96gb": 0.836,
    "mi250x": 0.767,
    "mi300x": 0.601,
}
UNLISTED_MATMUL_SHARE = 0.869
# Share of the dense peak in eager training, communication included: torchtitan's Llama 3.1 8B, FSDP2 without
# compilation on 8 H100, "33 % MFU" (benchmarks/llama3_h100_202412_torchtitan.md). An untuned model or a slower host
# gets less.
EAGER_TRAINING_SHARE = 0.33

# Memory traffic that no kernel avoids, in the best case: each saved activation written once and read once (34 bytes per
# element of the hidden size, of which tensor parallelism divides 24: Korthikanti et al., sections 4.1 and 4.2.1,
# https://arxiv.org/abs/2205.05198), and fp32 logits and their gradient each written and read. In the worst case it is
# part of the share above.
WHOLE_BYTES_MOVED, SPLIT_BYTES_MOVED = 2 * 10, 2 * 24
LOGITS_BYTES_MOVED = 4 * 4

# An optimizer reads parameter and gradient and writes the parameter, in fp32; it reads and writes each of its states.
UPDATE_BYTES, STATE_ACCESSES = 12, 2
MEMORY_SHARE: Range = (0.6, 0.95)  # of the data sheet's bandwidth; STREAM-like kernels reach about 0.9
# AdamW on the host, seconds per 1e9 parameters on all cores of a node: ZeRO-Offload paper, table 4 (DeepSpeed's CPU
# Adam 0.22 to 0.26, torch's 1.4 to 1.5, two sockets, https://arxiv.org/abs/2101.06840).
HOST_ADAM_SECONDS: dict[str, Range] = {"deepspeed": (0.22, 0.52), "fsdp2": (0.22, 1.5)}
PCIE_SHARE: Range = (0.4, 0.87)  # 55 of 63 GB/s measured with pinned memory; two GPUs may share a switch
DISK_BYTES_PER_SECOND: Range = (1 * GIGA, 25 * GIGA)  # of a node with one disk, or several; `--nvme-gb-per-second`
# DeepSpeed's `overlap_comm` is off below stage 3, so the computation waits for reductions.
SHARDINGS_WITHOUT_OVERLAP = ("shard_optimizer", "shard_grad_op", "replicate")


@dataclass(frozen=True, kw_only=True, slots=True)
class DimensionTraffic:
    """What each GPU sends in an optimizer step along one dimension of the mesh."""

    dimension: str
    sent_bytes: int
    seconds: Range  # without overlap
    crosses_nodes: bool


def dimension_traffic(collectives: Iterable[Collective], interconnect: Interconnect) -> tuple[DimensionTraffic, ...]:
    """Return the traffic of each dimension that has any, from the outermost to the innermost."""
    planned = tuple(collectives)
    by_dimension = {name: [each for each in planned if each.dimension == name] for name in DIMENSIONS}
    return tuple(
        DimensionTraffic(
            dimension=name,
            sent_bytes=communication_bytes(own),
            seconds=_sum(map(interconnect.seconds, own)),
            crosses_nodes=any(map(interconnect.crosses_nodes, own)),
        )
        for name, own in by_dimension.items()
        if own
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Planned times of one optimizer step; every range is (low, high)."""

    step_seconds: Range
    compute_seconds: Range
    communication_seconds: Range  # all collectives, without overlap
    offload_seconds: Range  # transfers to and from host and disk, and AdamW on the host; (0, 0) without offload
    optimizer_seconds: Range
    tokens_per_second_per_gpu: Range
    mfu: Range
    communication_bytes_per_step: int
    tokens_per_step_per_gpu: int
    flops_per_token: int  # operations that MFU counts: full attention, all parameters that a token passes through
    offload_efficiency: Range | None = None
    """Share of its speed that a GPU keeps if transfers of model states overlap nothing; None without offload.

    ZeRO-Infinity's AIT·bw / (AIT·bw + peak) (section 4.1, https://arxiv.org/abs/2104.07857), where the arithmetic
    intensity AIT is the operations per transferred byte.
    """


def step_time(
    setup: TrainingSetup, interconnect: Interconnect, *, nvme_bytes_per_second: int | None = None
) -> StepTime | None:
    """Return the range from everything overlapping at the best rates to nothing overlapping at the worst.

    None if the GPU's peak in the compute dtype is unknown.
    """
    preset, precision = setup.preset, setup.mixed_precision or setup.preset.mixed_precision
    peak = interconnect.gpu.peak_flops("fp32" if precision == "no" else precision)
    if peak is None or setup.job.method.method != SFT:  # of other methods no speed is planned
        return None
    steps, ranks_per_batch = setup.accumulation_steps, 1 if setup.layout is None else setup.layout.ranks_per_batch
    # Ranks of one batch divide its work; ranks that split layers each have all of its tokens.
    tokens, own_tokens = setup.job.tokens_per_micro_batch * steps // ranks_per_batch, setup.local_tokens * steps
    if preset.engine == "pipeline":  # each has all tokens, and some of the layers
        own_tokens //= ranks_per_batch
    adapters, gpu, tp = setup.weights.num_trained if setup.weights.adapters else 0, interconnect.gpu, setup.engine.tp
    length, recompute = setup.job.tokens_per_row, setup.job.activation_checkpointing
    flops = flops_of(setup.shape, seq_length=length, num_adapter_params=adapters, recompute=recompute)
    operations = flops.hardware_flops * tokens
    low, high = compute_seconds(gpu, setup.shape, tp=tp, peak=peak, tokens=own_tokens, flops=operations)
    bubble = _bubble_factor(setup)
    compute = low * bubble, high * bubble
    collectives = step_collectives(setup)
    communication = _sum(map(interconnect.seconds, collectives))
    blocking = sum(interconnect.seconds(collective)[0] for collective in collectives if collective.blocks)
    optimizer = _optimizer_seconds(setup, interconnect)
    offload = _offload_seconds(setup, interconnect, nvme_bytes_per_second)
    serial = preset.engine == "deepspeed" and preset.sharding in SHARDINGS_WITHOUT_OVERLAP
    overlapped = compute[0] + communication[0] if serial else max(compute[0] + blocking, communication[0])
    low = max(overlapped, offload[0]) + optimizer[0]
    high = compute[1] + communication[1] + offload[1] + optimizer[1]
    speed = tokens / high, tokens / low
    efficiency = None
    if preset.offload_optimizer or preset.offload_param:
        efficiency = compute[0] / (compute[0] + offload[1]), compute[1] / (compute[1] + offload[0])
    return StepTime(
        step_seconds=(low, high),
        compute_seconds=compute,
        communication_seconds=communication,
        offload_seconds=offload,
        optimizer_seconds=optimizer,
        tokens_per_second_per_gpu=speed,
        mfu=(speed[0] * flops.model_flops / peak, speed[1] * flops.model_flops / peak),
        communication_bytes_per_step=communication_bytes(collectives),
        tokens_per_step_per_gpu=tokens,
        flops_per_token=flops.model_flops,
        offload_efficiency=efficiency,
    )


def _bubble_factor(setup: TrainingSetup) -> float:
    """Time of a step over that of the average stage, which waits for the others, the slowest of them included.

    A rank of a pipeline computes its layers only, and the last one the head besides.
    """
    settings = setup.job.pipeline
    if setup.preset.engine != "pipeline" or settings is None:
        return 1.0
    job, parts = setup.job, [stage_shape(setup.shape, settings, rank) for rank in range(settings.ranks)]
    length, recompute = job.tokens_per_row, job.activation_checkpointing
    flops = [flops_of(part, seq_length=length, recompute=recompute, count_embeddings=False) for part in parts]
    work = [each.hardware_flops for each in flops]
    return settings.bubble_factor(setup.accumulation_steps, slowest=max(work) / (sum(work) / len(work)))


def compute_seconds(gpu: Gpu, shape: ModelShape, *, tp: int, peak: float, tokens: int, flops: int) -> Range:
    """Return the seconds in which one GPU computes `flops` operations on `tokens` tokens of these layers.

    `peak` is that of the compute dtype; with `tp` above 1 each layer is split over as many GPUs.
    """
    best = BEST_MATMUL_SHARE.get(gpu.name.split(",")[0], UNLISTED_MATMUL_SHARE)
    moved = WHOLE_BYTES_MOVED + SPLIT_BYTES_MOVED / tp
    token_bytes = moved * shape.hidden_size * shape.num_layers + LOGITS_BYTES_MOVED * shape.vocab_size
    bandwidth = gpu.memory_bytes_per_second
    slowest_moving, moving = (
        0.0 if bandwidth is None else tokens * token_bytes / (bandwidth * share) for share in MEMORY_SHARE
    )
    matmuls = flops / (peak * best)
    # A small model moves more than it computes: its share of the peak can be below that of any published run.
    return matmuls + moving, max(flops / (peak * EAGER_TRAINING_SHARE), matmuls + slowest_moving)


def _optimizer_share(setup: TrainingSetup) -> float:
    if "optimizer" not in setup.preset.sharded_parts:
        return setup.weights.num_trained
    sharing = setup.engine.ranks_sharing
    return sum(tensor.num_elements / sharing(tensor) for layer in setup.trained for tensor in layer)


def _optimizer_seconds(setup: TrainingSetup, interconnect: Interconnect) -> Range:
    """Memory traffic of the optimizer on the GPU; an offloaded one is part of the offload."""
    bandwidth = interconnect.gpu.memory_bytes_per_second
    if setup.preset.offload_optimizer or bandwidth is None:
        return 0.0, 0.0
    tensors = (UpdatedTensor(shape=tensor.shape) for layer in setup.trained for tensor in layer)
    states = OPTIMIZERS[setup.job.optim].state_bytes(tensors) / max(setup.weights.num_trained, 1)
    moved = (UPDATE_BYTES + STATE_ACCESSES * states) * _optimizer_share(setup)
    return moved / (bandwidth * MEMORY_SHARE[1]), moved / (bandwidth * MEMORY_SHARE[0])


def _offload_seconds(setup: TrainingSetup, interconnect: Interconnect, nvme: int | None) -> Range:
    """Between GPU and host, host and disk, and AdamW on the host's cores, which all GPUs of a node share."""
    preset, steps = setup.preset, setup.accumulation_steps
    if preset.offload_optimizer is None and preset.offload_param is None:
        return 0.0, 0.0
    trained, shard = _optimizer_share(setup), (setup.weights.num_trained + setup.weights.num_frozen) / setup.world_size
    element_bytes = setup.engine.element_bytes
    stored_bytes = 4 if preset.engine == "fsdp2" else element_bytes  # FSDP2 keeps fp32 shards on the host
    on_host = on_disk = 0.0  # bytes of one GPU per step
    if preset.offload_param is not None:  # shards for gathers
        on_host += 2 * steps * stored_bytes * shard
    if preset.offload_optimizer is not None:  # gradients, and updated parameters
        on_host += (1 if setup.job.keeps_whole_gradients else steps) * stored_bytes * trained
        on_host += 0 if preset.offload_param is not None else element_bytes * trained
    if preset.offload_optimizer == "nvme":  # optimizer states, read and written
        on_disk += 2 * 12 * trained
    if preset.offload_param == "nvme":  # read for gathers, and written
        on_disk += element_bytes * (2 * steps * shard + trained)
    pcie, gpus = interconnect.gpu.pcie_bytes_per_second, min(interconnect.world_size, interconnect.gpus_per_node)
    on_disk *= gpus
    slow_disk, fast_disk = DISK_BYTES_PER_SECOND if nvme is None else (0.5 * nvme, float(nvme))
    updated = trained * gpus / 1e9 if preset.offload_optimizer is not None else 0.0
    fast_adam, slow_adam = HOST_ADAM_SECONDS["fsdp2" if preset.engine == "fsdp2" else "deepspeed"]
    fastest = max(on_host / (pcie * PCIE_SHARE[1]), on_disk / fast_disk, fast_adam * updated)
    return fastest, on_host / (pcie * PCIE_SHARE[0]) + on_disk / slow_disk + slow_adam * updated


def _sum(ranges: Iterable[Range]) -> Range:
    low = high = 0.0
    for first, second in ranges:
        low, high = low + first, high + second
    return low, high

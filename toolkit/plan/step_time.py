"""Seconds of an optimizer step, tokens a second and MFU, each as an interval from the best to the worst case.

    >>> speed = step_time(job, cluster, per_device_train_batch_size=4, seq_length=2048)
    >>> speed.tokens_per_second_per_gpu    # (2310.0, 5190.0)

Nothing here was fitted to or checked on a GPU of ours. The rates are others' measurements, named beside each; the
acceptance test holds the interval against MosaicML's published A100 runs (docs/communication.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.hardware.gpu_table import GIGA
from toolkit.models.flops import TokenFlops, flops_of, mfu
from toolkit.plan.communication import step_collectives
from toolkit.plan.links import Cluster, Interval
from toolkit.plan.traffic import TrafficJob, communication_bytes, elements_of

# What a large bf16 matrix multiplication reaches of the dense peak, at best (stas00/ml-engineering,
# compute/accelerator, "Maximum Achievable Matmul FLOPS", 2025); for a GPU that is not there, the highest of these.
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
# What eager training reached of it, network and all: torchtitan's Llama 3.1 8B, FSDP2 without compilation on 8 H100,
# "33 % MFU" (benchmarks/llama3_h100_202412_torchtitan.md). An untuned model or a slower host gets less.
EAGER_TRAINING_SHARE = 0.33

# What no kernel avoids to move besides, in the best case: each activation that a layer keeps written once and read once
# (34 bytes an element of the hidden size: Korthikanti et al., section 4.1, https://arxiv.org/abs/2205.05198), and fp32
# logits and their gradient each written and read. In the worst case it is part of the share above.
ACTIVATION_BYTES_MOVED = 2 * 34
LOGITS_BYTES_MOVED = 4 * 4

# AdamW reads parameter, gradient, momentum and variance and writes three of them, in fp32.
OPTIMIZER_BYTES = 28
MEMORY_SHARE: Interval = (0.6, 0.95)  # of the data sheet's bandwidth; STREAM-like kernels reach about nine tenths
# Host AdamW, seconds per 1e9 parameters of a whole machine: ZeRO-Offload paper, table 4 (deepspeed's CPU Adam 0.22 to
# 0.26, torch's 1.4 to 1.5, two sockets, https://arxiv.org/abs/2101.06840).
HOST_ADAM_SECONDS: dict[str, Interval] = {"deepspeed": (0.22, 0.52), "fsdp2": (0.22, 1.5)}
PCIE_SHARE: Interval = (0.4, 0.87)  # 55 of 63 GB/s were measured with pinned memory; two GPUs may share a switch
DISK_BYTES_PER_SECOND: Interval = (1 * GIGA, 25 * GIGA)  # of a machine: one disk to several; `--nvme-gb-per-second`
# Where reductions are in the way of the computation: deepspeed's `overlap_comm` is off below stage 3.
SERIAL_SHARDINGS = ("shard_optimizer", "shard_grad_op", "replicate")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step, every pair (low, high). None where the GPU's peak is unknown."""

    step_seconds: Interval
    compute_seconds: Interval
    communication_seconds: Interval
    """Of all collectives, as if nothing overlapped."""
    offload_seconds: Interval
    """Host transfers, disk and the host's optimizer; (0, 0) without offload."""
    optimizer_seconds: Interval
    tokens_per_second_per_gpu: Interval
    mfu: Interval
    communication_bytes_per_step: int
    tokens_per_step_per_gpu: int
    flops_per_token: int
    """What MFU counts: full attention, all parameters that a token passes through."""
    offload_efficiency: Interval | None = None
    """Computation's share where transfers do not overlap it; None without offload."""


def step_time(
    job: TrafficJob,
    cluster: Cluster,
    *,
    per_device_train_batch_size: int,
    seq_length: int,
    nvme_bytes_per_second: int | None = None,
) -> StepTime | None:
    """The interval: everything overlaps at the best rates, to nothing does at the worst; None without a peak."""
    peak = cluster.gpu.peak_flops(_dtype(job))
    if peak is None:
        return None
    tokens = per_device_train_batch_size * seq_length * job.gradient_accumulation_steps
    flops = job_flops(job, seq_length)
    compute = _compute_seconds(job, flops.hardware_flops * tokens, tokens, cluster)
    collectives = step_collectives(job)
    communication = _sum(cluster.seconds(collective) for collective in collectives)
    optimizer, offload = _optimizer_seconds(job, cluster), _offload_seconds(job, cluster, nvme_bytes_per_second)
    serial = job.preset.engine == "deepspeed" and job.preset.sharding in SERIAL_SHARDINGS
    overlapped = compute[0] + communication[0] if serial else max(compute[0], communication[0])
    low = max(overlapped, offload[0]) + optimizer[0]
    high = compute[1] + communication[1] + offload[1] + optimizer[1]
    offloads = job.preset.offload_optimizer or job.preset.offload_param
    shares = [
        mfu(tokens_per_second_per_gpu=tokens / seconds, flops_per_token=flops.model_flops, peak_flops=peak) or 0.0
        for seconds in (high, low)
    ]
    return StepTime(
        step_seconds=(low, high),
        compute_seconds=compute,
        communication_seconds=communication,
        offload_seconds=offload,
        optimizer_seconds=optimizer,
        tokens_per_second_per_gpu=(tokens / high, tokens / low),
        mfu=(shares[0], shares[1]),
        communication_bytes_per_step=communication_bytes(collectives),
        tokens_per_step_per_gpu=tokens,
        flops_per_token=flops.model_flops,
        offload_efficiency=_shares(compute, offload) if offloads else None,
    )


def job_flops(job: TrafficJob, seq_length: int) -> TokenFlops:
    """Operations of a token in the job."""
    return flops_of(
        job.shape,
        seq_length=seq_length,
        num_adapter_params=elements_of(job.adapters),
        recompute=job.activation_checkpointing,
    )


def efficiency(*, compute_seconds: float, transfer_seconds: float) -> float:
    """Share of its speed that a GPU keeps when states pass by and nothing overlaps.

    ZeRO-Infinity's AIT·bw / (AIT·bw + peak) (section 4.1, https://arxiv.org/abs/2104.07857), its arithmetic intensity
    AIT being the operations over the bytes that move for them.
    """
    return compute_seconds / (compute_seconds + transfer_seconds)


def _dtype(job: TrafficJob) -> str:
    precision = job.mixed_precision or job.preset.mixed_precision
    return "fp32" if precision == "no" else precision


def _compute_seconds(job: TrafficJob, flops: int, tokens: int, cluster: Cluster) -> Interval:
    peak = cluster.gpu.peak_flops(_dtype(job)) or 1.0
    best = BEST_MATMUL_SHARE.get(cluster.gpu.name.split(",")[0], UNLISTED_MATMUL_SHARE)
    shape, bandwidth = job.shape, cluster.gpu.memory_bytes_per_second
    kept = ACTIVATION_BYTES_MOVED * shape.hidden_size * shape.num_layers + LOGITS_BYTES_MOVED * shape.vocab_size
    moving = 0.0 if bandwidth is None else tokens * kept / (bandwidth * MEMORY_SHARE[1])
    return flops / (peak * best) + moving, flops / (peak * EAGER_TRAINING_SHARE)


def _trained_share(job: TrafficJob) -> float:
    """Trained parameters whose optimizer states one GPU has."""
    trained = elements_of(job.trained)
    if "optimizer" not in job.preset.sharded_parts:
        return trained
    return trained / (job.world_size // job.preset.replicas)


def _optimizer_seconds(job: TrafficJob, cluster: Cluster) -> Interval:
    """On the GPU: memory traffic of AdamW. An offloaded optimizer is part of the offload."""
    bandwidth = cluster.gpu.memory_bytes_per_second
    if job.preset.offload_optimizer or bandwidth is None:
        return 0.0, 0.0
    moved = OPTIMIZER_BYTES * _trained_share(job)
    return moved / (bandwidth * MEMORY_SHARE[1]), moved / (bandwidth * MEMORY_SHARE[0])


def _offload_seconds(job: TrafficJob, cluster: Cluster, nvme: int | None) -> Interval:
    """Between GPU and host, host and disk, and AdamW on the host's cores, which all GPUs of a machine share."""
    preset = job.preset
    if preset.offload_optimizer is None and preset.offload_param is None:
        return 0.0, 0.0
    pcie = cluster.gpu.pcie_bytes_per_second
    gpus = min(cluster.world_size, cluster.gpus_per_machine)
    moved, on_disk, updated = _host_bytes(job), _disk_bytes(job) * gpus, _trained_share(job) * gpus / 1e9
    low = moved / (pcie * PCIE_SHARE[1])
    high = moved / (pcie * PCIE_SHARE[0])
    slow_disk, fast_disk = DISK_BYTES_PER_SECOND if nvme is None else (0.5 * nvme, float(nvme))
    adam = HOST_ADAM_SECONDS["fsdp2" if preset.engine == "fsdp2" else "deepspeed"]
    computes = preset.offload_optimizer is not None
    return (
        max(low, on_disk / fast_disk, adam[0] * updated * computes),
        high + on_disk / slow_disk + adam[1] * updated * computes,
    )


def _host_bytes(job: TrafficJob) -> float:
    """Between one GPU and its host in a step: shards that are fetched for gathers, gradients, updated parameters."""
    steps, each = job.gradient_accumulation_steps, job.element_bytes
    trained = _trained_share(job)
    moved = 0.0
    if job.preset.offload_param is not None:
        whole = elements_of((*job.layers, job.shape.outer)) / job.world_size
        stored = 4 if job.preset.engine == "fsdp2" else each  # FSDP2 keeps fp32 shards on the host
        moved += 2 * steps * stored * whole
    if job.preset.offload_optimizer is not None:
        moved += (steps if job.preset.engine == "deepspeed" else 1) * each * trained
        moved += 0 if job.preset.offload_param is not None else each * trained
    return moved


def _disk_bytes(job: TrafficJob) -> float:
    """Of one GPU's share in a step: optimizer states read and written, parameters read for gathers and written."""
    trained, moved = _trained_share(job), 0.0
    if job.preset.offload_optimizer == "nvme":
        moved += 2 * 12 * trained
    if job.preset.offload_param == "nvme":
        whole = elements_of((*job.layers, job.shape.outer)) / job.world_size
        moved += job.element_bytes * (2 * job.gradient_accumulation_steps * whole + trained)
    return moved


def _shares(compute: Interval, offload: Interval) -> Interval:
    worst = efficiency(compute_seconds=compute[0], transfer_seconds=offload[1])
    return worst, efficiency(compute_seconds=compute[1], transfer_seconds=offload[0])


def _sum(intervals: Iterable[Interval]) -> Interval:
    low = high = 0.0
    for first, second in intervals:
        low, high = low + first, high + second
    return low, high

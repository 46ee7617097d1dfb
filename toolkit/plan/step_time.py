"""Planned seconds of an optimizer step, tokens per second and MFU: a best estimate, and a 90 % interval around it.

No GPU of this project measured anything here. The constants of `Calibration` are fitted to published rows, all others
are published measurements, each with its source. `tests/plan/test_step_time.py` compares estimate and interval with
every row that states enough, also with constants that were fitted without its source (docs/concepts/communication.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from toolkit.hardware.gpu_table import GIGA, Gpu
from toolkit.job.job import BATCH_ARGUMENTS
from toolkit.models.activations import Activations
from toolkit.models.flops import TokenFlops, flops_of
from toolkit.models.optimizers import OPTIMIZERS, UpdatedTensor
from toolkit.models.shape import ModelShape, SavedBytes
from toolkit.parallel.layout import DIMENSIONS
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Collective, Estimate, Interconnect, Range
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob, TrainingSetup, stage_shape

# Best measured share of the dense peak in a large bf16 matrix multiplication (stas00/ml-engineering,
# compute/accelerator, "Maximum Achievable Matmul FLOPS", 2025); the highest of these for GPUs without an entry. The
# shapes of a model's layers reach nine tenths of it.
BEST_MATMUL_SHARE = {
    **{"a100-40gb": 0.869, "a100-80gb": 0.869, "a100-40gb-pcie": 0.811, "a100-80gb-pcie": 0.811, "h100-sxm": 0.803},
    **{"h200": 0.803, "b200": 0.776, "gh200-96gb": 0.836, "mi250x": 0.767, "mi300x": 0.601},
}
UNLISTED_MATMUL_SHARE, LAYER_MATMUL_SHARE = 0.869, 0.9
# Share of the dense peak in attention's kernels, forward and backward, causal: FlashAttention 2 on A100 and on H100
# (https://arxiv.org/abs/2307.08691, figures 4 and 7), FlashAttention 3 on H100 (https://arxiv.org/abs/2407.08608,
# figures 5 and 6). SDPA has the second one.
FLASH_2, FLASH_2_ON_HOPPER, FLASH_3 = 0.5, 0.33, 0.57
# torch's kernels that are no matrix multiplications, per pass through a layer: an A100's cores read and write at 85 %
# of the data sheet's bandwidth. Of what they move, tensor parallelism divides 24 of 34 bytes (Korthikanti et al.,
# section 4.2.1, https://arxiv.org/abs/2205.05198).
KERNEL_BANDWIDTH_SHARE = 0.85
WHOLE_BYTES, SPLIT_BYTES = 10, 24
ALIKE_DIGITS = 9  # of an exponential: C libraries differ in the last bit, and a plan is the same everywhere
LOGITS_BYTES_MOVED = 30  # logits, their fp32 copy, log-probabilities and the gradients of each, written and read
DEQUANTIZED_BYTES = 2.5  # per 4-bit weight and pass: half a byte read, its bf16 copy written
PASSES, RECOMPUTED_PASSES = 3, 4  # a backward is two

# Operations that the host launches per layer, counted in torch's dispatcher (a Llama in transformers 5.23, SDPA, views
# left out): forward and backward, under autocast, and for each adapter in addition.
HOST_OPERATIONS, AUTOCAST_OPERATIONS, ADAPTER_OPERATIONS = (38, 78), (54, 100), (6.6, 8.7)

# Communication that nothing hides: kernels of collectives take cores and bandwidth from the computation, and the first
# gather and the last reduction have nothing to overlap with. DeepSpeed's `overlap_comm` is off below stage 3.
EXPOSED_SHARE = 0.3
SHARDINGS_WITHOUT_OVERLAP = ("shard_optimizer", "shard_grad_op", "replicate")

# An optimizer reads parameter and gradient and writes the parameter, in fp32; it reads and writes each of its states.
UPDATE_BYTES, STATE_ACCESSES = 12, 2
# AdamW on the host, seconds per 1e9 parameters on all cores of a node: ZeRO-Offload paper, table 4 (DeepSpeed's CPU
# Adam 0.22 to 0.26, torch's 1.4 to 1.5, two sockets, https://arxiv.org/abs/2101.06840).
HOST_ADAM_SECONDS: dict[str, Estimate] = {"deepspeed": (0.22, 0.24, 0.52), "fsdp2": (0.22, 0.57, 1.5)}
PCIE_SHARE: Estimate = (0.87, 0.6, 0.4)  # 55 of 63 GB/s measured with pinned memory; two GPUs may share a switch
# Of a node with one disk, or several; `--nvme-gb-per-second`.
DISK_BYTES_PER_SECOND: Estimate = (25 * GIGA, 5 * GIGA, 1 * GIGA)

# Half of the 90 % interval, as a logarithm, for one node of GPUs with published rows; and what widens it. The range of
# rates of offload and networks is added.
SPREAD = 0.2
WIDER = {"a GPU without published rows": 0.2, "bound by kernel launches, which depend on the host": 0.35}
WIDER |= {"4-bit kernels": 0.1, "a mixture of experts": 0.3, "a ring of GPUs that share a sequence": 0.5}
WIDER |= {"split layers or sequences": 0.2, "offload": 0.0, "the network between nodes": 0.0}
WIDER |= {"the network between nodes, which is not given": 0.0, "a method without published speeds": 0.3}
# The same for a plan that is calibrated by a run, by what differs between the two: nine of ten pairs of published rows
# of one source, model and GPU that differ in it (and mostly in more) have errors no further apart.
PAIR_SPREAD = {"preset": 0.155, "world size": 0.171, "batch or length": 0.192, "activation checkpointing": 0.284}
# Highest published share of the dense peak, recomputation included, and the half of the scores that causal attention
# needs: MosaicML's 7B, and its 13B with activation checkpointing; fms-acceleration's Llama 3 8B with LoRA, and its 70B
# with QLoRA; with offload, 262,144 tokens per row in stas00/ml-engineering. All but the last on A100s.
HIGHEST_SHARE = {"full": 0.62, "recomputed": 0.781, "lora": 0.62, "qlora": 0.703, "offload": 0.57}
MEASURED_GPUS = ("a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")


NO_GENERATION = "generation, which is not planned: times are of scoring and training alone, the least that it takes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants that are fitted to published speeds."""

    kernel_bytes: float
    """Bytes that a pass moves in kernels without matrix multiplication, per byte that its layer saves."""
    liger_share: float  # share of those with Liger's kernels for norms, rotary embeddings and the MLP
    adapter_bytes: float  # moved per pass and column of A or row of B of an adapter
    host_seconds: float  # in which the host launches an operation


# Least squares of the logarithms, each source with the square root of its rows as its weight; `host_seconds` is known
# from one source only, of 2023 (QwenLM, 12 rows).
CALIBRATION = Calibration(kernel_bytes=5.5, liger_share=0.43, adapter_bytes=8.5, host_seconds=15e-6)


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
    traffic = []
    for name, own in by_dimension.items():
        if own:
            best, _, worst = _sum(map(interconnect.estimate, own))
            crosses = any(map(interconnect.crosses_nodes, own))
            sent = communication_bytes(own)
            traffic.append(
                DimensionTraffic(dimension=name, sent_bytes=sent, seconds=(best, worst), crosses_nodes=crosses)
            )
    return tuple(traffic)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Planned times of one optimizer step; every range is (low, high)."""

    estimate_seconds: float
    step_seconds: Range
    """Interval that has nine of ten published steps."""
    fastest_seconds: float
    """The step at the highest share of the peak that anyone has measured for its method."""
    seconds_at_ends: Range
    """The estimate with interconnect, host and disk at their best rates, and at their worst."""
    compute_seconds: float
    communication_seconds: Range  # all collectives, without overlap, at the best rates and at the worst
    offload_seconds: Range  # transfers to and from host and disk, and AdamW on the host; (0, 0) without offload
    optimizer_seconds: float
    communication_bytes_per_step: int
    tokens_per_step_per_gpu: int
    flops_per_token: int  # operations that MFU counts: full attention, all parameters that a token passes through
    peak_flops: float
    wider_for: tuple[str, ...] = ()
    """Reasons for which the interval is wider than that of published rows."""
    calibrated_by: str | None = None
    """The run folder whose measured step multiplies the estimate."""
    precompute_seconds: float = 0.0
    """Scoring the rows of one step with a reference, once before training; part of no step."""
    without_generation: bool = False
    """True where completions are generated, which is not planned: all times are lower bounds."""
    offload_efficiency: Range | None = None
    """Share of its speed that a GPU keeps if transfers of model states overlap nothing; None without offload.

    ZeRO-Infinity's AIT·bw / (AIT·bw + peak) (section 4.1, https://arxiv.org/abs/2104.07857), where the arithmetic
    intensity AIT is the operations per transferred byte.
    """

    @property
    def tokens_per_second_per_gpu_estimate(self) -> float:
        """Best estimate of the speed."""
        return self.tokens_per_step_per_gpu / self.estimate_seconds

    @property
    def tokens_per_second_per_gpu(self) -> Range:
        """Interval of the speed."""
        fast, slow = self.step_seconds
        return self.tokens_per_step_per_gpu / slow, self.tokens_per_step_per_gpu / fast

    @property
    def mfu(self) -> Range:
        """Interval of the model FLOPs utilisation."""
        low, high = self.tokens_per_second_per_gpu
        return low * self.flops_per_token / self.peak_flops, high * self.flops_per_token / self.peak_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A step that a run measured on the user's own GPUs, by which plans of the same model are calibrated."""

    run: str
    setup: TrainingSetup
    planned: StepTime
    seconds: float
    """Median of its timed steps."""
    seconds_p90: float

    @property
    def ratio(self) -> float:
        """Measured over estimated seconds."""
        return self.seconds / self.planned.estimate_seconds

    def differences(self, other: TrainingSetup) -> list[str]:
        """Return those of `PAIR_SPREAD` in which another setup differs."""
        own = self.setup
        return [
            name
            for name, same in {
                "preset": (own.preset.name, own.job.degrees) == (other.preset.name, other.job.degrees),
                "world size": own.world_size == other.world_size,
                "batch or length": all(own.job.value(name) == other.job.value(name) for name in BATCH_ARGUMENTS),
                "activation checkpointing": own.job.activation_checkpointing == other.job.activation_checkpointing,
            }.items()
            if not same
        ]

    def spread(self, other: TrainingSetup, ends: Range, wider: Iterable[str]) -> float:
        """Return half of the interval, as a logarithm, of another setup: what the two share cancels.

        `ends` are the other's seconds at the best rates and at the worst, `wider` its reasons. Of the run's own setup,
        nine of ten of its own steps.
        """
        fast, slow = self.planned.seconds_at_ends
        terms = [abs(math.log(ends[1] / ends[0]) - math.log(slow / fast)) / 2]
        terms += [PAIR_SPREAD[name] for name in self.differences(other)]
        terms += [WIDER[reason] for reason in {*wider} ^ {*self.planned.wider_for}]
        return math.hypot(*terms) if any(terms) else math.log(max(self.seconds_p90 / self.seconds, 1.0))


def step_time(
    setup: TrainingSetup,
    interconnect: Interconnect,
    *,
    nvme_bytes_per_second: int | None = None,
    calibration: Calibration = CALIBRATION,
    measured: MeasuredStep | None = None,
) -> StepTime | None:
    """Return the planned times; None if the GPU's peak in the compute dtype is unknown.

    A `measured` step of another setup of the same model and GPU multiplies them, and its interval is narrower.
    """
    preset, precision, job = setup.preset, setup.mixed_precision or setup.preset.mixed_precision, setup.job
    peak = interconnect.gpu.peak_flops("fp32" if precision == "no" else precision)
    if peak is None:
        return None
    steps, ranks_per_batch = setup.accumulation_steps, 1 if setup.layout is None else setup.layout.ranks_per_batch
    # Ranks of one batch divide its work; ranks that split layers each have all of its tokens.
    tokens, own_tokens = job.tokens_per_forward * steps // ranks_per_batch, setup.local_tokens * steps
    if preset.engine == "pipeline":  # each has all tokens, and some of the layers
        own_tokens //= ranks_per_batch
    flops = _flops(setup, causal=False)
    causal, tp = _flops(setup, causal=True), setup.engine.tp
    fixed = partial(compute_seconds, interconnect.gpu, setup.shape, job, calibration, peak=peak, tp=tp)
    on_gpu_seconds = partial(fixed, tokens=tokens, own_tokens=own_tokens)
    scored = replace(causal, dense_backward=0, attention_backward=0, recomputed=0)
    scoring = on_gpu_seconds(flops=scored)
    on_gpu = on_gpu_seconds(flops=causal) + job.method.scoring_forwards * scoring
    on_gpu += _weight_passes_seconds(setup, interconnect.gpu, own_tokens, calibration)
    on_host = _host_seconds(setup, calibration)
    compute = max(on_gpu, on_host) * _bubble_factor(setup)
    collectives = step_collectives(setup)
    communication = _sum(map(interconnect.estimate, collectives))
    blocking = _sum(interconnect.estimate(collective) for collective in collectives if collective.blocks)
    optimizer = _optimizer_seconds(setup, interconnect)
    offload = _offload_seconds(setup, interconnect, nvme_bytes_per_second)
    serial = preset.engine == "deepspeed" and preset.sharding in SHARDINGS_WITHOUT_OVERLAP

    def seconds(place: int) -> float:
        hidden = communication[place] - blocking[place]
        exposed = hidden if serial else max(EXPOSED_SHARE * hidden, hidden - compute)
        return compute + blocking[place] + exposed + offload[place] + optimizer

    best, estimate, worst = map(seconds, range(3))
    wider, highest = tuple(_wider(setup, interconnect, launch_bound=on_host > on_gpu)), _highest_share(setup)
    spread = math.hypot(SPREAD, math.log(worst / best) / 2, *(WIDER[reason] for reason in wider))
    # No interval reaches above what anyone has measured, the user included.
    operations = causal.hardware_flops + job.method.scoring_forwards * scored.hardware_flops
    fastest = tokens * operations / (peak * highest)
    if measured is not None:
        spread = measured.spread(setup, (best, worst), wider)
        best, estimate, worst = (seconds * measured.ratio for seconds in (best, estimate, worst))
        wider = tuple(reason for reason in wider if reason not in measured.planned.wider_for)
        if highest == _highest_share(measured.setup):
            fastest *= min(1.0, measured.seconds / measured.planned.fastest_seconds)
    factor = round(math.exp(spread), ALIKE_DIGITS)
    low = max(estimate / factor, fastest)
    efficiency = None
    if preset.offload_optimizer or preset.offload_param:
        efficiency = compute / (compute + offload[2]), compute / (compute + offload[0])
    return StepTime(
        estimate_seconds=max(estimate, low),
        step_seconds=(low, max(estimate, low) * factor),
        fastest_seconds=fastest,
        seconds_at_ends=(best, worst),
        compute_seconds=compute,
        communication_seconds=(communication[0], communication[2]),
        offload_seconds=(offload[0], offload[2]),
        optimizer_seconds=optimizer,
        communication_bytes_per_step=communication_bytes(collectives),
        tokens_per_step_per_gpu=tokens,
        flops_per_token=flops.model_flops,
        peak_flops=peak,
        wider_for=wider,
        calibrated_by=None if measured is None else measured.run,
        precompute_seconds=job.method.precomputed_forwards * scoring * (1.0 if measured is None else measured.ratio),
        without_generation=job.method.generates,
        offload_efficiency=efficiency,
    )


def speed_row(speed: StepTime | None) -> dict[str, Any]:
    """Return the intervals, the best estimates and what widens the former, as plans and recommendations print them."""
    ranges = {name: getattr(speed, name, None) for name in ("step_seconds", "tokens_per_second_per_gpu", "mfu")}
    if speed is None:
        estimates = dict.fromkeys(("step_seconds_estimate", "tokens_per_second_per_gpu_estimate"))
        return {**ranges, **estimates, **dict.fromkeys(("speed_wider_for", "calibrated_by", "without_generation"))}
    return {
        **ranges,
        "step_seconds_estimate": speed.estimate_seconds,
        "tokens_per_second_per_gpu_estimate": speed.tokens_per_second_per_gpu_estimate,
        "speed_wider_for": list(speed.wider_for),
        "calibrated_by": speed.calibrated_by,
        "without_generation": speed.without_generation,
    }


def _flops(setup: TrainingSetup, *, causal: bool) -> TokenFlops:
    adapters = setup.weights.num_trained if setup.weights.adapters else 0
    length, recompute = setup.job.tokens_per_row, setup.job.activation_checkpointing
    # In a ring, the rank with the end of a sequence attends to all of it, and the others wait: torchtitan's rings of 4
    # and 8 (the table of its performance page) are as slow as that.
    ring = setup.layout is not None and setup.layout.cp > 1
    # MFU counts every parameter; the GPU multiplies with none that is only looked up.
    return flops_of(
        setup.shape,
        seq_length=length,
        num_adapter_params=adapters,
        causal=causal and not ring,
        recompute=recompute,
        count_embeddings=not causal,
    )


def _wider(setup: TrainingSetup, interconnect: Interconnect, *, launch_bound: bool) -> Iterator[str]:
    """What widens an interval, as `WIDER` has it."""
    preset, gpu = setup.preset, interconnect.gpu
    if gpu.name.split(",")[0] not in MEASURED_GPUS:
        yield "a GPU without published rows"
    if launch_bound:
        yield "bound by kernel launches, which depend on the host"
    if setup.job.load_in_4bit:
        yield "4-bit kernels"
    if setup.job.method.method != SFT:
        yield "a method without published speeds"
    if setup.shape.num_experts:
        yield "a mixture of experts"
    if setup.layout is not None and setup.layout.cp > 1:
        yield "a ring of GPUs that share a sequence"
    elif preset.parallel:
        yield "split layers or sequences"
    if preset.offload_optimizer or preset.offload_param:
        yield "offload"
    if interconnect.num_nodes > 1:
        given = interconnect.network_bytes_per_second is not None
        yield "the network between nodes" if given else "the network between nodes, which is not given"


def _highest_share(setup: TrainingSetup) -> float:
    """Highest published share of the dense peak, recomputation included and causal attention counted once."""
    if setup.preset.offload_optimizer or setup.preset.offload_param:
        return HIGHEST_SHARE["offload"]
    if setup.weights.adapters:
        return HIGHEST_SHARE["qlora" if setup.job.load_in_4bit else "lora"]
    return HIGHEST_SHARE["recomputed" if setup.job.activation_checkpointing else "full"]


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


def compute_seconds(
    gpu: Gpu,
    shape: ModelShape,
    job: PlannedJob,
    calibration: Calibration = CALIBRATION,
    *,
    peak: float,
    tokens: float,
    flops: TokenFlops,
    own_tokens: int | None = None,
    tp: int = 1,
) -> float:
    """Return the seconds in which one GPU computes `tokens` tokens of these layers, with causal attention in `flops`.

    `peak` is that of the compute dtype. With `tp` above 1 each layer is split over as many GPUs, which each have
    `own_tokens`, all tokens of a batch.
    """
    own_tokens = round(tokens) if own_tokens is None else own_tokens
    share = BEST_MATMUL_SHARE.get(gpu.name.split(",")[0], UNLISTED_MATMUL_SHARE) * LAYER_MATMUL_SHARE
    attention = flops.attention_forward * (2 if flops.recomputed else 1) + flops.attention_backward
    operations = (flops.hardware_flops - attention) / share + attention / _attention_share(gpu, job)
    if gpu.memory_bytes_per_second is None:
        return tokens * operations / peak
    passes = RECOMPUTED_PASSES if flops.recomputed else PASSES if flops.dense_backward else 1
    moved = calibration.kernel_bytes * _saved_bytes(shape).token_bytes(job.tokens_per_row) * passes
    moved *= (WHOLE_BYTES + SPLIT_BYTES / tp) / (WHOLE_BYTES + SPLIT_BYTES)
    moved *= calibration.liger_share if job.loss == "fused" else 1.0
    moved += LOGITS_BYTES_MOVED * min(1, passes / PASSES) * shape.vocab_size / tp
    return tokens * operations / peak + own_tokens * moved / (gpu.memory_bytes_per_second * KERNEL_BANDWIDTH_SHARE)


@lru_cache(maxsize=256)
def _saved_bytes(shape: ModelShape) -> SavedBytes:
    """What all layers save in a full fine-tune: a measure of what their kernels move, also where less is saved."""
    return Activations(shape=shape).saved("none").layers


def _attention_share(gpu: Gpu, job: PlannedJob) -> float:
    name = job.attn_implementation or ""
    if "flash_attention_3" in name or "flash_attention_4" in name:
        return FLASH_3
    return FLASH_2_ON_HOPPER if gpu.name.startswith(("h100", "h200", "gh200", "b200")) else FLASH_2


def _weight_passes_seconds(setup: TrainingSetup, gpu: Gpu, own_tokens: int, calibration: Calibration) -> float:
    """What adapters move per token, and 4-bit weights that are decoded in each pass."""
    if not setup.weights.adapters or gpu.memory_bytes_per_second is None:
        return 0.0
    passes = RECOMPUTED_PASSES if setup.job.activation_checkpointing else PASSES
    tensors = [tensor for unit in setup.weights.adapter_units for tensor in unit]
    widths = sum(each.shape[-1] if ".lora_A." in each.name else each.shape[0] for each in tensors)
    decoded = sum(tensor.num_elements * count for tensor, count in setup.weights.in_4bit) * DEQUANTIZED_BYTES
    moved = own_tokens * calibration.adapter_bytes * widths + setup.accumulation_steps * decoded
    return passes * moved / (gpu.memory_bytes_per_second * KERNEL_BANDWIDTH_SHARE)


def _host_seconds(setup: TrainingSetup, calibration: Calibration) -> float:
    """Launches of a step, without which a GPU that computes faster waits: short rows in small micro-batches."""
    forward, backward = AUTOCAST_OPERATIONS if setup.engine.autocasts else HOST_OPERATIONS
    forwards = setup.forwards + setup.accumulation_steps * setup.job.method.scoring_forwards
    operations = 1.0 * setup.part.num_layers * (forward * forwards + backward * setup.accumulation_steps)
    adapters = sum(".lora_A." in tensor.name for unit in setup.weights.adapter_units for tensor in unit)
    passes = zip(ADAPTER_OPERATIONS, (setup.forwards, setup.accumulation_steps), strict=True)
    operations += adapters * sum(launched * times for launched, times in passes)
    return operations * calibration.host_seconds


def _optimizer_share(setup: TrainingSetup) -> float:
    if "optimizer" not in setup.preset.sharded_parts:
        return setup.weights.num_trained
    sharing = setup.engine.ranks_sharing
    return sum(count * tensor.num_elements / sharing(tensor) for tensor, count in setup.weights.trained)


def _optimizer_seconds(setup: TrainingSetup, interconnect: Interconnect) -> float:
    """Memory traffic of the optimizer on the GPU; an offloaded one is part of the offload."""
    bandwidth = interconnect.gpu.memory_bytes_per_second
    if setup.preset.offload_optimizer or bandwidth is None:
        return 0.0
    tensors = (UpdatedTensor(shape=tensor.shape, count=count) for tensor, count in setup.weights.trained)
    states = OPTIMIZERS[setup.job.optim].state_bytes(tensors) / max(setup.weights.num_trained, 1)
    moved = (UPDATE_BYTES + STATE_ACCESSES * states) * _optimizer_share(setup)
    return moved / (bandwidth * KERNEL_BANDWIDTH_SHARE)


def _offload_seconds(setup: TrainingSetup, interconnect: Interconnect, nvme: int | None) -> Estimate:
    """Between GPU and host, host and disk, and AdamW on the host's cores, which all GPUs of a node share."""
    preset, steps = setup.preset, setup.accumulation_steps
    if preset.offload_optimizer is None and preset.offload_param is None:
        return 0.0, 0.0, 0.0
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
    disk = DISK_BYTES_PER_SECOND if nvme is None else (float(nvme), 0.75 * nvme, 0.5 * nvme)
    updated = trained * gpus / 1e9 if preset.offload_optimizer is not None else 0.0
    adam = [each * updated for each in HOST_ADAM_SECONDS["fsdp2" if preset.engine == "fsdp2" else "deepspeed"]]
    best = max(on_host / (pcie * PCIE_SHARE[0]), on_disk / disk[0], adam[0])
    estimate, worst = (on_host / (pcie * PCIE_SHARE[end]) + on_disk / disk[end] + adam[end] for end in (1, 2))
    return best, estimate, worst


def _sum(estimates: Iterable[Estimate]) -> Estimate:
    best, estimate, worst = (math.fsum(values) for values in zip((0.0, 0.0, 0.0), *estimates, strict=True))
    return best, estimate, worst

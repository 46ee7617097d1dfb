"""Planned seconds of an optimizer step, tokens per second and MFU: a best estimate, and a 90 % interval around it.

`toolkit.plan.step_parts` has the sources; one H200 was measured (docs/evidence/gpu.md). Estimate and interval are
compared with every row that states enough, also with constants that were fitted without its source, in
`tests/plan/test_step_time.py` (docs/concepts/plan.md).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from toolkit.engines.planned import Collective
from toolkit.job.job import BATCH_ARGUMENTS
from toolkit.parallel.layout import DIMENSIONS
from toolkit.plan.communication import communication_bytes, step_collectives
from toolkit.plan.interconnect import Estimate, Interconnect, Range
from toolkit.plan.methods import SFT
from toolkit.plan.step_parts import (
    CALIBRATION,
    Calibration,
    best_matmul_share,
    bubble_factor,
    compute_seconds,
    fp32_experts_seconds,
    host_seconds,
    offload_seconds,
    operations_of,
    optimizer_seconds,
    weight_passes_seconds,
)
from toolkit.plan.training_setup import TrainingSetup

ALIKE_DIGITS = 9  # of an exponential: C libraries differ in the last bit, and a plan is the same everywhere
# Communication that nothing hides: kernels of collectives take cores and bandwidth from the computation, and the first
# gather and the last reduction have nothing to overlap with. DeepSpeed's `overlap_comm` is off below stage 3.
EXPOSED_SHARE = 0.3
SHARDINGS_WITHOUT_OVERLAP = ("shard_optimizer", "shard_grad_op", "replicate")

# Half of the 90 % interval, as a logarithm, for one node of GPUs with published rows; and what widens it. The range of
# rates of offload and networks is added. Rows of a fitted source differ by `SPREAD`; a whole source (its program, data,
# host and what it counts) differs from others by `SOURCE_SPREAD`: 48 % of 79 rows of six sources that nobody had used
# were inside of 1.56, so that the errors of a new source have a standard deviation of 0.35.
SPREAD, SOURCE_SPREAD = 0.2, 0.53
WIDER = {"a GPU without published rows": 0.2, "bound by kernel launches, which depend on the host": 0.35}
WIDER |= {"4-bit kernels": 0.1, "a mixture of experts": 0.6, "a ring of GPUs that share a sequence": 0.5}
# On an H200, twelve jobs of models of 1 to 3 billion parameters took 1.03 to 1.43 times the estimate
# (docs/evidence/gpu.md). Published steps of such models on A100s are as long as estimated.
SMALL_MODEL, SMALL_MODEL_PARAMETERS, FAST_GPU_FLOPS = "a small model on a fast GPU", 4e9, 500e12
WIDER |= {SMALL_MODEL: 0.3, "split layers or sequences": 0.2, "offload": 0.6, "the network between nodes": 0.0}
WIDER |= {"the network between nodes, which is not given": 0.0, "a method without published speeds": 0.3}
# The same for a plan that is calibrated by a run, by what differs between the two: nine of ten pairs of published rows
# of one source, model and GPU that differ in it (and mostly in more) have errors no further apart.
PAIR_SPREAD = {"preset": 0.152, "world size": 0.171, "batch or length": 0.192, "activation checkpointing": 0.284}
# Highest published share of the dense peak, recomputation included, and the half of the scores that causal attention
# needs: MosaicML's 7B, and its 13B with activation checkpointing; fms-acceleration's Llama 3 8B with LoRA, and its 70B
# with QLoRA; with offload, 262,144 tokens per row in stas00/ml-engineering. All but the last on A100s. Of a GPU without
# published rows, that of a large matrix multiplication.
HIGHEST_SHARE = {"full": 0.62, "recomputed": 0.781, "lora": 0.62, "qlora": 0.703, "offload": 0.57}
MEASURED_GPUS = ("a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")


OPEN_LOOP = "experts that may run in a loop, as in transformers 4: `--no-looped-experts`"
NO_GENERATION = "generation, which is not planned: times are of scoring and training alone, the least that it takes"


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
    step_seconds: Range  # interval that has nine of ten published steps
    fastest_seconds: float  # the step at the highest share of the peak that anyone has measured for its method
    seconds_at_ends: Range  # the estimate with interconnect, host and disk at their best rates, and at their worst
    compute_seconds: float
    communication_seconds: Range  # all collectives, without overlap, at the best rates and at the worst
    offload_seconds: Range  # transfers to and from host and disk, and AdamW on the host; (0, 0) without offload
    optimizer_seconds: float
    communication_bytes_per_step: int
    tokens_per_step_per_gpu: int
    flops_per_token: int  # operations that MFU counts: full attention, all parameters that a token passes through
    peak_flops: float
    wider_for: tuple[str, ...] = ()  # reasons for which the interval is wider than that of published rows
    calibrated_by: str | None = None  # the run folder whose measured step multiplies the estimate
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
    seconds: float  # median of its timed steps
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
    preset, precision, job = setup.preset, setup.precision or setup.preset.mixed_precision, setup.job
    peak = interconnect.gpu.peak_flops("fp32" if precision == "no" else precision)
    if peak is None:
        return None
    steps, ranks_per_batch = setup.accumulation_steps, 1 if setup.layout is None else setup.layout.ranks_per_batch
    # Ranks of one batch divide its work; ranks that split layers each have all of its tokens.
    tokens, own_tokens = job.tokens_per_forward * steps // ranks_per_batch, setup.local_tokens * steps
    if preset.engine == "pipeline":  # each has all tokens, and some of the layers
        own_tokens //= ranks_per_batch
    flops = operations_of(setup, causal=False)
    causal, tp = operations_of(setup, causal=True), setup.engine.tp
    fixed = partial(compute_seconds, interconnect.gpu, setup.shape, job, calibration, peak=peak, tp=tp)
    on_gpu_seconds = partial(fixed, tokens=tokens, own_tokens=own_tokens)
    scored = replace(causal, dense_backward=0, attention_backward=0, recomputed=0, attention_recomputed=0)
    scoring = on_gpu_seconds(flops=scored)
    on_gpu = on_gpu_seconds(flops=causal) + job.method.scoring_forwards * scoring
    on_gpu += weight_passes_seconds(setup, interconnect.gpu, own_tokens, calibration)
    on_gpu += fp32_experts_seconds(setup, interconnect.gpu, peak=peak, tokens=tokens)
    on_host = host_seconds(setup, calibration)
    # an expert of a loop waits for the GPU's list of its tokens (`nonzero`), so that the host does not run ahead
    compute = (sum if job.numerics.looped_experts else max)((on_gpu, on_host)) * bubble_factor(setup)
    collectives = step_collectives(setup)
    communication = _sum(map(interconnect.estimate, collectives))
    blocking = _sum(interconnect.estimate(collective) for collective in collectives if collective.blocks)
    optimizer = optimizer_seconds(setup, interconnect)
    offload = offload_seconds(setup, interconnect, nvme_bytes_per_second)
    serial = preset.traits.has_flat_states and preset.sharding in SHARDINGS_WITHOUT_OVERLAP

    def seconds(place: int) -> float:
        hidden = communication[place] - blocking[place]
        exposed = hidden if serial else max(EXPOSED_SHARE * hidden, hidden - compute)
        return compute + blocking[place] + exposed + offload[place] + optimizer

    best, estimate, worst = map(seconds, range(3))
    wider = tuple(_wider(setup, interconnect, launch_bound=on_host > on_gpu))
    highest = _highest_share(setup) if _has_published_rows(interconnect) else best_matmul_share(interconnect.gpu)
    spread = math.hypot(SPREAD, SOURCE_SPREAD, math.log(worst / best) / 2, *(WIDER[reason] for reason in wider))
    # No interval reaches above what anyone has measured, the user included.
    operations = causal.hardware_flops + job.method.scoring_forwards * scored.hardware_flops
    if job.packs_without_mask(setup.shape):  # of documents that may be short
        operations -= causal.attention_forward + causal.attention_backward + causal.attention_recomputed
    fastest = tokens * operations / (peak * highest)
    if measured is not None:
        spread = measured.spread(setup, (best, worst), wider)
        best, estimate, worst = (seconds * measured.ratio for seconds in (best, estimate, worst))
        wider = tuple(reason for reason in wider if reason not in measured.planned.wider_for)
        if _highest_share(setup) == _highest_share(measured.setup):
            fastest *= min(1.0, measured.seconds / measured.planned.fastest_seconds)
    factor = round(math.exp(spread), ALIKE_DIGITS)
    low = max(estimate / factor, fastest)
    slow = max(estimate, low) * factor
    if "looped_experts" in job.not_given and job.is_of_another_program and setup.shape.num_experts and measured is None:
        loop = replace(job, not_given=(), numerics=replace(job.numerics, looped_experts=True))
        looped = step_time(replace(setup, job=loop), interconnect, nvme_bytes_per_second=nvme_bytes_per_second)
        slow, wider = max(slow, looped.step_seconds[1] if looped else 0.0), (*wider, OPEN_LOOP)
    efficiency = None
    if preset.offload_optimizer or preset.offload_param:
        efficiency = compute / (compute + offload[2]), compute / (compute + offload[0])
    return StepTime(
        estimate_seconds=max(estimate, low),
        step_seconds=(low, slow),
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


def _wider(setup: TrainingSetup, interconnect: Interconnect, *, launch_bound: bool) -> Iterator[str]:
    preset, gpu = setup.preset, interconnect.gpu
    if not _has_published_rows(interconnect):
        yield "a GPU without published rows"
    if launch_bound:
        yield "bound by kernel launches, which depend on the host"
    if setup.shape.num_params < SMALL_MODEL_PARAMETERS and (gpu.peak_flops("bf16") or 0) > FAST_GPU_FLOPS:
        yield SMALL_MODEL
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


def _has_published_rows(interconnect: Interconnect) -> bool:
    return interconnect.gpu.name.split(",")[0] in MEASURED_GPUS


def _highest_share(setup: TrainingSetup) -> float:
    """Highest published share of the dense peak, recomputation included and causal attention counted once."""
    if setup.preset.offload_optimizer or setup.preset.offload_param:
        return HIGHEST_SHARE["offload"]
    if setup.weights.adapters:
        return HIGHEST_SHARE["qlora" if setup.job.load_in_4bit else "lora"]
    return HIGHEST_SHARE["recomputed" if setup.job.activation_checkpointing else "full"]


def _sum(estimates: Iterable[Estimate]) -> Estimate:
    best, estimate, worst = (math.fsum(values) for values in zip((0.0, 0.0, 0.0), *estimates, strict=True))
    return best, estimate, worst

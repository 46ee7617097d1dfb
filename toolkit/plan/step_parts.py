"""Seconds of the parts of an optimizer step that are no communication: computation, launches, optimizer, offload.

The constants of `Calibration` are fitted to published rows, all others are published measurements, each with its
source; `toolkit.plan.step_time` adds the parts up.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.hardware.gpu_table import GIGA, Gpu
from toolkit.models.activations import Activations
from toolkit.models.attention import needs_no_mask
from toolkit.models.flops import TokenFlops, flops_of
from toolkit.models.job_weights import JobWeights
from toolkit.models.lora import ALL_LINEAR
from toolkit.models.optimizers import OptimizerSpec, UpdatedTensor
from toolkit.models.shape import ModelShape, SavedBytes
from toolkit.models.vision_tower import forward_operations
from toolkit.plan.engine_buffers import checkpointed_on_host
from toolkit.plan.interconnect import Estimate, Interconnect
from toolkit.plan.planned_job import PlannedJob, with_attention
from toolkit.plan.training_setup import TrainingSetup, stage_shape

# Best measured share of the dense peak in a large bf16 matrix product (stas00/ml-engineering, "Maximum Achievable
# Matmul FLOPS"; from the L4 on zzc0721/torch-performance-test-data, T4 and V100 in fp16); layers reach 0.9 of it.
BEST_MATMUL_SHARE = {
    **{"a100-40gb": 0.869, "a100-80gb": 0.869, "a100-40gb-pcie": 0.811, "a100-80gb-pcie": 0.811, "h100-sxm": 0.803},
    **{"h200": 0.803, "b200": 0.776, "gh200-96gb": 0.836, "mi250x": 0.767, "mi300x": 0.601},
    **{"l4": 0.586, "h100-pcie": 0.656, "t4": 0.657, "l40s": 0.743, "v100-16gb": 0.759, "v100-32gb": 0.759},
    **{"a40": 0.817, "rtx-a6000": 0.797, "rtx-pro-6000": 0.83, "l20": 0.955, "h20-96gb": 0.961, "h20-141gb": 0.961},
}
UNLISTED_MATMUL_SHARE, LAYER_MATMUL_SHARE = 0.869, 0.9
# GeForce cards run above the clock of their data sheets: the median there of 12, from 0.91 (RTX 5080) to 1.14 (5090).
GEFORCE, GEFORCE_MATMUL_SHARE = ("rtx-3", "rtx-4", "rtx-5"), 1.03
# Share of the dense peak in attention's kernels, forward and backward, causal: FlashAttention 2 on A100 and on H100
# (https://arxiv.org/abs/2307.08691, figures 4 and 7), FlashAttention 3 on H100 (https://arxiv.org/abs/2407.08608,
# figures 5 and 6). SDPA has the second one. FlashAttention 2 has no instructions of Blackwell's, and is as fast as on
# Hopper, whose peak is the last.
FLASH_2, FLASH_2_ON_HOPPER, FLASH_3, HOPPER_FLOPS = 0.5, 0.33, 0.57, 989.4e12
# With a mask of padding, SDPA has its memory-efficient kernel, which computes what the mask hides too, at 145 TFLOPS
# where FlashAttention 2 has 230 (an H100, https://github.com/microsoft/onnxruntime/pull/21629).
MASKED_SHARE = 145 / 230 / 2
HOPPER, BLACKWELL = ("h100", "h200", "h800", "gh200"), ("b200", "b300", "gb200", "gb300")
# torch's kernels that are no matrix multiplications, per pass through a layer: an A100's cores read and write at 85 %
# of the data sheet's bandwidth. Of what they move, tensor parallelism divides 24 of 34 bytes (Korthikanti et al.,
# section 4.2.1, https://arxiv.org/abs/2205.05198).
KERNEL_BANDWIDTH_SHARE = 0.85
WHOLE_BYTES, SPLIT_BYTES = 10, 24
# Logits, their fp32 copy, log-probabilities and the gradients of each, written and read. Where one kernel makes bf16
# gradients of bf16 logits: written, read twice, gradients written, and read by two products. Cut cross entropy: none.
LOGITS_BYTES_MOVED, FUSED_LOGITS_BYTES = 30, 12
DEQUANTIZED_BYTES = 2.5  # per 4-bit weight and pass: half a byte read, its bf16 copy written
PASSES, RECOMPUTED_PASSES = 3, 4  # a backward is two

# Operations that the host launches per layer, counted in torch's dispatcher (a Llama in transformers 5.23, SDPA, views
# left out): forward and backward, under autocast, and for each adapter in addition.
HOST_OPERATIONS, AUTOCAST_OPERATIONS, ADAPTER_OPERATIONS = (38, 78), (54, 100), (6.6, 8.7)
# The same for each expert that has tokens, where experts run in a loop: Qwen3-MoE and Mixtral in transformers 4.57
# (GLM-4-MoE: 10 and 18). Each of its linear layers is a module.
EXPERT_OPERATIONS, EXPERT_LINEARS = (12, 17), ("gate_proj", "up_proj", "down_proj")

# ZeRO-3's hooks run in Python before and after each module that has parameters, in the forward and in the backward: per
# module and pass 0.7 to 1.1 ms on an H200 and one rank, in three jobs that waited for them (docs/evidence/gpu.md), but
# no more than this in a published job on B200s (stas00/ml-engineering, Llama 3.1 8B, rows of 8,192 tokens).
ZERO_3_SECONDS = 0.6e-3

# An optimizer reads parameter and gradient and writes the parameter, in fp32; it reads and writes each of its states.
UPDATE_BYTES, STATE_ACCESSES = 12, 2
PCIE_SHARE: Estimate = (0.87, 0.6, 0.4)  # 55 of 63 GB/s measured with pinned memory; two GPUs may share a switch
# Of a node with one disk, or several; `--nvme-gb-per-second`.
DISK_BYTES_PER_SECOND: Estimate = (25 * GIGA, 5 * GIGA, 1 * GIGA)


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
CALIBRATION = Calibration(kernel_bytes=5.5, liger_share=0.45, adapter_bytes=8.5, host_seconds=15e-6)


def operations_of(setup: TrainingSetup, *, causal: bool) -> TokenFlops:
    """Return the operations per token of a setup: all that MFU counts, or with `causal` those that a GPU computes."""
    adapters = setup.weights.num_trained if setup.weights.adapters else 0
    length, recompute = setup.job.tokens_per_row, setup.job.activation_checkpointing
    # MFU counts every parameter; the GPU multiplies with none that is only looked up.
    flops = flops_of(
        setup.shape,
        seq_length=length,
        num_adapter_params=adapters,
        causal=causal,
        recompute=recompute,
        recompute_attention=not setup.job.activation_checkpointing_selective,
        count_embeddings=not causal,
    )
    if not setup.job.image_tokens:
        return flops
    # Of a token of an image, in the encoder; shared by all tokens of its row.
    images = forward_operations(setup.shape) * setup.job.image_tokens // length
    trained = setup.weights.trains_tower
    return replace(
        flops,
        dense_forward=flops.dense_forward + images,
        dense_backward=flops.dense_backward + images * trained * (1 if setup.weights.adapters else 2),
        recomputed=flops.recomputed + images * (recompute and trained),
    )


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
    share = best_matmul_share(gpu) * LAYER_MATMUL_SHARE
    attention = flops.attention_forward + flops.attention_recomputed + flops.attention_backward
    operations = (flops.hardware_flops - attention) / share + attention / _attention_share(gpu, job)
    passes = RECOMPUTED_PASSES if flops.recomputed else PASSES if flops.dense_backward else 1
    saved = _saved_bytes(with_attention(shape, job.attention_with_scores))
    moved = calibration.kernel_bytes * saved.token_bytes(job.tokens_per_row) * passes
    moved *= (WHOLE_BYTES + SPLIT_BYTES / tp) / (WHOLE_BYTES + SPLIT_BYTES)
    # Liger's kernels, fms-acceleration's and Unsloth's; and what the compiler fuses, which are not those of experts
    compiled = job.numerics.torch_compile and not shape.num_experts
    fused = job.loss == "fused" or job.numerics.program == "unsloth"
    moved *= calibration.liger_share if fused or compiled else 1.0
    of_logits = 0 if job.loss == "cut" else FUSED_LOGITS_BYTES if fused else LOGITS_BYTES_MOVED
    moved += of_logits * min(1, passes / PASSES) * shape.vocab_size / tp
    return tokens * operations / peak + own_tokens * moved / (gpu.memory_bytes_per_second * KERNEL_BANDWIDTH_SHARE)


@lru_cache(maxsize=256)
def _saved_bytes(shape: ModelShape) -> SavedBytes:
    """What all layers save in a full fine-tune: a measure of what their kernels move, also where less is saved."""
    return Activations(shape=shape).saved("none").layers


def best_matmul_share(gpu: Gpu) -> float:
    other = GEFORCE_MATMUL_SHARE if gpu.name.startswith(GEFORCE) else UNLISTED_MATMUL_SHARE
    return BEST_MATMUL_SHARE.get(gpu.name.split(",")[0], other)


def _attention_share(gpu: Gpu, job: PlannedJob) -> float:
    name = job.attn_implementation or ""
    if "flash_attention_3" in name or "flash_attention_4" in name:
        return FLASH_3
    if gpu.name.startswith(BLACKWELL) and "flash_attention_2" in name:
        return FLASH_2_ON_HOPPER * HOPPER_FLOPS / (gpu.peak_flops("bf16") or HOPPER_FLOPS)
    share = FLASH_2_ON_HOPPER if gpu.name.startswith(HOPPER + BLACKWELL) else FLASH_2
    return share * (MASKED_SHARE if job.is_padded and not needs_no_mask(name) else 1)


def weight_passes_seconds(setup: TrainingSetup, gpu: Gpu, own_tokens: int, calibration: Calibration) -> float:
    """Return the seconds of what adapters move per token, and of 4-bit weights, decoded in each pass."""
    if not setup.weights.adapters:
        return 0.0
    passes = RECOMPUTED_PASSES if setup.job.activation_checkpointing else PASSES
    trained = setup.weights.trained
    widths = sum((each.shape[-1] if ".lora_A." in each.name else each.shape[0]) * count for each, count in trained)
    decoded = sum(tensor.num_elements * count for tensor, count in setup.weights.in_4bit) * DEQUANTIZED_BYTES
    moved = own_tokens * calibration.adapter_bytes * widths + setup.accumulation_steps * decoded
    return passes * moved / (gpu.memory_bytes_per_second * KERNEL_BANDWIDTH_SHARE)


def fp32_experts_seconds(setup: TrainingSetup, gpu: Gpu, *, peak: float, tokens: int) -> float:
    """Return the seconds that `tokens` tokens take longer because their fused experts are computed in fp32.

    torch's grouped matrix multiplication is none of autocast's functions, and transformers casts its input to the dtype
    of the trained weights (`integrations/moe.py`, `_grouped_mm`; https://github.com/pytorch/pytorch/issues/174763).
    """
    shape, fp32 = setup.shape, gpu.peak_flops("fp32")
    if not setup.engine.autocasts or setup.weights.adapters or fp32 is None or not shape.num_experts:
        return 0.0
    experts = sum(tensor.num_elements for layer in shape.layers for tensor in layer if tensor.is_fused_experts)
    operations = (8 if setup.job.activation_checkpointing else 6) * experts * (shape.experts_per_token or 1)
    share = best_matmul_share(gpu) * LAYER_MATMUL_SHARE
    return tokens * operations / shape.num_experts * (1 / fp32 - 1 / peak) / share


def host_seconds(setup: TrainingSetup, calibration: Calibration) -> float:
    """Return the seconds in which the host launches a step: a GPU that computes short rows faster waits for it."""
    forward, backward = AUTOCAST_OPERATIONS if setup.engine.autocasts else HOST_OPERATIONS
    forwards = setup.forwards + setup.accumulation_steps * setup.job.method.scoring_forwards
    operations = 1.0 * setup.part.num_layers * (forward * forwards + backward * setup.accumulation_steps)
    adapters = sum(count for tensor, count in setup.weights.trained if ".lora_A." in tensor.name)
    looped, targets = _looped_experts(setup), setup.job.lora_target_modules
    operations += looped * (EXPERT_OPERATIONS[0] * forwards + EXPERT_OPERATIONS[1] * setup.accumulation_steps)
    if setup.weights.adapters:
        adapters += looped * sum(targets == ALL_LINEAR or name in targets for name in EXPERT_LINEARS)
    passes = zip(ADAPTER_OPERATIONS, (setup.forwards, setup.accumulation_steps), strict=True)
    operations += adapters * sum(launched * times for launched, times in passes)
    seconds = operations * calibration.host_seconds
    if setup.engine.traits.has_flat_states and setup.engine.shards_parameters:
        modules = sum(len({tensor.name.rpartition(".")[0] for tensor in layer}) for layer in setup.part.layers)
        modules += len(EXPERT_LINEARS) * looped
        seconds += ZERO_3_SECONDS * (modules + 2 * adapters) * (forwards + setup.accumulation_steps)
    return seconds


def _looped_experts(setup: TrainingSetup) -> int:
    part = setup.part
    if not (setup.job.numerics.looped_experts and part.num_experts):
        return 0
    mixtures = sum(any(tensor.is_expert for tensor in layer) for layer in part.layers)
    return mixtures * min(part.num_experts, setup.job.tokens_per_forward * (part.experts_per_token or 1))


def _optimizer_share(setup: TrainingSetup) -> float:
    if "optimizer" not in setup.preset.sharded_parts:
        return setup.weights.num_trained
    sharing = setup.engine.ranks_sharing
    return sum(count * tensor.num_elements / sharing(tensor) for tensor, count in setup.weights.trained)


def optimizer_seconds(setup: TrainingSetup, interconnect: Interconnect) -> float:
    """Return the seconds of the optimizer's memory traffic on the GPU; an offloaded one is part of the offload."""
    if setup.preset.offload_optimizer:
        return 0.0
    states = _state_bytes(setup.weights, setup.job.optimizer) / max(setup.weights.num_trained, 1)
    moved = (UPDATE_BYTES + STATE_ACCESSES * states) * _optimizer_share(setup)
    return moved / (interconnect.gpu.memory_bytes_per_second * KERNEL_BANDWIDTH_SHARE)


@lru_cache(maxsize=64)  # the same under all presets
def _state_bytes(weights: JobWeights, optimizer: OptimizerSpec) -> int:
    return optimizer.state_bytes(UpdatedTensor(shape=each.shape, count=count) for each, count in weights.trained)


def offload_seconds(setup: TrainingSetup, interconnect: Interconnect, nvme: int | None) -> Estimate:
    """Return the seconds between GPU and host, host and disk, and of AdamW on the host, which a node's GPUs share."""
    preset, steps = setup.preset, setup.accumulation_steps
    activations = steps * checkpointed_on_host(setup.engine, setup.weights, setup.job)
    if preset.offload_optimizer is None and preset.offload_param is None and not activations:
        return 0.0, 0.0, 0.0
    trained, shard = _optimizer_share(setup), (setup.weights.num_trained + setup.weights.num_frozen) / setup.world_size
    element_bytes = setup.engine.element_bytes
    stored_bytes = 4 if preset.traits.gathers_layers else element_bytes  # FSDP2 keeps fp32 shards on the host
    on_host, on_disk = 2.0 * activations, 0.0  # bytes of one GPU per step
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
    adam = [each * updated for each in preset.traits.host_adam_seconds]
    best = max(on_host / (pcie * PCIE_SHARE[0]), on_disk / disk[0], adam[0])
    estimate, worst = (on_host / (pcie * PCIE_SHARE[end]) + on_disk / disk[end] + adam[end] for end in (1, 2))
    return best, estimate, worst


def bubble_factor(setup: TrainingSetup) -> float:
    """Return the time of a step over that of the average stage, which waits for the slowest.

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

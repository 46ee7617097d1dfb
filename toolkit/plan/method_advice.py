"""Advice on the memory of a training method: what the reference, the logits and vLLM cost, and what would save it."""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.models.shape import ModelShape
from toolkit.plan.memory import MemoryPlan, plan_memory
from toolkit.plan.methods import SFT
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets.spec import PresetSpec
from toolkit.units import GIB, gib, percent, tenths_of_gib

MANY_LOGITS, NOTHING = 0.25, 0.001  # of what torch allocates at the peak


def method_advice(
    shape: ModelShape, preset: PresetSpec, *, world_size: int, job: PlannedJob, memory: MemoryPlan
) -> Iterator[str]:
    """Yield a line for each choice that would change the peak, with the bytes that it changes."""
    method, peak = job.method, memory.peak
    if method.method == SFT:
        yield from _loss_advice(shape, preset, world_size, job, memory)
        return
    is_lora = job.lora_r is not None
    if is_lora and method.precompute_ref_log_probs:
        yield "--precompute-ref-log-probs saves no memory with adapters: the reference is the model without them"
    if is_lora and method.scores_reference and not method.precompute_ref_log_probs:
        yield "no reference model: adapters are switched off for its log-probabilities, so precomputing saves no memory"
    if method.has_reference(lora=is_lora):
        held = max(phase.reference_bytes for phase in memory.phases)
        if held > NOTHING * peak.allocated_bytes:
            yield from _reference_advice(shape, preset, world_size, job, memory, held)
    logits = max(phase.logits_bytes for phase in memory.phases)
    if method.spec.loss in ("orpo", "simpo"):
        share = logits / memory.planned_peak_bytes
        yield f"logits of all tokens take {gib(logits)} ({share:.0%}); TRL uses no kernel of Liger's for this loss"
    elif method.use_liger_kernel:
        yield f"--use-liger-kernel saves no logits: TRL makes none ({gib(logits)} are tiles and gradients of the head)"
        yield "what Liger's kernels of layers save is not planned"
    if method.vllm_bytes and not method.vllm_enable_sleep_mode and peak.phase != "generate":
        vllm = gib(method.vllm_bytes)
        yield f"the colocated vLLM holds {vllm} while the model trains; `--vllm-enable-sleep-mode` frees it"


def _loss_advice(
    shape: ModelShape, preset: PresetSpec, world_size: int, job: PlannedJob, memory: MemoryPlan
) -> Iterator[str]:
    """What a loss without all logits would save, where they are a fourth of the peak or more."""
    share = memory.peak.logits_bytes / memory.peak.allocated_bytes
    if job.loss == "full" and share >= MANY_LOGITS:
        chunked = plan_memory(shape, preset, world_size=world_size, job=replace(job, loss="chunked"))
        if chunked.planned_peak_bytes < memory.planned_peak_bytes - GIB // 2:
            liger = "" if job.evaluates else " or `--loss fused` (Liger)"  # which makes them in an evaluation
            yield (
                f"logits are {percent(share)} of what torch allocates; with `--loss chunked` (as `toolkit train` and "
                f"TRL){liger} the peak is {tenths_of_gib(chunked.planned_peak_bytes)} GiB"
            )


def _reference_advice(
    shape: ModelShape, preset: PresetSpec, world_size: int, job: PlannedJob, memory: MemoryPlan, held: int
) -> Iterator[str]:
    method, where = job.method, "sharded" if preset.shards_parameters else "whole on each GPU"
    yield f"the reference model takes {gib(held)}, {where}"
    if "precompute_ref_log_probs" in method.spec.options:
        without = replace(job, method=replace(method, precompute_ref_log_probs=True, ref_dtype=None))
        saved = (
            memory.peak.allocated_bytes
            - plan_memory(shape, preset, world_size=world_size, job=without).peak.allocated_bytes
        )
        if saved > NOTHING * memory.peak.allocated_bytes:
            yield f"`--precompute-ref-log-probs` lowers the peak by {gib(saved)}"
    if preset.traits.gathers_layers and world_size > 1:
        gathers = "FSDP2 gathers the whole reference, and a copy of it, for its forward"
        yield f"{gathers}; ZeRO-3 gathers it module by module: `--preset zero3`"
    elif not preset.shards_parameters and world_size > 1 and held > GIB:
        yield "ZeRO-3 shards the reference too: `--preset zero3`"

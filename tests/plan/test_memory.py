"""GPU memory by phase and part, and the verdict on it."""

import functools
import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
from launching import ROOT
from model_configs import LLAMA_8B_PARAMS, llama_8b

from toolkit.hardware.gpu_table import find_gpu
from toolkit.plan.engine_buffers import PROCESS_BYTES
from toolkit.plan.logits import LOSSES, LossSizes
from toolkit.plan.memory import MemoryPlan, fit_verdict, memory_verdict, plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset
from toolkit.units import GIB

RANKS = ROOT / "benchmarks" / "results" / "gpu-ranks.json"


def planned(preset: str, ranks: int = 8, model_type: str = "llama", **job: Any) -> MemoryPlan:
    shape = replace(llama_8b(), model_type=model_type)
    return plan_memory(shape, load_preset(preset), world_size=ranks, job=PlannedJob(**job))


def test_a_verdict_leaves_a_margin_for_everything_but_the_model_states() -> None:
    sizes = {"planned_peak_bytes": 100 * GIB, "exact_bytes": 40 * GIB}  # 60 may be 9 more
    words = [fit_verdict(memory_bytes=memory * GIB, **sizes) for memory in (109, 108, 100, 99)]
    assert words == ["fits", "too_close", "too_close", "does_not_fit"]  # never more than the GPU has
    # An architecture that cannot be counted has a wider one.
    known, unknown = llama_8b(), replace(llama_8b(), counted_on="meta device", why_not_counted="it looks into values")
    plans = [plan_memory(shape, load_preset("ddp"), world_size=8, job=PlannedJob()) for shape in (known, unknown)]
    assert plans[0].peak == plans[1].peak  # the same numbers, less believed
    memory = round(1.2 * plans[0].planned_peak_bytes)
    assert [memory_verdict(plan, memory_bytes=memory) for plan in plans] == ["fits", "too_close"]
    memory = plans[0].least_peak_bytes - 1
    assert [memory_verdict(plan, memory_bytes=memory) for plan in plans] == ["does_not_fit", "too_close"]
    assert memory_verdict(plans[1], memory_bytes=plans[1].lowest_peak_bytes - 1) == "does_not_fit"


@pytest.mark.parametrize("preset", ["fsdp2", "zero3", "ddp"])
def test_the_upper_end_of_the_range_decides_whether_a_plan_fits(preset: str) -> None:
    plan = planned(preset, lora_r=16, per_device_train_batch_size=4)
    assert 1.03 < plan.possible_peak_bytes / plan.planned_peak_bytes < 1.15  # one H200: 4.4 % at worst
    memories = (plan.possible_peak_bytes, plan.possible_peak_bytes - 1, plan.least_peak_bytes - 1)
    verdicts = [memory_verdict(plan, memory_bytes=memory) for memory in memories]
    assert verdicts == ["fits", "too_close", "does_not_fit"]


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({}, {"activation_checkpointing": True}),
        ({"gradient_accumulation_steps": 4}, {}),
        ({"optim": "adamw_torch", "max_seq_length": 128}, {"max_seq_length": 128}),
        ({"max_seq_length": 128}, {"optim": "adamw_bnb_8bit", "max_seq_length": 128}),
    ],
)
def test_each_option_changes_memory_in_the_right_direction(more: dict[str, Any], less: dict[str, Any]) -> None:
    larger, smaller = (planned("ddp", 2, **{"max_seq_length": 8192, **how}).planned_peak_bytes for how in (more, less))
    assert larger > smaller


def test_accumulated_shards_of_gradients_wait_through_the_forward_pass() -> None:
    accumulates = {"gradient_accumulation_steps": 4}
    (once, sharded, whole) = (
        planned("fsdp2", max_seq_length=512, per_device_train_batch_size=1, **how).phases
        for how in ({}, accumulates, {**accumulates, "accumulate": "whole"})
    )
    forward, step = 1, 3
    assert once[forward].gradient_bytes == whole[forward].gradient_bytes == 0
    assert sharded[forward].gradient_bytes == sharded[step].gradient_bytes > 0
    assert whole[forward].buffer_bytes - sharded[forward].buffer_bytes == 2 * LLAMA_8B_PARAMS
    assert once[step] == sharded[step] == whole[step]


def test_offload_moves_model_states_from_the_gpu_to_host_or_disk() -> None:
    on_gpu, offloaded, on_disk = map(planned, ("zero3", "zero3_cpu_offload", "zero3_nvme_offload"))
    assert offloaded.peak.optimizer_bytes == offloaded.peak.gradient_bytes == 0
    assert offloaded.host.training_bytes > 8 * PROCESS_BYTES + 16 * LLAMA_8B_PARAMS > on_gpu.host.training_bytes
    assert on_disk.host.disk_bytes == pytest.approx(18 * LLAMA_8B_PARAMS, rel=0.01)  # docs/how-to/optimizers.md
    assert on_disk.host.training_bytes < offloaded.host.training_bytes


def activation_bytes(rows: int, **how: Any) -> int:
    return planned("fsdp2", per_device_train_batch_size=rows, max_seq_length=2048, **how).phases[1].activation_bytes


def test_packed_rows_need_as_much_memory_as_full_ones_and_with_a_mask_as_padded_ones() -> None:
    assert activation_bytes(1, packing=True) == activation_bytes(1)
    assert activation_bytes(2, packing=True) == activation_bytes(2, lengths_differ=False)
    dense = {"packing": True, "attn_implementation": "sdpa"}
    assert activation_bytes(2, **dense) == activation_bytes(2)
    # 32 layers save 4 heads' keys and values instead of 1 (32 heads for 8), twice in bf16, and the mask in bf16
    keys_and_values = 2 * 2 * (4096 - 1024)
    assert activation_bytes(1, **dense) - activation_bytes(1) == 32 * 2048 * (keys_and_values + 2 * 2048)
    recomputed = {"packing": True, "activation_checkpointing": True}
    one_mask = activation_bytes(3, attn_implementation="sdpa", **recomputed) - activation_bytes(3, **recomputed)
    assert one_mask == 3 * 2048**2  # a byte per pair of positions


def test_a_model_without_document_lengths_packs_with_a_mask() -> None:
    job, gemma2 = PlannedJob(packing=True), replace(llama_8b(), model_type="gemma2")
    assert job.packs_without_mask(llama_8b())
    assert not job.packs_without_mask(gemma2)
    assert replace(job, attn_implementation="flash_attention_2").packs_without_mask(gemma2)


def loss_bytes(loss: str, **sizes: int) -> tuple[int, int]:
    return LOSSES[loss](LossSizes(**sizes))


def test_full_cross_entropy_takes_12_bytes_per_logit_and_the_other_losses_less() -> None:
    sizes = LossSizes(tokens=4096, vocab_size=32000, hidden_size=4096)
    peaks = {loss: max(bytes_of(sizes)) for loss, bytes_of in LOSSES.items()}
    assert peaks["full"] == 12 * 4096 * 32000
    assert peaks["full"] > peaks["chunked_output"] > max(peaks["fused"], peaks["chunked"])


def test_ligers_loss_holds_one_chunk_and_the_gradients_in_the_dtypes_of_head_and_input() -> None:
    """1,000 words and a hidden size of 10: 100 chunks, of 32 of the 3,072 tokens."""
    size = functools.partial(loss_bytes, "fused", tokens=3072, vocab_size=1000, hidden_size=10)
    chunk, of_hidden = 2 * 32 * 1000, 2 * 3072 * 10
    assert size() == (chunk + of_hidden, of_hidden)  # the head is frozen
    assert size(head_bytes=2) == (chunk + 20_000 + of_hidden, 20_000 + of_hidden)
    gradients = 40_000 + 2 * of_hidden
    assert size(head_bytes=4, row_bytes=4) == (chunk + 20_000 + gradients, gradients)  # its fp32 head is cast


def test_ligers_kernels_save_less_than_its_loss_alone() -> None:
    def saved(**job: Any) -> int:
        plan = plan_memory(llama_8b(), load_preset("zero2"), world_size=8, job=PlannedJob(loss="fused", **job))
        return max(phase.activation_bytes for phase in plan.phases if phase.phase == "forward")

    tokens = PlannedJob().tokens_per_forward
    # of each of 32 layers, bf16: 2h of two norms instead of 6h, 6f of the MLP instead of 8f; and the last norm
    assert saved() - saved(use_liger_kernel=True) == tokens * (32 * (2 * 4 * 4096 + 2 * 14336) + 4 * 4096)


def test_the_chunked_loss_holds_one_chunk_and_the_gradients_of_the_head_and_its_input() -> None:
    """3 chunks of 1,000 words and a hidden size of 10: bf16 logits, their fp32 copy; 10,000 weights in fp32."""
    size = functools.partial(loss_bytes, "chunked", tokens=3 * 1024, vocab_size=1000, hidden_size=10)
    of_hidden = 2 * 3 * 1024 * 10
    assert size() == (6 * 1024 * 1000 + of_hidden, of_hidden)  # the head is frozen
    assert size(head_bytes=2) == (6 * 1024 * 1000 + of_hidden + 4 * 10_000, of_hidden + 2 * 10_000)
    assert size(saved_bytes=2) == (10 * 1024 * 1000 + of_hidden, of_hidden)  # a soft cap
    assert size(tokens=100) == (6 * 100 * 1000 + 2000, 2000)  # one chunk
    assert size(element_bytes=4) == (4 * 1024 * 1000 + 2 * of_hidden, 2 * of_hidden)  # fp32 has no second copy


def test_an_architecture_without_a_chunked_loss_is_planned_with_the_full_logits() -> None:
    def logits(model_type: str, loss: str) -> int:
        return max(phase.logits_bytes for phase in planned("zero3", model_type=model_type, loss=loss).phases)

    assert logits("roberta", "chunked") == logits("roberta", "full")
    assert 3 * logits("llama", "chunked") < logits("llama", "full")


def test_workspaces_of_cublas_are_what_an_h200_needed_more_than_plans_without_them() -> None:
    """Allocated peaks of a full fine-tune of Qwen3-0.6B under nine presets on two ranks, and of `single`."""
    [part] = [part for part in json.loads(RANKS.read_text())["parts"] if part["part"] == "ranks"]
    rows = [row for row in part["rows"] if row["quantity"] == "allocated"]
    more = 2 * find_gpu("h200").blas_workspace_bytes
    without, planned = (
        statistics.median(abs((row["planned"] + each) / row["measured"] - 1) for row in rows) for each in (0, more)
    )
    assert len(rows) == 11
    assert planned < without / 3
    assert planned < 0.0011

"""Published memory of preference training and of GRPO, planned where a row states enough.

The rows are `fixtures/preference_memory.csv`. None was measured with TRL 1.16, so only the probes of GRPO, whose loss
of that day is known, have a limit; the others are printed with the reason for their difference.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from measured_jobs import MODELS
from measured_jobs import shape_of as published_shape

from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.memory import plan_memory
from toolkit.plan.methods import Method
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset
from toolkit.units import GIB

FIXTURES = Path(__file__).parents[1] / "fixtures"
# GRPO in TRL 1.9 to 1.12 made fp32 logits of the completions, divided them by the temperature, and had the gradients of
# both: 16.0 to 16.2 bytes are the slope of measured jobs.
OLD_LOGIT_BYTES = 16
PROBE, PRIME = "vram_wall_probe.py", "PrimeIntellect-ai/prime-rl"
QWEN3 = {"Qwen3-0.6B": "qwen3-0.6b", "Qwen3-1.7B": "qwen3-1.7b", "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b"}
QWEN3 |= {"Qwen3-14B": "qwen3-14b", "Qwen3-32B": "qwen3-32b", "Qwen3-4B-Instruct-2507": "qwen3-4b"}


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row with its plan, or the reason for which there is none."""

    row: dict[str, str]
    why: str  # why it is not planned, or why it may differ
    planned_gib: float = 0.0
    with_logits_gib: float = 0.0  # with the logits that GRPO made then
    is_bound: bool = False  # the row is an upper bound

    @property
    def measured_gib(self) -> float:
        text = self.row["measured_gb"].removeprefix("<=")
        return float(text) * (1 if self.row["notes"].startswith("GiB") or self.is_bound else 10**9 / GIB)

    @property
    def error(self) -> float:
        return (self.with_logits_gib or self.planned_gib) / self.measured_gib - 1


def shape_of(model: str) -> ModelShape | None:
    """The shape of a published model; None where its configuration is not here."""
    if model in QWEN3:
        return read_model(str(FIXTURES / QWEN3[model] / "config.json"))
    name = {"Llama-3-8B-Instruct": "Llama-3-8B", "Qwen2.5-7B-Instruct": "Qwen2.5-7B"}.get(model, model)
    return published_shape(name) if name in MODELS else None


def published_rows() -> list[PublishedRow]:
    with (FIXTURES / "preference_memory.csv").open() as file:
        return [published(row) for row in csv.DictReader(file)]


def published(row: dict[str, str]) -> PublishedRow:
    why = why_not_planned(row)
    shape = None if why else shape_of(row["model"])
    if shape is None:
        return PublishedRow(row=row, why=why or "no configuration of this model here")
    lora_r = int(row["lora_r"].split()[0]) or None
    prompt, _, completion = row["max_length"].removeprefix("~").partition("+")
    length, ranks, is_probe = int(prompt) + int(completion or 0), int(row["gpus"]), PROBE in row["notes"]
    is_rl = row["method"] in ("grpo", "rl-policy-loss")
    method = Method(method="grpo" if is_rl else row["method"], max_completion_length=int(completion or 0) or None)
    if row["method"] == "rl-policy-loss":  # the trainer alone
        method = Method(method="grpo", vllm="server")
    job = PlannedJob(
        method=method,
        per_device_train_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=4 if is_probe else 1,
        max_seq_length=length,
        lora_r=lora_r,
        load_in_4bit=is_probe,
        activation_checkpointing=row["grad_ckpt"] == "yes",
    )
    preset = next((name for name in ("zero3", "fsdp2") if name in row["strategy"]), "single")
    plan = plan_memory(shape, load_preset(preset), world_size=ranks, job=job)
    planned, is_bound = plan.peak.allocated_bytes / GIB, "upper bound" in row["notes"] or "<" in row["measured_gb"]
    if is_probe:
        logits = OLD_LOGIT_BYTES * method.scored_tokens(job.rows, length) * shape.vocab_size
        forward = next(phase for phase in plan.phases if phase.phase == "forward")
        then = (forward.allocated_bytes - forward.logits_bytes + logits) / GIB
        return PublishedRow(row=row, planned_gib=planned, with_logits_gib=then, why="TRL 1.9 to 1.12 made logits")
    why = "reserved, by prime-rl's own model code and loss" if PRIME in row["source"] else "logits of another version"
    return PublishedRow(row=row, planned_gib=planned, is_bound=is_bound, why=why)


def why_not_planned(row: dict[str, str]) -> str:
    """Return what a row lacks, or what of it is not planned; empty where it states enough."""
    strategy, measured = row["strategy"], row["measured_gb"]
    if row["method"] not in ("dpo", "kto", "orpo", "simpo", "grpo", "rl-policy-loss"):
        return f"{row['method']}: not a method that is planned"
    if measured in ("OOM", "FAILED", "fits"):
        return f"{measured}: no figure"
    for word, reason in (
        *(("Unsloth", "Unsloth's own kernels and offload"), ("megatron", "Megatron"), ("vLLM", "verl's own trainer")),
        *(("unknown", "its strategy is not stated"), ("ulysses", "Ulysses is not planned for it")),
    ):
        if word in strategy:
            return reason
    if not row["micro_batch"] or not row["max_length"] or not row["lora_r"]:
        return "batch, length or method of adaptation is not stated"
    if row["grad_ckpt"] == "offloaded":
        return "activations are offloaded"
    if "padding_free" in row["notes"] or "vLLM colocate" in row["notes"]:
        return "real lengths, or vLLM's share, are not stated"
    return ""


def test_probes_of_grpo_are_planned_with_the_logits_of_their_day() -> None:
    planned = [row for row in published_rows() if row.planned_gib]
    for row in planned:
        where = f"{row.row['model']} | {row.row['strategy']}, {row.row['gpus']} | {row.row['max_length']}"
        figures = f"{'at most ' * row.is_bound}{row.measured_gib:.1f} | {row.planned_gib:.1f}"
        then = f"{row.with_logits_gib:.1f}" if row.with_logits_gib else ""
        print(f"| {row.row['method']} | {where} | {figures} | {then} | {row.error:+.0%} | {row.why} |")
    errors = [abs(row.error) for row in planned if row.with_logits_gib]
    print(f"{len(planned)} rows planned")
    assert len(errors) == 9
    assert (sorted(errors)[len(errors) // 2] <= 0.05, max(errors) <= 0.2) == (True, True)


def test_published_upper_bounds_are_not_exceeded() -> None:
    bounds = [row for row in published_rows() if row.planned_gib and row.is_bound]
    assert bounds
    assert [row.row["source"] for row in bounds if row.planned_gib > row.measured_gib] == []


def test_every_row_is_planned_or_has_a_reason() -> None:
    assert all(row.why for row in published_rows())

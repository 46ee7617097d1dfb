"""Published memory of preference training and of GRPO (`fixtures/preference_memory.csv`).

None was measured with TRL 1.16, so only two kinds of rows have a limit: the probes of GRPO, whose loss of that day is
known, and upper bounds. `-s` prints every row that states enough.
"""

import csv
from dataclasses import dataclass
from functools import cache
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
PROBE = "vram_wall_probe.py"
METHODS = ("dpo", "kto", "orpo", "simpo", "grpo", "rl-policy-loss")
# Other programs' own kernels or trainers, and strategies that are not planned or not stated.
OTHER_STRATEGIES = ("Unsloth", "megatron", "vLLM", "unknown", "ulysses")
# Real lengths, or vLLM's share, are not stated.
OTHER_JOBS = ("padding_free", "vLLM colocate")


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """One row with its plan; of a probe with the logits that GRPO made then."""

    row: dict[str, str]
    planned_gib: float

    @property
    def is_bound(self) -> bool:
        return "upper bound" in self.row["notes"] or "<" in self.row["measured_gb"]

    @property
    def measured_gib(self) -> float:
        size = float(self.row["measured_gb"].removeprefix("<="))
        return size if self.row["notes"].startswith("GiB") or self.is_bound else size * 10**9 / GIB


def shape_of(model: str) -> ModelShape | None:
    """The shape of a published model; None where its configuration is not here."""
    folder = FIXTURES / model.lower().removesuffix("-instruct-2507")
    if (folder / "config.json").is_file():
        return read_model(str(folder / "config.json"))
    name = {"Llama-3-8B-Instruct": "Llama-3-8B", "Qwen2.5-7B-Instruct": "Qwen2.5-7B"}.get(model, model)
    return published_shape(name) if name in MODELS else None


def states_enough(row: dict[str, str]) -> bool:
    return (
        row["method"] in METHODS
        and row["measured_gb"] not in ("OOM", "FAILED", "fits")
        and not any(word in row["strategy"] for word in OTHER_STRATEGIES)
        and all(row[name] for name in ("micro_batch", "max_length", "lora_r"))
        and row["grad_ckpt"] != "offloaded"
        and not any(word in row["notes"] for word in OTHER_JOBS)
    )


@cache
def planned_rows() -> list[PlannedRow]:
    with (FIXTURES / "preference_memory.csv").open() as file:
        rows = [(row, shape_of(row["model"])) for row in csv.DictReader(file) if states_enough(row)]
    return [planned(row, shape) for row, shape in rows if shape is not None]


def planned(row: dict[str, str], shape: ModelShape) -> PlannedRow:
    prompt, _, completion = row["max_length"].removeprefix("~").partition("+")
    length, is_probe = int(prompt) + int(completion or 0), PROBE in row["notes"]
    method = Method(method=row["method"], max_completion_length=int(completion or 0) or None)
    if row["method"] == "rl-policy-loss":  # the trainer alone
        method = Method(method="grpo", vllm="server")
    job = PlannedJob(
        method=method,
        per_device_train_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=4 if is_probe else 1,
        max_seq_length=length,
        lora_r=int(row["lora_r"].split()[0]) or None,
        load_in_4bit=is_probe,
        activation_checkpointing=row["grad_ckpt"] == "yes",
    )
    preset = next((name for name in ("zero3", "fsdp2") if name in row["strategy"]), "single")
    plan = plan_memory(shape, load_preset(preset), world_size=int(row["gpus"]), job=job)
    size = plan.peak.allocated_bytes
    if is_probe:
        forward = next(phase for phase in plan.phases if phase.phase == "forward")
        logits = OLD_LOGIT_BYTES * method.scored_tokens(job.rows, length) * shape.vocab_size
        size = forward.allocated_bytes - forward.logits_bytes + logits
    return PlannedRow(row=row, planned_gib=size / GIB)


def test_probes_of_grpo_are_planned_with_the_logits_of_their_day() -> None:
    for each in planned_rows():
        print(*each.row.values(), f"measured {each.measured_gib:.1f}, planned {each.planned_gib:.1f} GiB", sep=" | ")
    probes = [each for each in planned_rows() if PROBE in each.row["notes"]]
    errors = sorted(abs(each.planned_gib / each.measured_gib - 1) for each in probes)
    assert (len(planned_rows()), len(errors)) == (24, 9)
    assert (errors[len(errors) // 2] <= 0.05, errors[-1] <= 0.2) == (True, True)


def test_published_upper_bounds_are_not_exceeded() -> None:
    bounds = [each for each in planned_rows() if each.is_bound]
    assert bounds
    assert [each.row["source"] for each in bounds if each.planned_gib > each.measured_gib] == []

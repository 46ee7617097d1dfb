"""Cases of the GPU validation, registered before anything was measured, in a calibration half and a test half.

Constants of the planner may be fitted on the calibration half only; published errors are those of the test half. Each
architecture and its family belong to one half. The grid was registered twice: in the first one, of which nothing was
measured, Qwen 3, Gemma 2 and Mistral were in the test half, and traces of these families then shaped formulas. The
order is part of the grid: in the first pass every preset meets every architecture, so that a run that is cut short is
still balanced. Rows are full, so nothing is padded.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

Case = dict[str, Any]

SEED = 6
PASSES = 3
# Shapes of published models (their config.json) or their proportions at a size that fits, without weights: parameter
# counts from 0.36 to 3.2 billion, so that peaks spread over an 80 GB card. The planner's formulas were shaped by traces
# and saved tensors of the calibration families. Of the test families only parameter counts had been checked when the
# grid was registered: three have formulas, seven have to be built by transformers.
REGISTERED = [json.loads(line) for line in Path(__file__).with_name("architectures.jsonl").read_text().splitlines()]
CALIBRATION, TEST, TINY_ARCHITECTURES = (
    {each["name"]: each["config"] for each in REGISTERED if each["half"] == half}
    for half in ("calibration", "test", "tiny")
)
ARCHITECTURES = CALIBRATION | TEST
WORLD_SIZES = {
    "single": (1,),
    **{name: (1, 2, 8, 64) for name in ("ddp", "zero1", "zero2", "zero3", "zero2_cpu_offload", "zero3_cpu_offload")},
    **{name: (2, 8, 64) for name in ("fsdp2", "fsdp2_grad_op", "fsdp2_cpu_offload")},
    "fsdp2_hybrid": (8, 64),
}
METHODS = ("full", "lora")
# Length and rows of a micro-batch: 4,096 to 16,384 tokens, so that jobs with short rows are not small.
BATCHES = ((512, 8), (1024, 8), (2048, 4), (4096, 2), (8192, 1), (8192, 2))


def registered_grid() -> list[Case]:
    """Return every architecture under every preset, three times, each time with another job."""
    chance = random.Random(SEED)
    cases = []
    for _ in range(PASSES):
        once = [_case(name, preset, chance) for name in ARCHITECTURES for preset in WORLD_SIZES]
        chance.shuffle(once)
        cases += once
    return [case | {"id": f"{number:03d}"} for number, case in enumerate(cases)]


def _case(architecture: str, preset: str, chance: random.Random) -> Case:
    length, rows = chance.choice(BATCHES)
    split = "calibration" if architecture in CALIBRATION else "test"
    return {
        **{"split": split, "architecture": architecture, "preset": preset},
        **{"world_size": chance.choice(WORLD_SIZES[preset]), "rank": 0, "method": chance.choice(METHODS)},
        **{"activation_checkpointing": chance.random() < 0.5, "max_seq_length": length},
        "per_device_train_batch_size": rows,
    }


def tiny_grid() -> list[Case]:
    """Return a few cases that a CPU rehearses in seconds, to try the script."""
    jobs = [("ddp", 2, "full", False), ("zero2", 8, "full", True), ("zero3", 64, "lora", False)]
    jobs += [("fsdp2", 8, "lora", True)]
    cases = [
        {
            "split": split,
            "architecture": architecture,
            **{"preset": preset, "world_size": world_size, "rank": 0, "method": method},
            **{"activation_checkpointing": recomputes, "max_seq_length": 32, "per_device_train_batch_size": 2},
        }
        for preset, world_size, method, recomputes in jobs
        for architecture, split in (("tiny-llama", "calibration"), ("tiny-qwen3", "test"))
    ]
    return [case | {"id": f"tiny-{number}"} for number, case in enumerate(cases)]


def digest(cases: list[Case]) -> str:
    """Return the SHA-256 of cases and architectures, by which results name their grid."""
    body = {"cases": cases, "architectures": ARCHITECTURES | TINY_ARCHITECTURES}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

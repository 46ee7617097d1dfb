"""The rows of `toolkit/plan/measured_by_others.jsonl`, made from the published fixtures and the recorded H200.

PYTHONPATH=tests/support:. python tests/support/measured_rows.py    # writes the file again
"""

import json
from pathlib import Path
from typing import Any

from measured_jobs import GPU_NAMES, PRESETS, rows, shape_of

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import TrainingSetup
from toolkit.presets import load_preset
from toolkit.record.shared_run import SharedRun
from toolkit.units import GIB

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "toolkit" / "plan" / "measured_by_others.jsonl"
DTYPES = {"pure bf16": "bfloat16", "bf16 autocast over bf16-loaded": "bfloat16", "bf16, fp32 AdamW": "float32"}
H200_CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("speed", "eager"): {"per_device_train_batch_size": 8, "master_dtype": "float32"},
    ("methods", "lora"): {"per_device_train_batch_size": 2, "lora_r": 16},
    ("methods", "qlora"): {"per_device_train_batch_size": 2, "lora_r": 16, "load_in_4bit": True},
}
LLAMA_1B = 1_235_814_400


def seed_rows() -> list[SharedRun]:
    """Return all rows: those of the H200, then the published full fine-tunes that name all of a row's fields."""
    return [*_h200(), *filter(None, map(_published, rows("measured_speed")))]


def _h200() -> list[SharedRun]:
    record = json.loads((ROOT / "benchmarks" / "results" / "gpu-check.json").read_text())
    measured = {
        (part["part"], row["case"], row["quantity"]): row["measured"]
        for part in record["parts"]
        for row in part["rows"]
    }
    found = []
    for (part, case), fields in H200_CASES.items():
        seconds = measured[part, case, "step"]
        trained = LLAMA_1B
        if "lora_r" in fields:
            job = PlannedJob(lora_r=fields["lora_r"])
            shape, preset = read_model("meta-llama/Llama-3.2-1B"), load_preset("single")
            trained = TrainingSetup(shape=shape, preset=preset, world_size=1, job=job).weights.num_trained
        found.append(
            SharedRun(
                source="docs/evidence/gpu.md",
                model="meta-llama/Llama-3.2-1B",
                num_params=LLAMA_1B,
                num_trainable_params=trained,
                **{"preset": "single", "world_size": 1, "gpu": "h200", "max_seq_length": 2048},
                activation_checkpointing=False,
                step_seconds_median=seconds,
                tokens_per_second_per_gpu=round(fields["per_device_train_batch_size"] * 2048 / seconds, 1),
                peak_allocated_bytes=measured[part, case, "allocated"],
                peak_driver_bytes=measured[part, case, "driver"],
                versions=record["versions"],
                **fields,
            )
        )
    return found


def _published(row: dict[str, str]) -> SharedRun | None:
    """Return a published full fine-tune; None for one that lacks a field, or trains as no preset does."""
    strategy, dtype = row["strategy"].split(" (")[0], row["precision"].split(" (")[0]
    master = next((value for words, value in DTYPES.items() if dtype.startswith(words)), None)
    numbers = (row["micro_batch"], row["seq_len"], row["grad_accum"], row["tokens_per_s_per_gpu"])
    # Optimizer states alone on the host are none of the presets.
    known = (
        "optimizer cpu offload" not in strategy
        and row["method"] == "full"
        and row["gpu"] in GPU_NAMES
        and strategy in PRESETS
    )
    known = known and master is not None
    if not known or not all(numbers) or row["grad_ckpt"] not in ("yes", "no") or "not stated" in row["strategy"]:
        return None
    size = shape_of(row["model"].split(" (")[0]).num_params
    peak = round(float(row["peak_gib"]) * GIB) if row["peak_gib"] else None
    kind = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}.get(row["peak_kind"])
    return SharedRun(
        source=row["source"],
        num_params=size,
        num_trainable_params=size,
        preset=PRESETS[strategy],
        world_size=int(row["gpus"]),
        num_nodes=int(row["nodes"] or 1),
        gpu=find_gpu(GPU_NAMES[row["gpu"]]).name,
        per_device_train_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row["grad_accum"]),
        max_seq_length=int(row["seq_len"]),
        activation_checkpointing=row["grad_ckpt"] == "yes",
        master_dtype=master,
        tokens_per_second_per_gpu=float(row["tokens_per_s_per_gpu"]),
        **({kind: peak} if kind and peak else {}),
    )


if __name__ == "__main__":
    lines = [json.dumps(row.model_dump(exclude_defaults=True)) + "\n" for row in seed_rows()]
    SHIPPED.write_text("".join(lines))
    print(f"{len(lines)} rows")

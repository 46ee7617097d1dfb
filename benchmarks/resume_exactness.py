"""Stop every preset at several steps, full and LoRA, and resume: losses must equal those of the uninterrupted run.

    python benchmarks/resume_exactness.py --work DIR [--cases 5] [--only zero1]

18 rows, two ranks, per-device batch size 2, two accumulation steps: an epoch has 5 batches per rank, so 3 steps, the
last of them short and uneven. Loss, gradient norm and batch of each rank and step are compared bit for bit. Finished
cases are kept in the record: the same command resumes, `--cases` at a time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from record import read_result, write_result
from small_job import small_model, train, trained

from toolkit.demo.assets import default_data_file
from toolkit.record.folder import RunFolder

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero2_cpu_offload", "zero3_cpu_offload", "fsdp2_grad_op")
STEPS = 6
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora_r": 4, "lora_dropout": 0.1}}
# Each preset and method, stopped in the middle of an epoch, at its end, and in the middle of the next.
CASES = [(preset, method, step) for step in (2, 3, 5) for preset in PRESETS for method in METHODS]


def is_exact(preset: str, method: str, step: int, work: Path) -> bool:
    """Train a preset to the end, once, and again from the checkpoint of a step; return True if nothing differs."""
    rows = work / "rows.jsonl"
    rows.write_text("\n".join(default_data_file("faq-en-alpaca.jsonl").read_text().splitlines()[:18]) + "\n")
    job = {"model_name_or_path": small_model(work / "model"), "dataset": rows, "max_steps": STEPS, **METHODS[method]}
    job |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = RunFolder(work / f"{preset}-{method}")
    if not (whole.path / f"checkpoint-{STEPS}").exists():
        train(preset, whole.path, save_steps=1, **job)
    checkpoint = {"save_strategy": "no", "resume_from_checkpoint": whole.path / f"checkpoint-{step}"}
    resumed = train(preset, work / f"{preset}-{method}-{step}", **job, **checkpoint)
    return trained(resumed) == trained(whole, after=step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", type=int, help="run at most this many cases now")
    parser.add_argument("--only", choices=PRESETS, help="run only this preset")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = {(row["preset"], row["method"], row["step"]): row for row in read_result("resume_exactness")[1]}
    left = [case for case in CASES if case not in rows and given.only in (None, case[0])]
    for preset, method, step in left[: given.cases]:
        equal = is_exact(preset, method, step, given.work.absolute())
        rows[preset, method, step] = {"preset": preset, "method": method, "step": step, "bit_for_bit": equal}
        print(f"{preset} {method}, stopped after step {step} of {STEPS}: bit for bit {equal}", flush=True)
        write_result("resume_exactness", {"cases": len(CASES)}, [rows[case] for case in CASES if case in rows])
    return 0 if all(row["bit_for_bit"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Stop every preset at several steps, full and LoRA, and resume: losses must equal those of the uninterrupted run.

    python benchmarks/resume_exactness.py WORK_FOLDER [--cases 5] [--only zero1]

The tests' tiny random Llama (WORK_FOLDER/model) on 18 rows: two ranks, per-device batch size 2, two accumulation steps.
An epoch has 5 batches per rank, so 3 steps, the last of them short and uneven. Loss, gradient norm and batch of each
rank and step are compared bit for bit. Finished cases are kept: the same command resumes, `--cases` at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, write_result

from toolkit.demo.assets import default_data_file
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero2_cpu_offload", "zero3_cpu_offload", "fsdp2_grad_op")
STEPS = 6
METHODS = {"full": [], "lora": ["--lora_r", "4", "--lora_dropout", "0.1"]}
COMPARED = ("step", "loss", "grad_norm", "local_grad_norm", "batch_sha256")


def cases() -> list[tuple[str, str, int]]:
    """Return each preset and method, stopped in the middle of an epoch, at its end, and in the middle of the next."""
    return [(preset, method, step) for step in (2, 3, 5) for preset in PRESETS for method in METHODS]


def train(preset: str, method: str, work: Path, output: Path, *words: str) -> RunFolder:
    rows = work / "rows.jsonl"
    rows.write_text("\n".join(default_data_file("faq-en-alpaca.jsonl").read_text().splitlines()[:18]) + "\n")
    job = ["--model_name_or_path", str(work / "model"), "--dataset", str(rows), "--max_seq_length", "64"]
    job += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", str(STEPS)]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", "--cpu"]
    command += ["--", *job]
    command += ["--save_model", "false", "--output_dir", str(output), *METHODS[method], *words]
    subprocess.run(command, capture_output=True, check=True)
    return RunFolder(output)


def trained(folder: RunFolder, *, after: int) -> list[list[list[Any]]]:
    """Return each rank's batches, losses and gradient norms."""
    ranks = [read_rows(folder.rank_rows(rank)) for rank in (0, 1)]
    return [[[getattr(row, key) for key in COMPARED] for row in rows if row.step > after] for rows in ranks]


def exact(preset: str, method: str, step: int, work: Path) -> bool:
    whole = RunFolder(work / f"{preset}-{method}")
    if not (whole.path / f"checkpoint-{STEPS}").exists():
        train(preset, method, work, whole.path, "--save_steps", "1")
    words = ["--save_strategy", "no", "--resume_from_checkpoint", str(whole.path / f"checkpoint-{step}")]
    resumed = train(preset, method, work, work / f"{preset}-{method}-{step}", *words)
    return trained(resumed, after=0) == trained(whole, after=step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that contains `model`, a small model with its tokenizer")
    parser.add_argument("--cases", type=int, default=None, help="run at most this many cases now")
    parser.add_argument("--only", default=None, help="run only this preset")
    arguments = parser.parse_args()
    kept = RESULTS / "resume_exactness.json"
    known = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = {(each["preset"], each["method"], each["step"]): each for each in known}
    left = [case for case in cases() if case not in rows and arguments.only in (None, case[0])]
    for preset, method, step in left[: arguments.cases]:
        equal = exact(preset, method, step, arguments.work.absolute())
        rows[preset, method, step] = {"preset": preset, "method": method, "step": step, "bit_for_bit": equal}
        print(f"{preset} {method}, stopped after step {step} of {STEPS}: bit for bit {equal}", flush=True)
        ordered = [rows[case] for case in cases() if case in rows]
        write_result("resume_exactness", {"cases": len(cases()), "rows": ordered})
    return 0 if all(each["bit_for_bit"] for each in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

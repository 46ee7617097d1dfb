"""Resume every preset's checkpoint under every other, and on other world sizes: losses against the uninterrupted run.

    python benchmarks/resume_conversion.py WORK_FOLDER [--pairs 5]

The tests' tiny random Llama (WORK_FOLDER/model), 10 steps, saved after step 4, weight decay 0.1, global batch size 4.
Each pair trains the other 6 steps. The difference is the largest relative difference of a step's loss. Finished pairs
are kept: the same command resumes, `--pairs` at a time. The table is in docs/evidence/checkpoints.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, write_result, write_table

from toolkit.demo.assets import default_data_file
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import measure, read_steps

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "checkpoints.md"
TABLE = "pairs"
PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
STEPS, SAVED, GLOBAL_BATCH = 10, 4, 4
HEADER = ("from, 2 ranks", "to", "largest difference of a loss, relative")


def pairs() -> list[tuple[str, str, int]]:
    """Return every pair of presets on two ranks, and each engine from and to one and four ranks."""
    found = [(source, target, 2) for source in PRESETS for target in PRESETS if source != target]
    found += [(name, name, 4) for name in PRESETS]
    found += [("ddp", "single", 1), ("fsdp2", "single", 1), ("zero1", "zero1", 1)]
    return [*found, ("zero2", "zero2", 1), ("zero3", "zero3", 1), ("zero3", "zero3_cpu_offload", 4)]


def train(preset: str, ranks: int, model: Path, output: Path, *words: str) -> str | None:
    """Train; return None, or the last lines of a run that failed."""
    job = ["--model_name_or_path", str(model), "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    job += ["--max_seq_length", "64", "--learning_rate", "1e-3", "--weight_decay", "0.1", "--max_steps", str(STEPS)]
    job += ["--per_device_train_batch_size", str(GLOBAL_BATCH // ranks), "--save_model", "false"]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", str(ranks), "--cpu"]
    command += ["--", *job, "--output_dir", str(output), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if ended.returncode == 0 else ended.stderr[-600:]


def losses(folder: Path) -> list[float]:
    return measure(read_steps(RunFolder(folder)), untimed_steps=0).losses


def row(source: str, target: str, ranks: int, work: Path) -> dict[str, Any]:
    model, whole = work / "model", work / source
    if not (whole / f"checkpoint-{SAVED}").exists():
        failed = train(source, 2, model, whole, "--save_steps", str(SAVED))
        assert failed is None, failed
    output = work / f"{source}-{target}-{ranks}"
    words = ["--save_strategy", "no", "--resume_from_checkpoint", str(whole / f"checkpoint-{SAVED}")]
    failed = train(target, ranks, model, output, *words)
    facts = {"source": source, "source_world_size": 2, "target": target, "target_world_size": ranks}
    if failed is not None:
        return {**facts, "largest_relative_difference": None, "failed": failed}
    expected, found = losses(whole)[SAVED:], losses(output)
    assert len(expected) == len(found) == STEPS - SAVED
    return {**facts, "largest_relative_difference": max(abs(a - b) / a for a, b in zip(expected, found, strict=True))}


def cells(each: dict[str, Any]) -> tuple[str, str, str]:
    difference = each["largest_relative_difference"]
    to = f"`{each['target']}`, {each['target_world_size']} rank{'s' * (each['target_world_size'] > 1)}"
    return f"`{each['source']}`", to, "failed" if difference is None else f"{difference:.1e}" if difference else "0"


def table_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [cells(each) for each in found["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder that contains `model`, a small model with its tokenizer")
    parser.add_argument("--pairs", type=int, default=None, help="run at most this many pairs now")
    arguments = parser.parse_args()
    kept = RESULTS / "resume_conversion.json"
    known = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = {(each["source"], each["target"], each["target_world_size"]): each for each in known}
    for pair in [pair for pair in pairs() if pair not in rows][: arguments.pairs]:
        rows[pair] = row(*pair, arguments.work.absolute())
        print(json.dumps(rows[pair]), flush=True)
        ordered = [rows[each] for each in pairs() if each in rows]
        found = {"pairs": len(pairs()), "rows": ordered}
        write_result("resume_conversion", found)
        write_table(DOCUMENT, TABLE, HEADER, table_rows(found))


if __name__ == "__main__":
    main()

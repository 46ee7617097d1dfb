"""Resume every preset's checkpoint under every other, and on other world sizes: losses against the uninterrupted run.

    python benchmarks/resume_elsewhere.py WORK_FOLDER [--only zero2-zero3-2 ...]

The tiny random Llama of the tests, 10 steps, saved after step 4 with weight decay 0.1; a global batch of 4. Each pair
trains the other 6 steps. The difference is the largest of a step's loss, over the loss. A pair done before is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PRESETS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
STEPS, SAVED = 10, 4
RESULTS = ROOT / "benchmarks" / "results" / "resume_elsewhere.json"


def pairs() -> list[tuple[str, str, int]]:
    """Every preset to every other on two ranks; one and four ranks to and from each engine."""
    found = [(source, target, 2) for source in PRESETS for target in PRESETS if source != target]
    found += [(name, name, 4) for name in PRESETS]
    found += [("ddp", "single", 1), ("fsdp2", "single", 1), ("zero1", "zero1", 1)]
    return [*found, ("zero2", "zero2", 1), ("zero3", "zero3", 1), ("zero3", "zero3_cpu_offload", 4)]


def train(preset: str, ranks: int, model: Path, output: Path, *words: str) -> str | None:
    """None, or the last words of a run that failed."""
    from toolkit.demo.assets import default_data_file

    job = ["--model_name_or_path", str(model), "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    job += ["--max_seq_length", "64", "--learning_rate", "1e-3", "--weight_decay", "0.1", "--max_steps", str(STEPS)]
    job += ["--per_device_train_batch_size", str(4 // ranks), "--save_model", "false", "--output_dir", str(output)]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", str(ranks), "--cpu"]
    ended = subprocess.run([*command, "--", *job, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if ended.returncode == 0 else ended.stderr[-600:]


def losses(folder: Path, ranks: int) -> list[float]:
    files = [folder / "ranks" / f"rank{rank}.jsonl" for rank in range(ranks)]
    rows = [[json.loads(line)["loss"] for line in file.read_text().splitlines()] for file in files]
    return [sum(step) / ranks for step in zip(*rows, strict=True)]


def row(source: str, target: str, ranks: int, model: Path, folder: Path) -> dict[str, Any]:
    whole = folder / source
    if not (whole / f"checkpoint-{SAVED}").exists():
        failed = train(source, 2, model, whole, "--save_steps", str(SAVED))
        assert failed is None, failed
    output = folder / f"{source}-{target}-{ranks}"
    words = ["--save_strategy", "no", "--resume_from_checkpoint", str(whole / f"checkpoint-{SAVED}")]
    failed = train(target, ranks, model, output, *words)
    facts = {"source": source, "source_world_size": 2, "target": target, "target_world_size": ranks}
    if failed is not None:
        return {**facts, "largest_relative_difference": None, "failed": failed}
    expected, found = losses(whole, 2)[SAVED:], losses(output, ranks)
    assert len(expected) == len(found) == STEPS - SAVED
    return {**facts, "largest_relative_difference": max(abs(a - b) / a for a, b in zip(expected, found, strict=True))}


def main(folder: Path, only: list[str]) -> None:
    model = folder / "model"
    assert model.exists(), f"put a small model with its tokenizer into {model}"
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {(each["source"], each["target"], each["target_world_size"]): each for each in known}
    for pair in pairs():
        if (only and "-".join(map(str, pair)) not in only) or pair in rows:
            continue
        rows[pair] = row(*pair, model, folder)
        print(json.dumps(rows[pair]), flush=True)
        content = {"command": "python benchmarks/resume_elsewhere.py WORK_FOLDER", "rows": list(rows.values())}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), [word for word in sys.argv[2:] if word != "--only"])

"""Tokens per second of the timed steps under `toolkit train`, against a plain Trainer script on the same job.

    python benchmarks/overhead.py --preset ddp zero2 --pairs 5 --work DIR

Both sides train LoRA on the default model in fp32 on two CPU ranks, on the same batches: their losses are compared
step by step. A ratio of 1 means that the toolkit costs nothing; the goal is a median of at least 0.98.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
RANKS = 2
MAX_SEQ_LENGTH = 64
GOAL = 0.98


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Input of one side, and where it may write."""

    model: Path
    dataset: Path
    tokens: Path
    """The same rows, tokenised, on disk."""
    scratch: Path
    steps: int
    untimed_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Result of one run: seconds of the timed steps, losses and tokens."""

    wall_seconds: float
    """Per step the slowest rank, summed over the timed steps."""
    cpu_seconds: float
    """Of all ranks, over the timed steps."""
    losses: list[list[float]]
    """Per step, each rank's."""
    tokens: int | None
    """Of all ranks over the timed steps; None for the bare script, which trains on the same batches uncounted."""


def reduce(ranks: list[list[dict[str, Any]]], untimed_steps: int) -> Side:
    """Reduce the rows of all ranks, in the same way for both sides."""
    steps = list(zip(*ranks, strict=True))
    timed = steps[untimed_steps:]
    counted = [row["tokens"] for step in timed for row in step if "tokens" in row]
    return Side(
        wall_seconds=math.fsum(max(row["seconds"] for row in step) for step in timed),
        cpu_seconds=math.fsum(row["cpu_seconds"] for step in timed for row in step),
        losses=[[row["loss"] for row in step] for step in steps],
        tokens=sum(counted) or None,
    )


def run_toolkit(preset: str, job: Job) -> Side:
    with tempfile.TemporaryDirectory(dir=job.scratch) as output:
        training = {
            "model_name_or_path": job.model,
            "dataset": job.dataset,
            "output_dir": output,
            "max_steps": job.steps,
            "untimed_steps": job.untimed_steps,
            "max_seq_length": MAX_SEQ_LENGTH,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-4,
            "lora_r": 8,
            "save_model": "false",
            "save_strategy": "no",
        }
        words = [word for name, value in training.items() for word in (f"--{name}", str(value))]
        execute(
            [str(BIN / "toolkit"), "train", "--preset", preset, "--num-processes", str(RANKS), "--cpu", "--", *words]
        )
        paths = [Path(output) / "ranks" / f"rank{rank}.jsonl" for rank in range(RANKS)]
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return reduce(rows, job.untimed_steps)


def run_bare(preset: str, job: Job) -> Side:
    with tempfile.TemporaryDirectory(dir=job.scratch) as output:
        options = ["--config_file", f"accelerate_configs/{preset}.yaml", "--num_processes", str(RANKS)]
        options += ["--num_machines", "1", "--main_process_port", "0"]
        script = ["benchmarks/bare_trainer.py", "--model", str(job.model), "--data", str(job.tokens)]
        script += ["--output", output, "--max_steps", str(job.steps)]
        execute([str(BIN / "accelerate"), "launch", *options, *script])
        rows = [json.loads((Path(output) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return reduce(rows, job.untimed_steps)


def execute(argv: list[str]) -> None:
    """Run one side, in the same environment as the other."""
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def environment() -> dict[str, str]:
    """Return threads, compiled ops and warnings as `toolkit train` sets them, so that only the scripts differ."""
    from toolkit.cache import torch_extensions_folder

    chosen = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // RANKS)),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder())),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | chosen


def prepare(scratch: Path, steps: int, untimed_steps: int) -> Job:
    """Prepare the default model and data, and write the toolkit's tokens to disk for the plain script."""
    import datasets

    from toolkit.demo.assets import default_data_file, prepare_default_model
    from toolkit.run.script_arguments import ModelArguments
    from toolkit.train.data.tokenization import load_rows, tokenize
    from toolkit.train.model.loading import load_tokenizer

    datasets.disable_progress_bars()
    model, dataset, tokens = prepare_default_model(), default_data_file(), scratch / "tokens"
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(model)), chat_template=None)
    rows, data_format = load_rows(str(dataset), "train")
    tokenized = tokenize(
        rows, tokenizer=tokenizer, data_format=data_format, max_seq_length=MAX_SEQ_LENGTH, loss_on=None
    )
    tokenized.dataset.save_to_disk(tokens)
    return Job(model=model, dataset=dataset, tokens=tokens, scratch=scratch, steps=steps, untimed_steps=untimed_steps)


def measure_pair(preset: str, number: int, job: Job) -> dict[str, Any]:
    """Run both sides once; every second pair begins with the plain script."""
    sides: dict[str, Callable[[str, Job], Side]] = {"toolkit": run_toolkit, "bare": run_bare}
    order = sides if number % 2 == 0 else reversed(sides)
    measured = {name: asdict(sides[name](preset, job)) for name in order}
    return {"preset": preset, "number": number, **measured}


def reduced(preset: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one preset's ratios by pair, and whether both sides trained the same."""
    both = [(Side(**pair["toolkit"]), Side(**pair["bare"])) for pair in measured]
    return {
        "preset": preset,
        "tokens": both[0][0].tokens,
        # Both sides train the same tokens, so that the ratio of tokens per second is the inverse ratio of the seconds.
        "ratio_wall": spread([bare.wall_seconds / ours.wall_seconds for ours, bare in both]),
        "ratio_cpu": spread([bare.cpu_seconds / ours.cpu_seconds for ours, bare in both]),
        "largest_loss_difference": max(loss_difference(ours, bare) for ours, bare in both),
        "pairs": [{side: seconds_of(pair[side]) for side in ("toolkit", "bare")} for pair in measured],
    }


def seconds_of(side: dict[str, Any]) -> dict[str, float]:
    return {name: side[name] for name in ("wall_seconds", "cpu_seconds")}


def loss_difference(ours: Side, bare: Side) -> float:
    """Return the largest relative difference between the two sides' losses, over steps and ranks."""
    both = zip(chain.from_iterable(ours.losses), chain.from_iterable(bare.losses), strict=True)
    return max(abs(a - b) / abs(b) for a, b in both)


def table_rows(result: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for clock, key in (("wall", "wall_seconds"), ("CPU", "cpu_seconds")):
        ratios = result[f"ratio_{clock.lower()}"]
        speeds = [
            spread([result["tokens"] / pair[side][key] for pair in result["pairs"]])["median"]
            for side in ("toolkit", "bare")
        ]
        verdict = "reached" if ratios["median"] >= GOAL else "missed"
        shown = [f"{ratios[name]:.3f}" for name in ("median", "min", "max")]
        rows.append([result["preset"], f"tokens per {clock} second", *(f"{s:.1f}" for s in speeds), *shown, verdict])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of `toolkit train` against a plain Trainer script.")
    parser.add_argument("--preset", nargs="+", default=["ddp", "zero2"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--untimed-steps", type=int, default=2)
    parser.add_argument("--name", default="overhead", help="name of the result file")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pairs; the same command resumes")
    parser.add_argument("--at-most", type=int, help="stop after this many pairs; the next call resumes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    ledger = given.work / "pairs.jsonl"
    done = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    finished = {(pair["preset"], pair["number"]) for pair in done}
    wanted = [(preset, number) for number in range(given.pairs) for preset in given.preset]
    waiting = [pair for pair in wanted if pair not in finished]
    with tempfile.TemporaryDirectory() as scratch:
        job = prepare(Path(scratch), given.steps, given.untimed_steps)
        for preset, number in waiting[: given.at_most]:
            done.append(measure_pair(preset, number, job))
            with ledger.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    if given.at_most is not None and len(waiting) > given.at_most:
        raise SystemExit(f"{len(waiting) - given.at_most} of {len(wanted)} pairs are left: the same command resumes")
    results = [reduced(preset, [pair for pair in done if pair["preset"] == preset]) for preset in given.preset]
    header = ["preset", "figure", "toolkit", "bare", "median ratio", "min", "max", f"goal {GOAL}"]
    print_table(header, [row for result in results for row in table_rows(result)])
    for result in results:
        print(f"{result['preset']}: largest relative difference of a loss {result['largest_loss_difference']:.1e}")
    print(write_result(given.name, {"goal": GOAL, "presets": results}))


if __name__ == "__main__":
    main()

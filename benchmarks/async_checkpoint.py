"""Seconds that training stands still for a checkpoint: written at once, and in the background (`--async_save`).

    python benchmarks/async_checkpoint.py --pairs 5 --work DIR

Runs: `fsdp2` on two CPU ranks, sides in alternating order, a save every `SAVE_STEPS` steps. The save after the last
step is left out: nothing is left to train while it is written. The ratio's 95 % confidence interval is a paired t
interval of log ratios.

Ways of torch: `dcp.save` and `dcp.async_save` with a thread or a process, on the same bytes, while each rank multiplies
matrices; the first save of a way pays for its buffers and its process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import pairs, print_table, spread, write_result, write_table

from toolkit.compare.significance import geometric_mean, mean_interval
from toolkit.demo.assets import default_data_file, prepare_default_model, random_llama
from toolkit.launch.launch import command_of, run_training
from toolkit.launch.options import TrainOptions

DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence" / "checkpoints.md"
TABLE = "async_checkpoint"
WAYS_TABLE = "ways_of_torch"
RANKS = 2
STEPS, SAVE_STEPS = 13, 4
CONFIDENCE = 0.95
# 58 M parameters: 0.7 GB with Adam's states.
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8, "max_position_embeddings": 512, "tie_word_embeddings": True}
WAYS = ("save", "thread", "process")
WAY_SAVES = 5
RANK_MEGABYTES = 350


def model_folder(work: Path) -> Path:
    """Return the benchmark's model, made once."""
    from transformers import AutoTokenizer

    folder = work / "model"
    if not (folder / "config.json").exists():
        random_llama(folder, AutoTokenizer.from_pretrained(prepare_default_model()), **SIZES)
    return folder


def run(side: str, model: Path, folder: Path) -> dict[str, Any]:
    """Train once, unless the folder has the figures already; the checkpoints are removed."""
    if not (folder / "run.json").exists() or json.loads((folder / "run.json").read_text())["status"] != "completed":
        job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": folder}
        job |= {"max_seq_length": 128, "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-4}
        job |= {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_total_limit": 1, "save_model": "false"}
        job |= {"async_save": str(side == "background").lower()}
        words = [word for name, value in job.items() for word in (f"--{name}", str(value))]
        options = TrainOptions(preset="fsdp2", num_processes=RANKS, training_arguments=tuple(words), cpu=True)
        result = run_training(command_of(options), options=options, output_dir=folder, on_line=lambda _: None)
        assert result.status == "completed", result.failure
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return figures(folder)


def figures(folder: Path) -> dict[str, Any]:
    """Return the medians over a run's saves but the last, and the seconds from its first step to its end."""
    facts = json.loads((folder / "run.json").read_text())
    saves = [save for save in facts["saves"] if save["kind"] == "checkpoint" and save["step"] < STEPS]
    names = ("stall_seconds", "waited_seconds", "write_seconds")
    phases = facts["phases"]
    begun = next(when for phase, when in phases if phase == "train")
    rows = [json.loads(line) for line in (folder / "ranks" / "rank0.jsonl").read_text().splitlines()]
    return {
        **{name: statistics.median(save[name] for save in saves) for name in names},
        "bytes": saves[0]["bytes"],
        "training_seconds": phases[-1][1] - begun,
        "step_seconds_median": statistics.median(row["seconds"] for row in rows[2:]),
        "saves": saves,
        "last_loss": rows[-1]["loss"],
    }


def ratio(measured: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> dict[str, float]:
    """Return the geometric mean of background over waiting with its 95 % confidence interval."""
    ratios = [background[name] / waiting[name] for waiting, background in measured]
    interval = mean_interval(ratios, CONFIDENCE)
    assert interval is not None, "one pair has no confidence interval"
    return {"ratio": geometric_mean(ratios), "low": interval[0], "high": interval[1]}


def measure_runs(given: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs and compare their sides."""
    model = model_folder(given.work)
    numbers = {side: iter(range(given.pairs)) for side in ("waiting", "background")}

    def one(side: str) -> dict[str, Any]:
        return run(side, model, given.work / f"{side}-{next(numbers[side])}")

    measured = pairs(given.pairs, lambda: one("waiting"), lambda: one("background"))
    names = ("stall_seconds", "write_seconds", "training_seconds", "step_seconds_median")
    sides = {
        side: {name: spread([pair[number][name] for pair in measured]) for name in names}
        for number, side in enumerate(("waiting", "background"))
    }
    return {
        "equal_losses": all(waiting["last_loss"] == background["last_loss"] for waiting, background in measured),
        "bytes": measured[0][0]["bytes"],
        "sides": sides,
        "ratios": {name: ratio(measured, name) for name in ("stall_seconds", "training_seconds")},
        "pairs": measured,
    }


HEADER = ("", "while training waits (s)", "in the background (s)", "ratio (95 % CI)")
ROWS = {
    "stall_seconds": "training stands still for a save",
    "write_seconds": "writing and checksums",
    "step_seconds_median": "median step",
    "training_seconds": "first step to end, saves included",
}


def table_rows(result: dict[str, Any]) -> list[list[object]]:
    """Return one row per figure: medians over runs, and the ratio where it was measured."""
    runs = result["runs"]
    rows: list[list[object]] = []
    for name, label in ROWS.items():
        found = runs["ratios"].get(name)
        shown = "" if found is None else "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**found)
        sides = [f"{runs['sides'][side][name]['median']:.2f}" for side in ("waiting", "background")]
        rows.append([label, *sides, shown])
    return rows


WAYS_HEADER = (
    "way",
    "first save: call (s)",
    "later saves: call (s)",
    "complete after (s)",
    "products per second meanwhile",
)


def way_rows(result: dict[str, Any]) -> list[list[object]]:
    """Return one row per way of torch: medians of the later saves."""
    labels = {"save": "`save`", "thread": "`async_save`, thread", "process": "`async_save`, process"}
    rows: list[list[object]] = []
    for way, saves in result["ways"].items():
        later = {name: statistics.median(save[name] for save in saves[1:]) for name in saves[0]}
        meanwhile = "0" if way == "save" else f"{later['products_per_second']:.1f}"
        row = [labels[way], f"{saves[0]['call_seconds']:.2f}", f"{later['call_seconds']:.2f}"]
        rows.append([*row, f"{later['complete_seconds']:.2f}", meanwhile])
    return rows


def measure_ways() -> dict[str, Any]:
    """Start the ranks, and return what rank 0 measured of each way."""
    with tempfile.TemporaryDirectory() as work:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        argv = [sys.executable, *launcher, __file__, "--rank-of-ways", "--work", work]
        subprocess.run(argv, check=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return json.loads((Path(work) / "ways.json").read_text())


def rank_of_ways(work: Path) -> None:
    """Save `WAY_SAVES` times each way, and write what this rank measured, on rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # 35 tensors of 10 MB, like the matrices of a small model
    tensors = {f"{rank}.{index}": torch.rand(RANK_MEGABYTES * 250_000 // 35) for index in range(35)}
    found = {way: [save_once(way, tensors, work / f"{way}-{number}") for number in range(WAY_SAVES)] for way in WAYS}
    if rank == 0:
        (work / "ways.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def save_once(way: str, tensors: dict[str, Any], folder: Path) -> dict[str, float]:
    """Save, and multiply matrices until the save is complete; return the seconds of both and the products."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.barrier()
    began = time.monotonic()
    if way == "save":
        dcp.save(tensors, checkpoint_id=folder)
        called, products = time.monotonic(), 0
    else:
        kind = AsyncCheckpointerType.THREAD if way == "thread" else AsyncCheckpointerType.PROCESS
        saving = dcp.async_save(tensors, checkpoint_id=folder, async_checkpointer_type=kind)
        called = time.monotonic()
        products = count_products(lambda: not saving.done())
        saving.result()
    complete = time.monotonic()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    meanwhile = max(complete - called, 1e-9)
    return {
        "call_seconds": called - began,
        "complete_seconds": complete - began,
        "products_per_second": products / meanwhile,
    }


def count_products(goes_on: Any) -> int:
    """Multiply matrices of 512 x 512 as long as `goes_on`, and return how often."""
    import torch

    matrix, products = torch.rand(512, 512), 0
    while goes_on():
        matrix @ matrix
        products += 1
    return products


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints written while training waits, and in the background.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", type=Path, required=True, help="keeps the runs")
    parser.add_argument("--rank-of-ways", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of_ways:
        rank_of_ways(given.work)
    given.work.mkdir(parents=True, exist_ok=True)
    result = {"ways": measure_ways(), "runs": measure_runs(given)}
    print_table(HEADER, table_rows(result))
    print_table(WAYS_HEADER, way_rows(result))
    print(write_result("async_checkpoint", result))
    write_table(DOCUMENT, TABLE, HEADER, table_rows(result))
    write_table(DOCUMENT, WAYS_TABLE, WAYS_HEADER, way_rows(result))


if __name__ == "__main__":
    main()

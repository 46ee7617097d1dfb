"""Compare DDP's communication hooks: bytes per step, and the loss against the uncompressed one.

    python benchmarks/comm_hooks.py --work DIR              # resumes: each finished hook is a line of DIR/hooks.jsonl

Two CPU ranks train a random Llama of 3.2 M parameters on the same batches from the same weights; only the compression
of gradients differs. The result has each hook's losses and bytes; the chart shows the losses, and their relative
distance from those of `allreduce`, which compresses nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, print_table, write_result

from toolkit.demo.assets import default_data_file, prepare_default_model, random_llama
from toolkit.job.argument_checks import COMM_HOOKS
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import measure, read_steps

MARKS = (1, 10, 20, 40, 60)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}


def small_model(folder: Path) -> Path:
    """Write the tests' small model, with the real tokenizer."""
    from transformers import AutoTokenizer

    return random_llama(folder, AutoTokenizer.from_pretrained(prepare_default_model()), **SIZES)


def run_hook(hook: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one hook, and return its facts and the loss of each step."""
    output = arguments.work / hook
    shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run
    job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": output}
    job |= {"max_steps": arguments.steps, "max_seq_length": 64, "per_device_train_batch_size": 4}
    job |= {"learning_rate": arguments.learning_rate, "save_strategy": "no", "save_model": "false"}
    words = [word for name, value in (job | {"ddp_comm_hook": hook}).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{hook} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    folder = RunFolder(output)
    measured = measure(read_steps(folder), untimed_steps=2)
    facts = (folder.read_run() or {})["ddp_comm_hook"]
    return {"hook": hook, **facts, "losses": measured.losses}


def chart(runs: list[dict[str, Any]], path: Path) -> None:
    """Plot the loss by step, and its relative distance from the uncompressed run's, one line per hook."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, distances) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for run in runs:
        steps = range(1, len(run["losses"]) + 1)
        losses.plot(steps, run["losses"], label=run["hook"], linewidth=1)
        distances.plot(steps, [max(gap, 1e-8) for gap in gaps(run, runs[0])], label=run["hook"], linewidth=1)
    losses.set(xlabel="optimizer step", ylabel="training loss")
    distances.set(xlabel="optimizer step", ylabel="relative distance from allreduce", yscale="log")
    losses.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def gaps(run: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    return [abs(a - b) / b for a, b in zip(run["losses"], reference["losses"], strict=True)]


def row(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    sent, whole, ring = (run[f"{key}_bytes_per_step"] for key in ("communication", "uncompressed", "ring"))
    losses = [f"{run['losses'][step - 1]:.4f}" for step in MARKS if step <= len(run["losses"])]
    return [run["hook"], f"{sent:,}", f"{sent / whole:.4f}", f"{ring:,}", *losses, f"{max(gaps(run, reference)):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP's communication hooks: bytes per step, and the loss.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--hooks", nargs="+", choices=list(COMM_HOOKS), default=list(COMM_HOOKS))
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    ledger = arguments.work / "hooks.jsonl"
    runs = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    model = small_model(arguments.work / "model")
    for hook in arguments.hooks:
        if hook not in [run["hook"] for run in runs]:
            runs.append(run_hook(hook, model, arguments))
            with ledger.open("a") as file:
                file.write(json.dumps(runs[-1]) + "\n")
    header = ["hook", "bytes per step", "of DDP's", "ring bytes"]
    header += [f"loss of step {step}" for step in MARKS if step <= arguments.steps]
    print_table([*header, "largest gap"], [row(run, runs[0]) for run in runs])
    if len(runs) == len(COMM_HOOKS):
        options = {"steps": arguments.steps, "learning_rate": arguments.learning_rate, "model": SIZES}
        write_result("comm_hooks", {**options, "runs": runs})
        chart(runs, RESULTS / "comm_hooks.svg")


if __name__ == "__main__":
    main()

"""DDP's communication hooks side by side: bytes a step, and the loss beside the uncompressed one.

    python benchmarks/comm_hooks.py --steps 40

Two CPU ranks train the same batches from the same weights; only what travels differs. The result has each hook's
losses; the chart shows their distance from `allreduce`, which compresses nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, print_table, write_result

from toolkit.demo.assets import default_data_file, prepare_default_model
from toolkit.runs.comm_hooks import HOOKS
from toolkit.runs.folder import RunFolder
from toolkit.runs.steps import measure, read_steps


def run_hook(hook: str, model: Path, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: the hook's own facts, and the loss of each step."""
    output = scratch / hook
    job = {"model_name_or_path": model, "dataset": default_data_file("faq-en-alpaca.jsonl"), "output_dir": output}
    job |= {"max_steps": arguments.steps, "max_seq_length": 64, "per_device_train_batch_size": 4}
    job |= {"learning_rate": arguments.learning_rate, "save_strategy": "no", "save_model": "false"}
    words = [word for name, value in (job | {"ddp_comm_hook": hook}).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", "ddp", "--num-processes", "2", "--cpu", "--"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"hook": hook, "error": done.stderr.strip().splitlines()[-2:]}
    folder = RunFolder(output)
    measured = measure(read_steps(folder), untimed_steps=2)
    facts = (folder.read_run() or {})["ddp_comm_hook"]
    return {"hook": hook, **facts, "losses": measured.losses, "step_seconds_median": measured.step_seconds_median}


def chart(runs: list[dict[str, Any]], path: Path) -> None:
    """Loss by step, one line a hook."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=run["hook"], linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="training loss", title="DDP communication hooks, same batches")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def row(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    sent, whole, ring = (run[f"{key}_bytes_per_step"] for key in ("communication", "uncompressed", "ring"))
    gap = max(abs(a - b) / b for a, b in zip(run["losses"], reference["losses"], strict=True))
    last = f"{run['losses'][-1]:.4f}"
    return [run["hook"], f"{sent:,}", f"{sent / whole:.4f}", f"{ring:,}", "+".join(run["dtypes"]), last, f"{gap:.2e}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    model = arguments.model or prepare_default_model()
    config = json.loads((model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        runs = [run_hook(hook, model, Path(scratch), arguments) for hook in HOOKS]
    finished = [run for run in runs if "error" not in run]
    header = ["hook", "bytes a step", "of DDP's", "ring bytes", "dtypes", "last loss", "largest loss gap"]
    print_table(header, [row(run, finished[0]) for run in finished])
    model_facts = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    write_result("comm_hooks", {"steps": arguments.steps, "model": model_facts, "runs": runs})
    chart(finished, RESULTS / "comm_hooks.png")
    return 0 if len(finished) == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())

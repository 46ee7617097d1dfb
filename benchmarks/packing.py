"""Supervised tokens per second on conversations of different lengths: packing, padding to the longest, and TRL.

    python benchmarks/packing.py --work DIR              # resumes; `--trials 1` runs one trial and stops

Two CPU ranks under DDP, fp32, SmolLM2-135M with LoRA on all linear layers, the chitchat data at `max_seq_length` 512,
loss on the assistant's tokens. A pack has 1.53 rows on average, so 5 packs per rank and step are as many supervised
tokens as 8 rows. Each repeat has its own seed, and so other rows. The few rows of a run are too few to tell which
fraction of tokens is supervised, so a run measures computed tokens per second, and that fraction comes from the
complete data. Finished trials are lines of DIR/trials.jsonl. TRL runs in its own environment; `--trl-python` names an
existing one. On a busy machine, trust the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result

from toolkit.cache import torch_extensions_folder

ROOT = Path(__file__).parents[1]
MAX_SEQ_LENGTH = 512
LEARNING_RATE = "1e-4"
PRESET_OF_RANKS = {1: "single", 2: "ddp"}
SUMMED = ("tokens", "supervised_tokens", "cpu_seconds")
HEADER = ["side", "runs", "a second", "min", "max", "a CPU second", "min", "max", "packing over it: s", "CPU s"]
# The default model's template without its default system message, and with the block that TRL needs.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to train on the same rows."""

    packing: bool
    single: bool = False
    """One pack a micro-batch, accumulated; otherwise all sequences of a step are one micro-batch."""
    trl: bool = False

    def batch(self, rows: int) -> tuple[int, int]:
        """Return per-device batch size and accumulation steps for about this many rows per rank and step."""
        sequences = round(rows / ROWS_OF_A_PACK) if self.packing else rows
        return (1, sequences) if self.single else (sequences, 1)


ROWS_OF_A_PACK = 1.53
ROWS_OF_A_STEP = 8  # per rank; the default of transformers and TRL
SIDES = {
    "packing": Side(packing=True, single=True),
    "padding": Side(packing=False),
    "TRL padding": Side(packing=False, trl=True),
    "TRL packing": Side(packing=True, single=True, trl=True),
    # Several packs per batch: transformers then computes all logits, as it does with padding.
    "packing, all logits": Side(packing=True),
}


def marked_model(folder: Path) -> Path:
    """Write the default model with a chat template that marks the assistant's tokens."""
    from transformers import AutoTokenizer

    from toolkit.demo.assets import prepare_default_model

    source = prepare_default_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if not (folder / name).exists():
            (folder / name).symlink_to(source / name)
    return folder


def trl_environment(work: Path) -> str:
    """Create a virtual environment with TRL and this toolkit's versions of everything else."""
    python = work / "trl" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(work / "trl")], check=True)
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", "trl==1.16.0", *constraints], check=True)
    return str(python)


def command(side: Side, given: argparse.Namespace, *, seed: int, output: str) -> list[str]:
    """Return the `accelerate launch` command of the training script, or of TRL's."""
    from toolkit.demo.assets import chitchat_data_file

    model, data = given.work / "model", chitchat_data_file()
    words = {"output_dir": output, "packing": str(side.packing).lower(), "seed": seed, "learning_rate": LEARNING_RATE}
    batch, accumulate = side.batch(given.rows)
    words |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    words |= {"max_steps": given.untimed_steps + given.steps, "lora_r": given.lora_r}
    if side.trl:
        words |= {"model": model, "data": data, "max_length": MAX_SEQ_LENGTH}
        script = [str(Path(__file__).parent / "trl_sft.py")]
    else:
        words |= {"model_name_or_path": model, "dataset": data, "max_seq_length": MAX_SEQ_LENGTH}
        words |= {"loss_on": "assistant", "save_model": "false", "save_strategy": "no"}
        script = ["-m", "toolkit.train"]
    python = given.trl_python if side.trl else sys.executable
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{PRESET_OF_RANKS[given.ranks]}.yaml",
    ]
    launch += ["--num_processes", str(given.ranks), "--main_process_port", "0"]
    return [python, *launch, *script, *(word for name, value in words.items() for word in (f"--{name}", str(value)))]


def environment(ranks: int) -> dict[str, str]:
    """Return threads, compiled ops and warnings as `toolkit train` sets them, so that only the scripts differ."""
    chosen = {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(torch_extensions_folder())),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | chosen


def run_trial(name: str, given: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """Run one trial; return each step's tokens and CPU seconds of both ranks, and its seconds on the slowest."""
    with tempfile.TemporaryDirectory(dir=given.work) as output:
        argv = command(SIDES[name], given, seed=seed, output=output)
        done = subprocess.run(argv, cwd=ROOT, env=environment(given.ranks), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        files = [Path(output) / "ranks" / f"rank{rank}.jsonl" for rank in range(given.ranks)]
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    steps = list(zip(*ranks, strict=True))
    figures: dict[str, Any] = {name: [sum(row[name] for row in step) for step in steps] for name in SUMMED}
    figures["step_seconds"] = [max(row["seconds"] for row in step) for step in steps]
    figures["losses"] = [sum(row["loss"] for row in step) / len(step) for step in steps]
    return {"side": name, "seed": seed, **figures}


def timed(given: argparse.Namespace, trial: dict[str, Any], field: str) -> float:
    return float(sum(trial[field][given.untimed_steps :]))


def supervised_fractions(given: argparse.Namespace) -> dict[str, float]:
    """Return the supervised tokens of the complete data over the tokens that each side computes, with padding."""
    import random

    from toolkit.demo.assets import chitchat_data_file
    from toolkit.job.script_arguments import ModelArguments
    from toolkit.train.data.packing import PackedRows
    from toolkit.train.data.tokenization import load_rows, tokenize
    from toolkit.train.model.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(given.work / "model")), chat_template=None)
    rows, data_format = load_rows(str(chitchat_data_file()), "train")
    options = {"data_format": data_format, "max_seq_length": MAX_SEQ_LENGTH, "loss_on": "assistant"}
    tokenized = tokenize(rows, tokenizer=tokenizer, **options)
    stats, lengths = tokenized.stats, {False: tokenized.dataset["length"][:]}
    packs = PackedRows(tokenized.dataset, max_tokens=MAX_SEQ_LENGTH).packs
    lengths[True] = [sum(lengths[False][row] for row in pack) for pack in packs]
    fractions = {}
    for name, side in SIDES.items():
        drawn = random.Random(0).sample(lengths[side.packing], len(lengths[side.packing]))
        batch, _ = side.batch(ROWS_OF_A_STEP)
        batches = [drawn[first : first + batch] for first in range(0, len(drawn), batch)]
        fractions[name] = stats.supervised_tokens / sum(len(batch) * max(batch) for batch in batches)
    return fractions


def finish(given: argparse.Namespace, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each side's supervised tokens per second: of its own batches, and at the complete data's fraction."""
    figures: dict[str, Any] = {}
    fractions = supervised_fractions(given)
    for name, fraction in fractions.items():
        runs = [trial for trial in trials if trial["side"] == name]
        if not runs:
            continue
        supervised, tokens, seconds, cpu_seconds = (
            [timed(given, run, field) for run in runs]
            for field in ("supervised_tokens", "tokens", "step_seconds", "cpu_seconds")
        )
        figures[name] = {
            "runs": len(runs),
            "supervised_fraction": fraction,
            "supervised_fraction_of_the_batches": sum(supervised) / sum(tokens),
            "supervised_tokens_per_step": sum(supervised) / len(runs) / given.steps,
            "per_second_of_the_batches": spread([a / b for a, b in zip(supervised, seconds, strict=True)]),
            "per_second": spread([fraction * a / b for a, b in zip(tokens, seconds, strict=True)]),
            "per_cpu_second": spread([fraction * a / b for a, b in zip(tokens, cpu_seconds, strict=True)]),
        }
    return figures


def table(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, figure in figures.items():
        clocks = figure["per_second"], figure["per_cpu_second"]
        ours = figures["packing"]["per_second"], figures["packing"]["per_cpu_second"]
        shown = [f"{clock[field]:.1f}" for clock in clocks for field in ("median", "min", "max")]
        ratios = [f"{one['median'] / clock['median']:.2f}" for one, clock in zip(ours, clocks, strict=True)]
        rows.append([name, str(figure["runs"]), *shown, *ratios])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised tokens per second: packing, padding, TRL.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed optimizer steps per run")
    parser.add_argument("--untimed-steps", type=int, default=0)
    parser.add_argument("--ranks", type=int, choices=PRESET_OF_RANKS, default=2)
    parser.add_argument("--rows", type=int, default=ROWS_OF_A_STEP, help="rows per rank and step")
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trl-python")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--name", default="packing", help="name of the result file")
    parser.add_argument("--trials", type=int, help="stop after this many trials; the next call resumes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    given.trl_python = given.trl_python or trl_environment(given.work)
    marked_model(given.work / "model")
    ledger = given.work / "trials.jsonl"
    trials = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    finished = {(trial["side"], trial["seed"]) for trial in trials}
    wanted = [(name, seed) for seed, name in product(range(1, given.repeats + 1), given.sides)]
    waiting = [trial for trial in wanted if trial not in finished][: given.trials]
    for name, seed in waiting:
        trials.append(run_trial(name, given, seed=seed))
        with ledger.open("a") as file:
            file.write(json.dumps(trials[-1]) + "\n")
        print(json.dumps(trials[-1]), flush=True)
    figures = finish(given, trials)
    if "packing" in figures:
        print_table(HEADER, table(figures))
    if finished | set(waiting) >= set(wanted):
        options = {
            name: value for name, value in vars(given).items() if name not in ("work", "trl_python", "trials", "sides")
        }
        print(write_result(given.name, {"options": options, "supervised_tokens_per_second": figures, "runs": trials}))


if __name__ == "__main__":
    main()

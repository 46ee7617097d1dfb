"""Supervised tokens a second on ragged conversations: packing, padding to the longest of the batch, and TRL.

    python benchmarks/packing.py --repeats 3 --work DIR

Two CPU ranks under DDP, fp32, `max_seq_length` 512, the same rows, loss on the assistant's tokens, as many sequences a
micro-batch on every side. The model is the default one cut to its first layers (`--layers`), so that a run takes
less than a minute. TRL runs in an environment of its own under DIR; `--trl-python` names one that is there already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from overhead import environment
from record import print_table, spread, write_result

ROOT = Path(__file__).parents[1]
SIDES = ("toolkit packing", "toolkit padding", "TRL padding", "TRL packing")
MAX_SEQ_LENGTH = 512
# The default model's own template without its default system message, and with the block that TRL needs.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def cut_model(folder: Path, layers: int) -> Path:
    """The default model's first layers, embedding and head, with a template that marks what the assistant says."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolkit.demo.assets import prepare_default_model

    source = prepare_default_model()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, num_hidden_layers=layers)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run_side(side: str, given: argparse.Namespace, model: Path, data: Path, trl_python: str) -> dict[str, float]:
    """Supervised and all tokens of the timed steps of both ranks, over the slowest rank's seconds of each step."""
    steps = given.untimed_steps + given.steps
    with tempfile.TemporaryDirectory(dir=given.work) as output:
        packs = "true" if side.endswith("packing") else "false"
        words = ["--output_dir", output, "--max_steps", str(steps), "--packing", packs]
        words += [
            "--per_device_train_batch_size",
            str(given.batch),
            "--gradient_accumulation_steps",
            str(given.accumulate),
        ]
        if side.startswith("TRL"):
            script = [str(Path(__file__).parent / "trl_sft.py"), "--model", str(model), "--data", str(data)]
            python = trl_python
        else:
            script = ["-m", "toolkit.train", "--model_name_or_path", str(model), "--dataset", str(data)]
            script += ["--max_seq_length", str(MAX_SEQ_LENGTH), "--loss_on", "assistant", "--learning_rate", "1e-4"]
            script += ["--save_model", "false", "--save_strategy", "no"]
            python = sys.executable
        launch = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml"]
        launch += ["--num_processes", "2", "--main_process_port", "0"]
        done = subprocess.run(
            [python, *launch, *script, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        files = [Path(output) / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    timed = list(zip(*ranks, strict=True))[given.untimed_steps :]
    seconds = sum(max(row["seconds"] for row in step) for step in timed)
    counted = {name: sum(row[name] for step in timed for row in step) for name in ("tokens", "supervised_tokens")}
    return counted | {"seconds": seconds, "supervised_tokens_per_second": counted["supervised_tokens"] / seconds}


def trl_environment(work: Path) -> str:
    """A virtual environment with TRL beside this toolkit's versions of everything else."""
    python = work / "trl" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(work / "trl")], check=True)
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", "trl==1.16.0", *constraints], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised tokens a second: packing, padding, TRL.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed optimizer steps of a run")
    parser.add_argument("--untimed-steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch on each rank")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trl-python")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    from toolkit.demo.assets import chitchat_data_file

    needs_trl = any(side.startswith("TRL") for side in given.sides)
    trl_python = given.trl_python or (trl_environment(given.work) if needs_trl else "")
    model, data = cut_model(given.work / "model", given.layers), chitchat_data_file()
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    for repeat in range(given.repeats):
        order = given.sides if repeat % 2 == 0 else list(reversed(given.sides))
        for side in order:
            runs[side].append(run_side(side, given, model, data, trl_python))
    figures = {side: spread([run["supervised_tokens_per_second"] for run in rows]) for side, rows in runs.items()}
    ours = figures[given.sides[0]]["median"]
    header = ["side", "supervised tokens/s", "min", "max", f"{given.sides[0]} over it"]
    rows = [
        [side, *(f"{figure[name]:.0f}" for name in ("median", "min", "max")), f"{ours / figure['median']:.2f}"]
        for side, figure in figures.items()
    ]
    print_table(header, rows)
    options: dict[str, Any] = {name: value for name, value in vars(given).items() if name not in ("work", "trl_python")}
    print(write_result("packing", {"options": options, "supervised_tokens_per_second": figures, "runs": runs}))


if __name__ == "__main__":
    main()

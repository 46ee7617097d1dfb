"""Tokens per second and MFU of one GPU: eager and compiled, with and without Liger, LoRA and QLoRA, packed rows.

    python benchmarks/gpu/throughput.py --work DIR                       # every job; finished comparisons are kept
    python benchmarks/gpu/throughput.py --work DIR --job full-2048       # one job
    python benchmarks/gpu/throughput.py --work DIR --tiny                # on a CPU: tiny models, to try the script

Each job is a `toolkit compare` of the preset `single` with itself, under the settings of `VARIANTS`; so what is
reported is verified and measured as in any comparison. Models have the shapes of published ones and random weights;
rows are made up of random words, which costs a GPU the same. The goal is an MFU of 0.55 for a full fine-tune.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from grid import CALIBRATION
from record import print_table, write_result
from small_job import words

# Llama 3.1 8B's config.json.
LLAMA_8B = CALIBRATION["llama-1b"] | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"tie_word_embeddings": False}
TINY = CALIBRATION["llama-1b"] | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
ARCHITECTURES = {"llama-1b": CALIBRATION["llama-1b"], "qwen3-1.7b": CALIBRATION["qwen3-1.7b"], "llama-8b": LLAMA_8B}
LIGER, COMPILED = "--use_liger_kernel true", "--torch_compile true"
FULL = {"eager": "", "liger": LIGER, "compiled": COMPILED, "compiled_liger": f"{COMPILED} {LIGER}"}
LORA = {"lora": "--lora_r 16", "qlora": "--lora_r 16 --load_in_4bit true"}
# Model, length and rows of a micro-batch, variants.
JOBS: dict[str, tuple[str, int, int, dict[str, str]]] = {
    "full-2048": ("llama-1b", 2048, 8, FULL),
    "full-8192": ("llama-1b", 8192, 2, FULL),
    "full-qwen3-2048": ("qwen3-1.7b", 2048, 8, FULL),
    "adapters-8b": ("llama-8b", 2048, 4, LORA),
}
NUM_ROWS = 2_000
WORDS_PER_ROW = (20, 1500)
GOAL = 0.55
# Figure of a row, and how the table shows it.
FIGURES: dict[str, Callable[[Any], str]] = {
    "status": str,
    "tokens_per_second_per_gpu": "{:,.0f}".format,
    "mfu": "{:.3f}".format,
    "step_seconds_median": "{:.3f}".format,
    "peak_allocated_bytes": lambda size: f"{size / 2**30:.1f}",
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model with random bf16 weights and a tokenizer of made-up words, unless it is there."""
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    architecture = AutoConfig.for_model(**config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        built = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    built.save_pretrained(folder)
    words = ["<unk>", "<eos>", *(f"w{index}" for index in range(config["vocab_size"] - 2))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, vocab_size: int) -> Path:
    """Write documents of random lengths, unless they are there."""
    if not path.is_file():
        chance = random.Random(0)
        lengths = [chance.randint(*WORDS_PER_ROW) for _ in range(NUM_ROWS)]
        rows = [" ".join(f"w{chance.randrange(vocab_size - 2)}" for _ in range(length)) for length in lengths]
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def compare(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one comparison, or what is left of it, and return its rows."""
    label, length, batch_size, variants = JOBS[name]
    architecture = ARCHITECTURES[label]
    if given.tiny:
        label, length, architecture = "tiny", 64, TINY
    model = write_model(given.work / "models" / label, architecture)
    rows = write_rows(given.work / f"rows-{label}.jsonl", architecture["vocab_size"])
    folder = given.work / name
    argv = [sys.executable, "-m", "toolkit", "compare", "--num-processes", "1", "--output-dir", str(folder)]
    argv += [word for variant, options in variants.items() for word in ("--variant", f"{variant}=single {options}")]
    argv += ["--repeats", str(given.repeats), *(["--resume"] if folder.exists() else [])]
    training = {"model_name_or_path": model, "dataset": rows, "packing": "true", "max_seq_length": length}
    training |= {"per_device_train_batch_size": batch_size, "max_steps": given.steps}
    training |= {"learning_rate": 1e-5, "bf16": "true"}
    code = subprocess.run([*argv, "--", *words(**training)], check=False).returncode
    if not (folder / "results.json").is_file():
        raise SystemExit(f"{name}: `toolkit compare` ended with {code} and no results.json")
    found = json.loads((folder / "results.json").read_text())["rows"]
    return [{"job": name, "variant": row["preset"], **{figure: row.get(figure) for figure in FIGURES}} for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second and MFU of one GPU.")
    parser.add_argument("--work", type=Path, required=True, help="folder of models and comparisons")
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script on a CPU")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [row for name in given.job for row in compare(name, given)]
    header = ["job", "variant", "status", "tokens/s", f"MFU (goal {GOAL})", "median step (s)", "peak allocated (GiB)"]
    shown = [["n/a" if row[name] is None else show(row[name]) for name, show in FIGURES.items()] for row in rows]
    print_table(header, [[row["job"], row["variant"], *cells] for row, cells in zip(rows, shown, strict=True)])
    if not given.tiny:
        print(write_result("gpu_throughput", {"goal_mfu": GOAL, "jobs": {n: JOBS[n] for n in given.job}}, rows))


if __name__ == "__main__":
    main()

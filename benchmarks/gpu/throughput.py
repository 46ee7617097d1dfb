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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from grid import CALIBRATION
from record import print_table, write_result

Job = dict[str, Any]

# Llama 3.1 8B's config.json.
LLAMA_8B = CALIBRATION["llama-1b"] | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"tie_word_embeddings": False}
TINY = CALIBRATION["llama-1b"] | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
ARCHITECTURES = {"llama-1b": CALIBRATION["llama-1b"], "qwen3-1.7b": CALIBRATION["qwen3-1.7b"], "llama-8b": LLAMA_8B}
FULL = {
    "eager": "",
    "liger": "--use_liger_kernel true",
    "compiled": "--torch_compile true",
    "compiled_liger": "--torch_compile true --use_liger_kernel true",
}
LORA = {"lora": "--lora_r 16", "qlora": "--lora_r 16 --load_in_4bit true"}
JOBS: dict[str, Job] = {
    "full-2048": {"model": "llama-1b", "max_seq_length": 2048, "batch_size": 8, "variants": FULL},
    "full-8192": {"model": "llama-1b", "max_seq_length": 8192, "batch_size": 2, "variants": FULL},
    "full-qwen3-2048": {"model": "qwen3-1.7b", "max_seq_length": 2048, "batch_size": 8, "variants": FULL},
    "adapters-8b": {"model": "llama-8b", "max_seq_length": 2048, "batch_size": 4, "variants": LORA},
}
NUM_ROWS = 2_000
WORDS_PER_ROW = (20, 1500)
GOAL = 0.55
FIGURES = ("status", "tokens_per_second_per_gpu", "mfu", "step_seconds_median", "peak_allocated_bytes")


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model with random bf16 weights and a tokenizer of made-up words, unless it is there."""
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    settings = dict(config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=torch.bfloat16
        )
    built.save_pretrained(folder)
    words = ["<unk>", "<eos>", *map(word, range(config["vocab_size"] - 2))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder)
    return folder


def word(index: int) -> str:
    return f"w{index}"


def write_rows(path: Path, vocab_size: int) -> Path:
    """Write documents of random lengths, unless they are there."""
    if not path.is_file():
        chance = random.Random(0)
        lengths = [chance.randint(*WORDS_PER_ROW) for _ in range(NUM_ROWS)]
        rows = [" ".join(word(chance.randrange(vocab_size - 2)) for _ in range(length)) for length in lengths]
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def compare(name: str, job: Job, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one comparison, or what is left of it, and return its rows."""
    architecture = TINY if given.tiny else ARCHITECTURES[job["model"]]
    label = "tiny" if given.tiny else job["model"]
    model = write_model(given.work / "models" / label, architecture)
    rows = write_rows(given.work / f"rows-{label}.jsonl", architecture["vocab_size"])
    folder = given.work / name
    argv = [sys.executable, "-m", "toolkit", "compare", "--num-processes", "1", "--output-dir", str(folder)]
    for variant, arguments in job["variants"].items():
        argv += ["--variant", f"{variant}=single {arguments}"]
    argv += ["--repeats", str(given.repeats), *(["--resume"] if folder.exists() else [])]
    length = 64 if given.tiny else job["max_seq_length"]
    training = {
        "model_name_or_path": model,
        "dataset": rows,
        "packing": "true",
        "max_seq_length": length,
        "per_device_train_batch_size": job["batch_size"],
        "max_steps": given.steps,
        "learning_rate": 1e-5,
        "bf16": "true",
    }
    words = [word for key, value in training.items() for word in (f"--{key}", str(value))]
    code = subprocess.run([*argv, "--", *words], check=False).returncode
    if not (folder / "results.json").is_file():
        raise SystemExit(f"{name}: `toolkit compare` ended with {code} and no results.json")
    found = json.loads((folder / "results.json").read_text())["rows"]
    return [{"job": name, "variant": row["preset"], **{figure: row.get(figure) for figure in FIGURES}} for row in found]


def table_rows(rows: list[dict[str, Any]]) -> list[list[object]]:
    def shown(value: float | None, pattern: str) -> str:
        return "n/a" if value is None else pattern.format(value)

    return [
        [
            row["job"],
            row["variant"],
            row["status"],
            shown(row["tokens_per_second_per_gpu"], "{:,.0f}"),
            shown(row["mfu"], "{:.3f}"),
            shown(row["step_seconds_median"], "{:.3f}"),
            shown(row["peak_allocated_bytes"] and row["peak_allocated_bytes"] / 2**30, "{:.1f}"),
        ]
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second and MFU of one GPU.")
    parser.add_argument("--work", type=Path, required=True, help="folder of models and comparisons")
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script on a CPU")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [row for name in given.job for row in compare(name, JOBS[name], given)]
    header = ["job", "variant", "status", "tokens/s", f"MFU (goal {GOAL})", "median step (s)", "peak allocated (GiB)"]
    print_table(header, table_rows(rows))
    if not given.tiny:
        print(write_result("gpu_throughput", {"goal_mfu": GOAL, "jobs": {n: JOBS[n] for n in given.job}}, rows))


if __name__ == "__main__":
    main()

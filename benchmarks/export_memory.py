"""Peak host memory of a checkpoint export, above what the process uses before it, against its bound.

    python benchmarks/export_memory.py WORK_FOLDER

The bound (issue 4) is 1.5 times the largest shard file (of the checkpoint that is read) plus the largest tensor. A
random Llama of about 120 M parameters (480 MB in fp32) is trained for one step under each preset on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PRESETS = ("zero2", "zero3", "fsdp2")
MEASURE = """
import json, resource, sys, threading, time
from pathlib import Path
import psutil, torch, transformers, deepspeed
from toolkit.checkpoint.hf_export import export
from toolkit.checkpoint.model_definition import MetaModel, ModelFiles
checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])
MetaModel(ModelFiles(checkpoint))  # transformers' imports for the architecture
baseline = psutil.Process().memory_info().rss
export(checkpoint, out)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"baseline_bytes": baseline, "peak_bytes": peak}))
"""


def make_model(folder: Path) -> None:
    """Write a model with random weights and the real tokenizer."""
    from transformers import AutoTokenizer

    from toolkit.demo.assets import prepare_default_model, random_llama

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes |= {"num_key_value_heads": 12, "max_position_embeddings": 512, "tie_word_embeddings": True}
    random_llama(folder, AutoTokenizer.from_pretrained(prepare_default_model()), **sizes)


def train(preset: str, model: Path, output: Path) -> None:
    from toolkit.demo.assets import default_data_file

    words = ["--model_name_or_path", str(model), "--dataset", str(default_data_file("faq-en-alpaca.jsonl"))]
    words += ["--max_seq_length", "64", "--max_steps", "1", "--per_device_train_batch_size", "1", "--save_steps", "1"]
    words += ["--save_model", "false", "--output_dir", str(output)]
    command = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", "--cpu", "--"]
    subprocess.run([*command, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def measure(preset: str, checkpoint: Path, out: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint), str(out)],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    shard = max(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    tensor = 49152 * 768 * 4
    above = found["peak_bytes"] - found["baseline_bytes"]
    bound = int(1.5 * shard + tensor)
    return {
        "preset": preset,
        **found,
        "above_baseline_bytes": above,
        "largest_shard_bytes": shard,
        "largest_tensor_bytes": tensor,
        "exported_bytes": (out / "model.safetensors").stat().st_size,
        "bound_bytes": bound,
        "within_bound": above < bound,
    }


def main(folder: Path) -> None:
    model = folder / "model"
    if not model.exists():
        make_model(model)
    rows = []
    for preset in PRESETS:
        if not (folder / preset / "checkpoint-1").exists():
            train(preset, model, folder / preset)
        rows.append(measure(preset, folder / preset / "checkpoint-1", folder / f"{preset}-exported"))
        print(json.dumps(rows[-1]), flush=True)
    content = {"command": "python benchmarks/export_memory.py WORK_FOLDER", "rows": rows}
    (ROOT / "benchmarks" / "results" / "export_memory.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("work", type=Path, help="folder for the model and its checkpoints")
    main(parser.parse_args().work.absolute())

"""The small job of several benchmarks: a random Llama of 3.2 M parameters on the FAQ rows, trained by two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.demo.assets import default_data_file, prepare_default_model, random_llama
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
TRAINED = ("step", "loss", "grad_norm", "local_grad_norm", "batch_sha256")


def small_model(folder: Path, sizes: Mapping[str, Any] = SIZES) -> Path:
    """Write the model once, with the demo's tokenizer; return its folder."""
    from transformers import AutoTokenizer

    if not folder.exists():
        random_llama(folder, AutoTokenizer.from_pretrained(prepare_default_model()), **sizes)
    return folder


def words(**arguments: Any) -> list[str]:
    """Return training arguments as command-line words, on rows of 64 tokens unless another length is given."""
    job = {"dataset": default_data_file("faq-en-alpaca.jsonl"), "max_seq_length": 64, **arguments}
    return [word for name, value in job.items() for word in (f"--{name}", str(value))]


def train_command(preset: str, *options: str, **arguments: Any) -> list[str]:
    """Return `toolkit train` of two CPU ranks; the model is not saved at the end."""
    launcher = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", "--cpu"]
    return [*launcher, *options, "--", *words(save_model="false", **arguments)]


def train(preset: str, output: Path, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> RunFolder:
    """Train to the end. Raises SystemExit with the run's last lines if it fails."""
    command = train_command(preset, output_dir=output, **arguments)
    variables = os.environ | (environment or {})
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{output.name} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    return RunFolder(output)


def trained(folder: RunFolder, *, after: int = 0) -> list[list[list[Any]]]:
    """Return what each rank computed in the steps after one: batches, losses and gradient norms."""
    ranks = [read_rows(folder.rank_rows(rank)) for rank in (0, 1)]
    return [[[getattr(row, key) for key in TRAINED] for row in rows if row.step > after] for rows in ranks]

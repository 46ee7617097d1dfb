"""Jobs of several benchmarks on CPU ranks, among them the small one: a random Llama of 3.2 M parameters on FAQ rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import ROOT

from toolkit.demo.assets import default_data_file, prepare_default_model
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import read_rows

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
TRAINED = ("step", "loss", "grad_norm", "local_grad_norm", "batch_sha256")


def small_model(folder: Path, sizes: Mapping[str, Any] = SIZES, *, vocab_size: int | None = None) -> Path:
    """Write the model once, with the demo's tokenizer, or one like it with fewer words; return its folder."""
    from transformers import AutoTokenizer

    sys.path.append(str(ROOT / "tests" / "support"))
    from random_models import random_llama

    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(prepare_default_model())
        random_llama(folder, tokenizer.train_new_from_iterator([], vocab_size) if vocab_size else tokenizer, **sizes)
    return folder


def words(**arguments: Any) -> list[str]:
    """Return training arguments as command-line words, on rows of 64 tokens unless another length is given."""
    rows = {} if "dataset" in arguments else {"dataset": default_data_file("faq-en-alpaca.jsonl")}
    job = {**rows, "max_seq_length": 64, **arguments}
    return [word for name, value in job.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True, kw_only=True)
class JobSetting:
    """What differs between runs whose memory or communication is planned."""

    preset: str
    accumulation: int = 1
    lora_r: int | None = None
    checkpointing: bool = False

    def named(self, *parts: object, **extras: object) -> str:
        """Return the preset, the parts and the names of the extras that are not empty."""
        return " ".join(map(str, [self.preset, *parts, *(name for name, there in extras.items() if there)]))

    @property
    def planned(self) -> dict[str, Any]:
        """The fields of a `PlannedJob`."""
        job = {"gradient_accumulation_steps": self.accumulation, "lora_r": self.lora_r}
        return job | {"activation_checkpointing": self.checkpointing}

    @property
    def words(self) -> dict[str, Any]:
        """Arguments of the training script that are not its defaults."""
        return {name: str(value).lower() for name, value in self.planned.items() if value}


def accelerate_command(preset: str, ranks: int, *script: str, options: Sequence[str] = ()) -> list[str]:
    """Return `accelerate launch` of a script under a preset's file; `options` are accelerate's own."""
    config = ["--config_file", str(ROOT / "accelerate_configs" / f"{preset}.yaml"), *options]
    processes = ["--num_processes", str(ranks), "--num_machines", "1", "--main_process_port", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *config, *processes, *script]


def cpu_environment(**variables: str) -> dict[str, str]:
    """Return the environment of ranks with one thread each and no GPU."""
    return os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables


def train_command(preset: str, *options: str, **arguments: Any) -> list[str]:
    """Return `toolkit train` of two CPU ranks; the model is not saved at the end unless `save_model` says so."""
    launcher = [sys.executable, "-m", "toolkit", "train", "--preset", preset, "--num-processes", "2", "--cpu"]
    return [*launcher, *options, "--", *words(**{"save_model": "false", **arguments})]


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

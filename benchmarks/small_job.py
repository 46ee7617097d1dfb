"""The small job of several benchmarks: a random Llama of 3.2 M parameters on FAQ rows."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from record import ROOT

from toolkit.demo.assets import default_data_file, prepare_default_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
ROWS = "faq-en-alpaca.jsonl"


def small_model(folder: Path) -> Path:
    """Write the model once, with the demo's tokenizer; return its folder."""
    from transformers import AutoTokenizer

    sys.path.append(str(ROOT / "tests" / "support"))
    from random_models import random_llama

    if not folder.exists():
        random_llama(folder, AutoTokenizer.from_pretrained(prepare_default_model()), **SIZES)
    return folder


def fork_runs_on_cpus() -> None:
    """Fork the runs that this process starts from one with all imports, so that each takes seconds."""
    sys.path.append(str(ROOT / "tests" / "warm_starts"))
    from fork_server import SERVER_VARIABLE, fork_server
    from warm_popen import fork_runs

    fork_runs()
    os.environ[SERVER_VARIABLE] = fork_server(os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"})


def words(**arguments: Any) -> list[str]:
    """Return training arguments as command-line words, on rows of 64 tokens unless another length is given."""
    rows = {} if "dataset" in arguments else {"dataset": default_data_file(ROWS)}
    job = {**rows, "max_seq_length": 64, **arguments}
    return [word for name, value in job.items() for word in (f"--{name}", str(value))]

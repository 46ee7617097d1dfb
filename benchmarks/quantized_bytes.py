"""Bytes of QLoRA's models as bitsandbytes holds them, for tiny models of eight architectures: what a plan must equal.

    python benchmarks/quantized_bytes.py

Each is loaded as the training script loads it (4-bit NF4, double quantisation, LoRA adapters on top) and counted as
the attestation counts: packed weights, their constants, and what stays in fp32. bitsandbytes' CPU build is enough.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import print_table, write_result
from rehearsal_sizes import ARCHITECTURES

from toolkit.models.read import read_model
from toolkit.plan.engine import engine_of
from toolkit.plan.states import model_states
from toolkit.plan.weights import weights_of
from toolkit.presets import load_preset

LORA_R = 4


def held(fields: dict[str, Any], folder: Path) -> dict[str, int]:
    """Of a model with random weights, loaded from its own checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.runs.arguments import ModelArguments
    from toolkit.train.attest.tensors import full_size, local_bytes
    from toolkit.train.modelling import load_model

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).save_pretrained(folder)
    model = load_model(ModelArguments(model_name_or_path=str(folder), lora_r=LORA_R, load_in_4bit=True))
    parameters = list(model.parameters())
    return {
        "num_params": sum(map(full_size, parameters)),
        "num_in_4bit": sum(full_size(p) for p in parameters if hasattr(p, "quant_state")),
        "parameter_bytes": local_bytes(parameters),
    }


def planned(config: str) -> dict[str, int]:
    """The same of the plan, one process."""
    shape = read_model(config)
    weights = weights_of(shape, LORA_R, True)
    engine = engine_of(load_preset("single"), world_size=1, hidden_size=shape.hidden_size)
    return {
        "num_params": weights.num_trained + weights.num_frozen,
        "num_in_4bit": weights.num_quantized,
        "parameter_bytes": model_states(engine, weights).parameter_bytes,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for name, fields in ARCHITECTURES.items():
            folder = Path(scratch) / name
            one = {
                "architecture": name,
                "config": fields,
                "held": held(fields, folder),
                "planned": planned(str(folder)),
            }
            rows.append(one | {"equal": one["held"] == one["planned"]})
    cells = [(row["architecture"], *row["held"].values(), row["equal"]) for row in rows]
    print_table(["architecture", "parameters", "in 4 bits", "bytes", "as planned"], cells)
    print(write_result("quantized_bytes", {"bitsandbytes": version("bitsandbytes"), "lora_r": LORA_R, "rows": rows}))
    assert all(row["equal"] for row in rows), json.dumps(rows)


if __name__ == "__main__":
    main()

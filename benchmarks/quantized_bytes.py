"""Bytes of QLoRA models in bitsandbytes, for tiny models of eight architectures; a plan must equal them.

    python benchmarks/quantized_bytes.py

Each model is loaded as the training script loads it (4-bit NF4, double quantisation, LoRA adapters) and counted as the
attestation counts it: packed weights, their constants, other frozen weights in bf16, and adapters in fp32.
bitsandbytes' CPU build is enough.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import print_table, write_result
from shard_bytes import ARCHITECTURES

from toolkit.models.read_model import read_model
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.model_states import job_weights, model_states
from toolkit.presets import load_preset

LORA_R = 4


def held(fields: dict[str, Any], folder: Path) -> dict[str, int]:
    """Return the bytes of a model with random weights, loaded from its own checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.job.script_arguments import ModelArguments
    from toolkit.observe.attest.tensors import constant_bytes, local_bytes, num_params, quantized_modules
    from toolkit.train.model.loading import load_model

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).save_pretrained(folder)
    arguments = ModelArguments(model_name_or_path=str(folder), lora_r=LORA_R, load_in_4bit=True)
    model = load_model(arguments, compute_dtype=torch.bfloat16)
    return {
        "num_params": num_params(model),
        "num_in_4bit": sum(math.prod(module.quant_state.shape) for module in quantized_modules(model)),
        "parameter_bytes": local_bytes(model.parameters()) + constant_bytes(model),
    }


def planned(config: str) -> dict[str, int]:
    """Return the planned bytes, for one process."""
    shape = read_model(config)
    weights, unpacked = job_weights(shape, LORA_R, True), job_weights(shape, LORA_R)
    engine = engine_settings(load_preset("single"), world_size=1, hidden_size=shape.hidden_size)
    return {
        "num_params": unpacked.num_trained + unpacked.num_frozen,
        "num_in_4bit": weights.num_quantized,
        "parameter_bytes": model_states(engine, weights).parameter_bytes,
    }


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0]).parse_args()
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

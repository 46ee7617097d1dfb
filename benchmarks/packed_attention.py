"""Packed rows with a dense mask (`sdpa`) and without one (`sdpa_varlen`): CPU time and memory.

    python benchmarks/packed_attention.py --ledger FILE      # resumes; `--trials 1` runs one trial and stops

One full row of ten documents, fp32, one thread, the sizes of SmolLM2-135M; each trial in a process of its own:

- attention of one layer, forward and backward: CPU seconds, and the bytes that autograd saves, the mask included;
- a step of the first `--layers` layers with embedding and head (random weights): tokens per CPU second. One step on a
  short row is not timed. Both sides see the same row, and must compute the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result

SIDES = ("sdpa", "sdpa_varlen")
# Documents of a pack, in parts of its length: two long ones and eight short ones.
PARTS = (0.24, 0.18, 0.13, 0.11, 0.09, 0.08, 0.06, 0.05, 0.04, 0.02)
SHORT_ROW = 128
HEADER = ["part", "tokens", "attention", "CPU seconds", "min", "max", "saved, MiB", "mask, MiB"]
TRIALS = [*product(("attention",), (2048, 4096), SIDES), *product(("step",), (2048,), SIDES)]
"""Part, tokens of the row, and attention function."""


def documents(tokens: int, vocab_size: int) -> list[list[int]]:
    """Return ten documents of random tokens that fill a row."""
    import torch

    lengths = [round(part * tokens) for part in PARTS[1:]]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab_size, (tokens,), generator=generator)
    return [part.tolist() for part in drawn.split([tokens - sum(lengths), *lengths])]


def make_model(name: str, layers: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.demo.assets import prepare_default_model
    from toolkit.train.model.varlen_attention import register

    register()
    config = AutoConfig.from_pretrained(prepare_default_model(), num_hidden_layers=layers, use_cache=False)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32).train()


def train(name: str, tokens: int, layers: int) -> dict[str, Any]:
    """Train two steps in this process; return the second one's figures."""
    import torch

    from toolkit.train.data.collation import PackCollator
    from toolkit.train.data.document_isolation import mask_bytes, recorded_masks

    torch.set_num_threads(1)
    model = make_model(name, layers)
    collate = PackCollator(argparse.Namespace(pad_token_id=0), one_row=name != "sdpa")

    def step(length: int) -> float:
        parts = documents(length, model.config.vocab_size)
        row = [token for part in parts for token in part]
        # a quarter of the tokens is supervised, as in conversations with long questions
        labels = [token if index % 4 == 0 else -100 for index, token in enumerate(row)]
        batch = collate([{"input_ids": row, "labels": labels, "documents": list(map(len, parts))}])
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    step(SHORT_ROW)
    model.zero_grad(set_to_none=False)  # gradients stay, as from the second accumulation step on
    started = time.process_time()
    with recorded_masks() as masks:
        loss = step(tokens)
    seconds = time.process_time() - started
    return {"cpu_seconds": seconds, "saved_bytes": None, "mask_bytes": sum(map(mask_bytes, masks)), "loss": loss}


def attend(name: str, tokens: int) -> dict[str, Any]:
    """Run the attention of one layer; the mask, which all layers share, is made before the clock starts."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import create_causal_mask

    from toolkit.train.data.collation import PackCollator

    torch.set_num_threads(1)
    module = make_model(name, 1).model.layers[0].self_attn
    config, parts = module.config, documents(tokens, 64)
    row = {"input_ids": [0] * tokens, "labels": [0] * tokens, "documents": list(map(len, parts))}
    batch = PackCollator(argparse.Namespace(pad_token_id=0), one_row=name != "sdpa")([row])
    mask = create_causal_mask(config, torch.empty(1, tokens, 1), None, None, batch["position_ids"])
    lengths = {key: value for key, value in batch.items() if key.startswith(("cu_seq", "max_length"))}
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [torch.randn(1, count, tokens, module.head_dim, requires_grad=True) for count in heads]
    storages: dict[int, int] = {}

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def forward_and_backward() -> None:
        output, _ = AttentionInterface()[name](module, *inputs, mask, scaling=module.scaling, **lengths)
        output.sum().backward()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward_and_backward()
    started = time.process_time()
    forward_and_backward()
    seconds = time.process_time() - started
    mask_size = 0 if mask is None else mask.untyped_storage().nbytes()
    return {"cpu_seconds": seconds, "saved_bytes": sum(storages.values()), "mask_bytes": mask_size, "loss": None}


def measure(given: argparse.Namespace, part: str, tokens: int, name: str) -> dict[str, Any]:
    """Run one trial in a process of its own."""
    argv = [sys.executable, __file__, "--trial", part, str(tokens), name, "--layers", str(given.layers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} of {tokens} tokens, {name}, ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"part": part, "tokens": tokens, "side": name, **figures}


def key_of(run: dict[str, Any]) -> tuple[str, int, str]:
    return run["part"], run["tokens"], run["side"]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    ((saved, mask, loss),) = {(run["saved_bytes"], run["mask_bytes"], run["loss"]) for run in runs}
    seconds = spread([run["cpu_seconds"] for run in runs])
    part, tokens, side = key_of(runs[0])
    row = {"part": part, "tokens": tokens, "side": side, "runs": len(runs), "cpu_seconds": seconds}
    return row | {"saved_bytes": saved, "mask_bytes": mask, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description="Packed rows with and without a dense mask.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ledger", type=Path, required="--trial" not in sys.argv, help="lines of finished trials")
    parser.add_argument("--trials", type=int, help="stop after this many trials; the next call resumes")
    parser.add_argument("--trial", nargs=3, help="run one trial in this process: part, tokens, attention")
    given = parser.parse_args()
    if given.trial:
        part, tokens, name = given.trial
        print(json.dumps(attend(name, int(tokens)) if part == "attention" else train(name, int(tokens), given.layers)))
        return
    runs = [json.loads(line) for line in given.ledger.read_text().splitlines()] if given.ledger.exists() else []
    finished = Counter(map(key_of, runs))
    waiting = [key for repeat in range(given.repeats) for key in TRIALS if finished[key] <= repeat]
    for key in waiting[: given.trials]:
        runs.append(measure(given, *key))
        print(json.dumps(runs[-1]), flush=True)
        with given.ledger.open("a") as file:
            file.write(json.dumps(runs[-1]) + "\n")
    if len(runs) < given.repeats * len(TRIALS):
        return
    rows = [summary([run for run in runs if key_of(run) == key]) for key in TRIALS]
    print_table(HEADER, [shown(row) for row in rows])
    print(write_result("packed_attention", {"layers": given.layers, "parts": PARTS, "rows": rows, "runs": runs}))


def shown(row: dict[str, Any]) -> list[str]:
    seconds = [f"{row['cpu_seconds'][at]:.3f}" for at in ("median", "min", "max")]
    saved = "n/a" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 2**20:.1f}"
    return [row["part"], str(row["tokens"]), row["side"], *seconds, saved, f"{row['mask_bytes'] / 2**20:.1f}"]


if __name__ == "__main__":
    main()

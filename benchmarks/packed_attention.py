"""Packed rows with a dense mask (`sdpa`) and without one (`sdpa_varlen`): tokens per CPU second, and peak memory.

    python benchmarks/packed_attention.py

Each trial is a process of its own, one thread, fp32: SmolLM2-135M's first layers (`--layers`, random weights, head and
embedding included) train on one full row of ten documents. One step on a short row is not timed. The memory is how far
the timed step raises the process's peak resident memory above what it held before, gradients included. Both sides see
the same row, and must compute the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import product
from typing import Any

from record import print_table, spread, write_result

SIDES = ("sdpa", "sdpa_varlen")
# Documents of a pack, in parts of its length: two long ones and eight short ones.
PARTS = (0.24, 0.18, 0.13, 0.11, 0.09, 0.08, 0.06, 0.05, 0.04, 0.02)
SHORT_ROW = 128
HEADER = ["tokens", "attention", "tokens per CPU second", "min", "max", "step raises peak by, MiB", "mask, MiB", "loss"]


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


def run_trial(name: str, tokens: int, layers: int) -> dict[str, Any]:
    """Train two steps in this process; return the second one's figures."""
    import torch

    from toolkit.train.attest.document_isolation import mask_bytes, recorded_masks
    from toolkit.train.data.collation import BATCH_FACTS, PackCollator

    torch.set_num_threads(1)
    model = make_model(name, layers)
    collate = PackCollator(argparse.Namespace(pad_token_id=0), one_row=name != "sdpa", supervised_logits=True)

    def step(length: int) -> float:
        parts = documents(length, model.config.vocab_size)
        row = [token for part in parts for token in part]
        # a quarter of the tokens is supervised, as in conversations with long questions
        labels = [token if index % 4 == 0 else -100 for index, token in enumerate(row)]
        batch = collate([{"input_ids": row, "labels": labels, "documents": list(map(len, parts))}])
        del batch[BATCH_FACTS]
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    step(SHORT_ROW)
    model.zero_grad(set_to_none=False)  # gradients stay, as from the second accumulation step on
    before, started = peak_bytes(), time.process_time()
    with recorded_masks() as masks:
        loss = step(tokens)
    return {
        "side": name,
        "tokens": tokens,
        "cpu_seconds": time.process_time() - started,
        "peak_bytes": peak_bytes() - before,
        "mask_bytes": sum(map(mask_bytes, masks)),
        "loss": loss,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(given: argparse.Namespace, name: str, tokens: int) -> dict[str, Any]:
    """Run one trial in a process of its own."""
    argv = [sys.executable, __file__, "--trial", name, "--tokens", str(tokens), "--layers", str(given.layers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} with {tokens} tokens ended with {done.returncode}:\n{done.stderr[-3000:]}")
    print(done.stdout.splitlines()[-1], flush=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": runs[0]["tokens"],
        "side": runs[0]["side"],
        "tokens_per_cpu_second": spread([run["tokens"] / run["cpu_seconds"] for run in runs]),
        "peak_bytes": spread([run["peak_bytes"] for run in runs]),
        "mask_bytes": runs[0]["mask_bytes"],
        "loss": runs[0]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Packed rows with and without a dense mask.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trial", choices=SIDES, help="run one trial in this process")
    given = parser.parse_args()
    if given.trial:
        print(json.dumps(run_trial(given.trial, given.tokens[0], given.layers)))
        return
    runs = [measure(given, name, tokens) for _, tokens, name in product(range(given.repeats), given.tokens, SIDES)]
    grouped = product(given.tokens, SIDES)
    rows = [summary([r for r in runs if (r["tokens"], r["side"]) == key]) for key in grouped]
    shown = [
        [
            *(row["tokens"], row["side"]),
            *(f"{row['tokens_per_cpu_second'][at]:.0f}" for at in ("median", "min", "max")),
            *(f"{row['peak_bytes']['median'] / 2**20:.0f}", f"{row['mask_bytes'] / 2**20:.1f}", f"{row['loss']:.6f}"),
        ]
        for row in rows
    ]
    print_table(HEADER, shown)
    print(write_result("packed_attention", {"layers": given.layers, "parts": PARTS, "rows": rows, "runs": runs}))


if __name__ == "__main__":
    main()

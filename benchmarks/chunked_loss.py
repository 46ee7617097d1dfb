"""Tokens per CPU-second and traced peak of the chunked loss against the full logits, in a whole forward and backward.

    python benchmarks/chunked_loss.py --pairs 9

SmolLM2-135M (49,152 words) with random weights in fp32, one thread, one row of `--tokens`. Each pair runs one forward
and backward of both, in turns; their losses are compared. The peak is that of all tensors that the forward makes,
counted by a dispatch mode in a run of its own.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from typing import Any

import torch
from record import pairs, print_table, spread, write_result
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.demo.assets import prepare_default_model
from toolkit.job.argument_values import LOSS_CHUNK_TOKENS
from toolkit.models.fake_tensors import LiveMemory
from toolkit.observe.attest.tensors import without_adapters
from toolkit.observe.batches import IGNORED
from toolkit.train.model.chunked_loss import ChunkedLoss

LOSS_TOLERANCE = 1e-5
HEADER = ["job", "supervised", "chunked / full", "min", "max", "peak, full", "peak, chunked"]
# What is trained, and the share of the tokens that is supervised.
CASES = [(trained, share) for trained in ("all weights", "LoRA") for share in (1.0, 0.4)]


def build(trained: str) -> Any:
    """Return the model, with adapters on its linear layers or with all weights trained."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(prepare_default_model()), dtype=torch.float32)
    model.config.use_cache = False
    if trained == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def batch(tokens: int, supervised: float) -> dict[str, torch.Tensor]:
    """Return one row, of which the last part is supervised."""
    row = torch.randint(0, 49_152, (1, tokens), generator=torch.Generator().manual_seed(1))
    labels = row.clone()
    labels[:, : round(tokens * (1 - supervised))] = IGNORED
    return {"input_ids": row, "labels": labels}


def step(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the CPU seconds of a forward and backward, and the loss."""
    model.zero_grad()
    started = time.process_time()
    loss = model(**inputs).loss
    loss.backward()
    return time.process_time() - started, loss.item()


def peak_bytes(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Return the highest bytes of what a forward and backward make beside the model."""
    model.zero_grad()
    memory = LiveMemory(vocab_size=0)
    with memory:
        memory.exclude([*model.parameters(), *model.buffers(), *inputs.values()])
        model(**inputs).loss.backward()
    return max(peak.total_bytes for peak in memory.peaks.values())


def measure(trained: str, supervised: float, *, number: int, tokens: int) -> dict[str, Any]:
    full = build(trained)
    chunked = copy.deepcopy(full)
    ChunkedLoss(without_adapters(chunked), chunk_tokens=LOSS_CHUNK_TOKENS)
    inputs = batch(tokens, supervised)
    peaks = {"full": peak_bytes(full, inputs), "chunked": peak_bytes(chunked, inputs)}  # also the untimed steps
    measured = pairs(number, partial(step, full, inputs), partial(step, chunked, inputs))
    for (_, one), (_, other) in measured:
        assert abs(one - other) <= LOSS_TOLERANCE * abs(one), f"losses differ: {one} and {other}"
    ratio = spread([a[0] / b[0] for a, b in measured])
    return {"trained": trained, "supervised": supervised, "tokens": tokens, "ratio": ratio, "peak_bytes": peaks}


def cells(row: dict[str, Any]) -> list[str]:
    ratios = [f"{row['ratio'][name]:.2f}" for name in ("median", "min", "max")]
    peaks = [f"{row['peak_bytes'][name] / 2**30:.2f} GiB" for name in ("full", "chunked")]
    return [row["trained"], f"{row['supervised']:.0%}", *ratios, *peaks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(trained, share, number=given.pairs, tokens=given.tokens) for trained, share in CASES]
    print_table(HEADER, [cells(row) for row in rows])
    write_result("chunked_loss", {"chunk_tokens": LOSS_CHUNK_TOKENS, "pairs": given.pairs}, rows)


if __name__ == "__main__":
    main()

"""A Llama of random weights beside a tokenizer, of any size: what tests and benchmarks train in seconds.

random_llama(folder, tokenizer, hidden_size=64, intermediate_size=128, num_hidden_layers=2, ...)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def random_llama(folder: Path, tokenizer: Any, *, seed: int = 0, **sizes: Any) -> Path:
    """fp32 weights drawn by `seed`, which leaves the caller's random state alone; `sizes` are `LlamaConfig`'s."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(vocab_size=len(tokenizer), dtype="float32", **ends, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

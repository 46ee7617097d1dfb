"""Models of random weights, for tests and benchmarks."""

from pathlib import Path
from typing import Any


def random_llama(folder: Path, tokenizer: Any, *, seed: int = 0, **sizes: Any) -> Path:
    """Write a Llama of random fp32 weights (`sizes` as in `LlamaConfig`) and the tokenizer. Imports torch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(vocab_size=len(tokenizer), dtype="float32", **ends, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""Bytes of logits and loss, by how the loss is computed.

>>> logits_bytes(loss="full", tokens=1, vocab_size=100, hidden_size=8)
(1000, 1200)
"""

from __future__ import annotations

import math


def logits_bytes(*, loss: str, tokens: int, vocab_size: int, hidden_size: int, kept_bytes: int = 0) -> tuple[int, int]:
    """Bytes of logits and loss at the end of the forward, and at the start of the backward; `kept_bytes` of each logit
    are kept before the loss.

    `full`: bf16 logits, their fp32 copy and the fp32 log-probabilities (2 + 4 + 4); backward the log-probabilities,
    the gradient of the loss, and that of the logits (4 + 4 + 4): transformers' `ForCausalLMLoss`, torch's
    `cross_entropy`. `chunked`: bf16 logits and their gradient, and an eighth of the rest, as torchtune's chunked loss.
    `fused`: one chunk of bf16 logits, the head's gradient and that of what it reads (Liger-Kernel,
    `fused_linear_cross_entropy`).
    """
    logits = tokens * vocab_size
    if loss == "full":
        return (10 + kept_bytes) * logits, (12 + kept_bytes) * logits
    if loss == "chunked":
        return 2 * logits + logits, 4 * logits + logits
    chunks = math.ceil(vocab_size / max(hidden_size, 1))
    chunk = min(tokens, 1 << (math.ceil(tokens / chunks) - 1).bit_length())
    fused = 2 * chunk * vocab_size + 2 * vocab_size * hidden_size + 2 * tokens * hidden_size
    return fused, 2 * vocab_size * hidden_size + 2 * tokens * hidden_size

"""Bytes of logits and loss of one micro-batch: the toolkit's losses, other libraries' and those of TRL's methods."""

from __future__ import annotations

import math

from toolkit.job.argument_values import LOSS_CHUNK_TOKENS

FP32_BYTES = 4
# Tokens and vocabulary entries of a tile in TRL 1.16 (`trl/kernels/chunked_logprob.py`, `trl/trainer/utils.py`).
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768


def logits_bytes(
    *,
    loss: str,
    tokens: int,
    vocab_size: int,
    hidden_size: int,
    saved_bytes: int = 0,
    head_bytes: int = 0,
    element_bytes: int = 2,
    chunk_tokens: int = LOSS_CHUNK_TOKENS,
    scored: int = 0,
    row_bytes: int = 2,
    output_bytes: int = 2,
) -> tuple[int, int]:
    """Return the bytes of logits and loss at the end of the forward and at the start of the backward.

    `saved_bytes` are saved per logit before the loss; `head_bytes` is the size of an element of the head's gradient, 0
    if the head is frozen. Compute is in `element_bytes`.

    - `chunked`: the default of `toolkit train` (docs/concepts/plan.md). One chunk of logits and its fp32 copy (2 + 4),
      the gradient of the hidden states, and, from two chunks on, the head's gradient in fp32; then that in its own
      dtype. The gradients are alive until the backward takes them.
    - `full`: bf16 logits, their fp32 copy and the fp32 log-probabilities (2 + 4 + 4); in the backward the
      log-probabilities and the gradients of loss and logits (4 + 4 + 4): transformers' `ForCausalLMLoss`, torch's
      `cross_entropy`.
    - `upcast`: the same up to transformers 4.45, which also copied the fp32 logits without the last row of each
      sequence, and their gradient.
    - `cut`: cut cross entropy, and Unsloth's: no logits; the gradients of the head and of its input.
    - `fused`: one chunk of bf16 logits and the gradients of the head and of its input, whose elements take
      `head_bytes` and `row_bytes`; where the head is fp32, its bf16 copy too (Liger-Kernel 0.8.5,
      `fused_linear_cross_entropy`).
    - `chunked_output`: bf16 logits and their gradient, and an eighth of the rest, as torchtune's chunked loss.
    - `log_probs`: TRL's (`kernels/chunked_logprob.py`). A tile of logits, the rows of the hidden states of the `scored`
      tokens, an element of which takes `row_bytes`, and all rows that they are taken from; in the backward the fp32
      gradients of these rows and of the head, each then converted.
    - `orpo`, `simpo`: TRL's, in multiples of logits of `output_bytes`, which are fp32 under autocast. SimPO's
      log-probabilities save the logits as they are, and their gradient is one more; beside them, ORPO's likelihood of
      the chosen half of the rows saves a copy of it and its log-probabilities, which have gradients too.
    - `scores`: nothing of note.
    """
    logits, head = tokens * vocab_size, vocab_size * hidden_size
    if loss == "scores":
        return 0, 0
    if loss == "orpo":
        return 2 * output_bytes * logits, 3 * output_bytes * logits
    if loss == "simpo":  # under autocast the bf16 logits are alive while they are converted
        return (output_bytes + (output_bytes - element_bytes)) * logits, 2 * output_bytes * logits
    if loss == "log_probs":
        tile_tokens = min(scored, TILE_TOKENS)
        tile = element_bytes * tile_tokens * TILE_VOCABULARY
        if row_bytes > element_bytes:  # under autocast, casts of the rows of a tile
            tile += element_bytes * tile_tokens * hidden_size
        if head_bytes > element_bytes:  # and of the head's columns
            tile += element_bytes * min(TILE_VOCABULARY, vocab_size) * hidden_size
        rows = row_bytes * scored * hidden_size
        columns = element_bytes * min(TILE_VOCABULARY, max(0, vocab_size - TILE_VOCABULARY)) * hidden_size
        again = columns if head_bytes > element_bytes else 0  # the last columns live until the next are cast
        gradients = again + FP32_BYTES * (scored * hidden_size + (head if head_bytes else 0))
        converted = (rows if row_bytes < FP32_BYTES else 0) + (head_bytes * head if head_bytes < FP32_BYTES else 0)
        return rows + tile + row_bytes * tokens * hidden_size, rows + tile + gradients + converted
    if loss == "upcast":
        return (14 + saved_bytes) * logits, (16 + saved_bytes) * logits
    if loss == "cut":
        return FP32_BYTES * tokens, head_bytes * head + row_bytes * tokens * hidden_size
    if loss == "full":
        return (10 + saved_bytes) * logits, (12 + saved_bytes) * logits
    if loss == "chunked_output":
        return 2 * logits + logits, 4 * logits + logits
    if loss == "chunked":
        chunk = min(tokens, chunk_tokens) * vocab_size
        # Beside the logits their fp32 copy, unless they are fp32; a soft cap needs one more.
        copies = (4 if element_bytes < 4 else 0) + (4 if saved_bytes else 0)
        gradients = element_bytes * tokens * hidden_size + head_bytes * head
        sums = 4 * head if head_bytes and tokens > chunk_tokens else 0
        computing = (element_bytes + copies) * chunk + element_bytes * tokens * hidden_size + sums
        converting = gradients + (sums if head_bytes < 4 else 0)
        return max(computing, converting), gradients
    chunks = math.ceil(vocab_size / max(hidden_size, 1))
    chunk = min(tokens, 1 << (math.ceil(tokens / chunks) - 1).bit_length())
    gradients = head_bytes * head + row_bytes * tokens * hidden_size
    copy = element_bytes * head if head_bytes > element_bytes else 0
    return element_bytes * chunk * vocab_size + copy + gradients, gradients

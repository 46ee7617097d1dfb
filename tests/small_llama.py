"""A Llama whose sizes are easy to count, as a configuration."""

from __future__ import annotations

LLAMA = {
    **{"model_type": "llama", "vocab_size": 1009, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
# Embedding and head 1009 x 64 each; a layer has q and o 64 x 64, k and v 32 x 64, gate, up and down 128 x 64, 2 norms.
NUM_PARAMS = 2 * 1009 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64

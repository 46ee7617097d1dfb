"""Defaults of a training job, the same for the training script, `plan`, `recommend` and `rehearse`.

The first two are transformers' own, so that a plain `accelerate launch` and a plan mean the same job.
"""

PER_DEVICE_TRAIN_BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 1
MAX_SEQ_LENGTH = 1024
LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time under the chunked loss.

Adding up a trained head's gradient in fp32 moves 8 bytes per weight and chunk, so small chunks cost bandwidth: at 1,024
tokens it is as much as the full loss's additional passes over the logits where the hidden size is 2,048.
"""

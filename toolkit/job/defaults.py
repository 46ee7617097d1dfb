"""Defaults and limits that the options of commands share with the arguments; `toolkit --help` loads nothing more.

The first two are transformers' own, so that a plain `accelerate launch` and a plan mean the same job.
"""

PER_DEVICE_TRAIN_BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 1
MAX_SEQ_LENGTH = 1024
# Adding up a trained head's gradient in fp32 moves 8 bytes per weight and chunk, so small chunks cost bandwidth: at
# 1,024 tokens it is as much as the full loss's additional passes over the logits where the hidden size is 2,048.
LOSS_CHUNK_TOKENS = 1024
YEAR_MINUTES = 366 * 24 * 60

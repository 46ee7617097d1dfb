"""Defaults of a training job, the same for the training script, `plan`, `recommend` and `rehearse`.

The first two are transformers' own, so that a plain `accelerate launch` and a plan mean the same job.
"""

PER_DEVICE_TRAIN_BATCH_SIZE = 8
GRADIENT_ACCUMULATION_STEPS = 1
MAX_SEQ_LENGTH = 1024

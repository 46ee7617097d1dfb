"""The compute dtype of a run, as torch's dtype and by name."""

from __future__ import annotations

from typing import Any

import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_PRECISION = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


def compute_dtype_name(training: Any) -> str:
    """Return the dtype of forward and backward of `TrainingArguments`: `bfloat16`."""
    return _OF_PRECISION[training.mixed_precision]


def compute_dtype(training: Any) -> torch.dtype:
    """Return the dtype of forward and backward of `TrainingArguments`."""
    return TORCH_DTYPES[compute_dtype_name(training)]

"""Dtypes of a run, as torch's and by name."""

from __future__ import annotations

from typing import Any

import torch

_OF_PRECISION = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: Any) -> torch.dtype:
    """Return the dtype of forward and backward of `TrainingArguments`."""
    return _OF_PRECISION[training.mixed_precision]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def element_bytes(name: str | None) -> int:
    """Return the bytes of one element by the dtype's name; 0 for None and for a mixture such as `bfloat16+float32`."""
    dtype = getattr(torch, name or "", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 0

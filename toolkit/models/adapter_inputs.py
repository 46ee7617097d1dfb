"""What the inputs of LoRA layers are cast to."""

from __future__ import annotations

from typing import Any


def share_inputs(model: Any) -> None:
    """Let adapters read a layer's input as it is, for training under autocast.

    peft casts each input to the adapter's fp32 first, and autocast casts it back: every adapted layer would save its
    own copy of an input that several layers share. The value is the same.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False

"""Names of adapter tensors: peft's parameters carry the adapter's name, its files do not.

>>> without_adapter_name("q_proj.lora_A.default.weight")
'q_proj.lora_A.weight'
"""

from __future__ import annotations

ADAPTER = "default"  # peft's name of the one adapter that the training script makes


def without_adapter_name(name: str) -> str:
    """As peft saves it."""
    parts = [part for part in name.split(".") if part != ADAPTER]
    saved = ".".join(parts)
    # DoRA's magnitude is a module with a weight in the model, and the vector itself in the file.
    return saved.removesuffix(".weight") if "lora_magnitude_vector" in parts else saved

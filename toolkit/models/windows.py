"""Sliding windows: from which length on, and in how many layers, attention needs a mask.

    >>> window_of("mistral", Fields({}, "config.json"), layers=32)
    (4096, 32)

A row as long as the window has a mask, and SDPA with a mask repeats keys and values for each head and keeps a bf16 copy
of the mask a layer (transformers 5.23, `masking_utils.py` and `integrations/sdpa_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.models.fields import Fields

WINDOW = 4096  # of a configuration that names none
ALWAYS = ("mistral",)
"""A configuration without the field has a window; null is none."""
PATTERNS = {"gemma2": 2, "gemma3_text": 6}
"""Every so many layers one is full."""
IF_SAID = ("mixtral", "phi3")
IF_SWITCHED_ON = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")


def window_of(model_type: str, fields: Fields, *, layers: int) -> tuple[int | None, int]:
    """The window, None where there is none, and the number of layers that have it."""
    if not _in_use(model_type, fields):
        return None, 0
    named = "sliding_window" in fields.values
    if named and fields.values["sliding_window"] is None:
        return None, 0
    window = fields.size("sliding_window", default=WINDOW)
    types = fields.values.get("layer_types")
    if isinstance(types, list):
        sliding = types.count("sliding_attention")
    else:
        slides = _rule(model_type, fields)
        sliding = sum(slides(index) for index in range(layers))
    return (window, sliding) if sliding else (None, 0)


def _in_use(model_type: str, fields: Fields) -> bool:
    if model_type in IF_SWITCHED_ON:
        return fields.flag("use_sliding_window")
    said = model_type in IF_SAID and fields.values.get("sliding_window") is not None
    return said or model_type in ALWAYS or model_type in PATTERNS


def _rule(model_type: str, fields: Fields) -> Callable[[int], bool]:
    """Which layers slide where a configuration does not list them, as each configuration class of transformers says."""
    if model_type in PATTERNS:
        every = fields.size("sliding_window_pattern", default=PATTERNS[model_type])
        return lambda index: (index + 1) % every != 0
    first_full = fields.size("max_window_layers", default=28)
    rules: dict[str, Callable[[int], bool]] = {
        "qwen2": lambda index: index >= first_full,
        "qwen3": lambda index: index >= first_full,
        "qwen2_moe": lambda index: (index + 1) % 2 == 1 and index < first_full,
        "smollm3": lambda index: (index + 1) % 4 == 0,
    }
    return rules.get(model_type, lambda _: True)

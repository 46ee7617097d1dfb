"""The tensors of each architecture that arithmetic knows, in the order in which transformers 5 makes them.

    >>> shape_of(Fields({"model_type": "bert"}, "config.json")) is None
    True

Held against transformers on the meta device, name by name, in `tests/test_models.py`. What is not here, or has an
option that is not here, is counted on the meta device.
"""

from __future__ import annotations

from toolkit.models.families import LLAMA_LIKE
from toolkit.models.fields import Fields
from toolkit.models.llama_like import llama_like
from toolkit.models.other_decoders import OTHERS
from toolkit.models.shape import ModelShape


def shape_of(fields: Fields) -> ModelShape | None:
    """The shape, or None where arithmetic does not know the architecture.

    Raises ToolkitError for a field that is missing or makes no sense.
    """
    model_type = str(fields.values.get("model_type"))
    if model_type in LLAMA_LIKE:
        family = LLAMA_LIKE[model_type]
        if any(fields.values.get(flag) for flag in family.unknown_flags):
            return None
        return llama_like(model_type, family, fields)
    other = OTHERS.get(model_type)
    return other(fields) if other is not None else None


def known_types() -> list[str]:
    """Model types that arithmetic knows."""
    return sorted([*LLAMA_LIKE, *OTHERS])

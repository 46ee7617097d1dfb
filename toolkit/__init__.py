"""Presets, a thin training script and a comparison that can be trusted.

>>> from toolkit import load_preset
>>> load_preset("zero3").sharding
'full_shard'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit._version import __version__

if TYPE_CHECKING:
    from toolkit.observe.observer import observe
    from toolkit.presets import Preset, list_presets, load_preset

__all__ = ["Preset", "__version__", "list_presets", "load_preset", "observe"]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that a program's own error handling is in effect before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("toolkit.observe") if name == "observe" else getattr(import_module("toolkit.presets"), name)

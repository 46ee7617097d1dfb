"""Presets, a thin training script and a comparison that can be trusted.

>>> from toolkit import load_preset
>>> load_preset("zero3").sharding
'full_shard'
"""

from toolkit.presets import Preset, list_presets, load_preset

__version__ = "0.1.0"

__all__ = ["Preset", "__version__", "list_presets", "load_preset"]

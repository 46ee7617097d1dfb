"""Presets: files that say how to shard, read by every other room.

>>> load_preset("zero2").sharding
'shard_grad_op'
"""

from toolkit.presets.catalog import list_presets, load_preset, preset_names, presets_root
from toolkit.presets.preset import Preset, read_preset

__all__ = ["Preset", "list_presets", "load_preset", "preset_names", "presets_root", "read_preset"]

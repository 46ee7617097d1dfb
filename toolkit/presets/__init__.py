"""Presets: files that specify how to shard, offload and compute, read by every part of the toolkit.

>>> load_preset("zero2").sharding
'shard_grad_op'
"""

from toolkit.presets.preset import Preset, list_presets, load_preset, preset_names, presets_root, read_preset
from toolkit.presets.spec import PresetSpec

__all__ = ["Preset", "PresetSpec", "list_presets", "load_preset", "preset_names", "presets_root", "read_preset"]

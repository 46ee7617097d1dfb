"""Readings from NVML, and the reasons that count as throttling."""

from __future__ import annotations

from toolkit.hardware.nvml import Nvml, throttle_names


def test_idle_and_user_set_clocks_are_not_throttling() -> None:
    assert throttle_names(0x1 | 0x2 | 0x10) == []  # idle, clocks set by the user, synchronised boost
    assert throttle_names(0x80) == ["hardware power brake"]


def test_without_nvml_every_reading_is_unknown() -> None:
    nvml = Nvml("no-such-uuid")
    assert (nvml.process_bytes(1), nvml.energy_joules(), nvml.throttle_reasons()) == (None, None, None)

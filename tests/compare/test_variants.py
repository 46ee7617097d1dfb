"""Variants, as typed after `--variant`."""

from __future__ import annotations

import pytest

from toolkit.compare.variants import load_variants, parse_variant
from toolkit.errors import ToolkitError


def test_a_variant_has_a_name_a_preset_and_extra_arguments() -> None:
    variant = parse_variant("ddp_int8=ddp --ddp_comm_hook int8")
    assert (variant.name, variant.preset.name, variant.extra_arguments) == (
        "ddp_int8",
        "ddp",
        ("--ddp_comm_hook", "int8"),
    )
    for words in ("ddp", "=ddp", "a b=ddp", "a="):
        with pytest.raises(ToolkitError, match="expected a name of letters"):
            parse_variant(words)
    with pytest.raises(ToolkitError, match="unknown argument --ddp_com_hook"):
        parse_variant("a=ddp --ddp_com_hook int8")


def test_a_name_can_be_compared_once() -> None:
    with pytest.raises(ToolkitError, match="--preset ddp is given twice"):
        load_variants(["ddp"], ["ddp=zero2"])

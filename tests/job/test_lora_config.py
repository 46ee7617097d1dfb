"""The fields of --lora_config, checked against the installed peft."""

from __future__ import annotations

import pytest

from toolkit.errors import ToolkitError
from toolkit.job.argument_reading import lora_fields


def test_any_field_of_lora_config_passes_as_flag_or_mapping() -> None:
    assert lora_fields(["use_rslora=true", "layers_to_transform=[0, 1]", "bias=none"]) == {
        "use_rslora": True,
        "layers_to_transform": [0, 1],
        "bias": "none",
    }
    assert lora_fields({"use_dora": True}) == lora_fields("use_dora=true")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("use_dorra=true", "did you mean `use_dora`"),
        ("use_dora=flase", "expected true or false"),
        ("r=8", "`--lora_r VALUE`"),
        ("use_dora", "is not key=value"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(word: str, words: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        lora_fields([word])
    assert words in str(refused.value)

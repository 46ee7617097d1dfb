"""The attention function that a run loads its model with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.train.model.loading import choose_attention


def choice(model: Path, name: str | None, *, packing: bool, trust_remote_code: bool = False) -> str | None:
    arguments = ModelArguments(
        model_name_or_path=str(model), attn_implementation=name, trust_remote_code=trust_remote_code
    )
    return choose_attention(arguments, packing=packing, compute_dtype=torch.float32, on_cpu=True)


def test_packed_rows_get_a_function_without_a_mask_unless_one_is_named(tiny_model: Path) -> None:
    assert choice(tiny_model, None, packing=True) == choice(tiny_model, "auto", packing=True) == "sdpa_varlen"
    assert choice(tiny_model, "sdpa", packing=True) == "sdpa"


def test_other_rows_keep_the_models_default(tiny_model: Path) -> None:
    assert choice(tiny_model, None, packing=False) is choice(tiny_model, "auto", packing=False) is None
    assert choice(tiny_model, "eager", packing=False) == "eager"


def test_a_model_that_runs_none_keeps_its_default_and_refuses_to_be_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    assert choice(tmp_path, None, packing=True) is None
    with pytest.raises(ToolkitError, match="does not support SDPA for gpt_oss") as refused:
        choice(tmp_path, "sdpa_varlen", packing=True)
    assert refused.value.hint == "`--attn_implementation eager`"

"""Attention functions of a model, and the one that packed rows get."""

from typing import Any

import pytest

from toolkit.models import attention
from toolkit.models.attention import ModelAttention, needs_no_mask, packed_attention, read_model_attention

H100, A100, T4 = (9, 0), (8, 0), (7, 5)
BOTH = ("flash_attn", "flash_attn_interface")


def known(model_type: str, **config: Any) -> ModelAttention:
    return read_model_attention({"model_type": model_type, **config})


@pytest.mark.parametrize(
    ("installed", "gpu", "half", "function"),
    [
        (BOTH, H100, True, "flash_attention_3"),
        (BOTH, A100, True, "flash_attention_2"),
        (BOTH, T4, True, "sdpa_varlen"),
        (BOTH, None, True, "sdpa_varlen"),
        (BOTH, A100, False, "sdpa_varlen"),
        (("kernels",), A100, True, "sdpa_varlen"),  # nothing is fetched from the hub
    ],
)
def test_packed_rows_get_the_newest_function_that_the_gpu_runs(
    installed: tuple[str, ...], gpu: Any, half: bool, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_importable", lambda module: module in installed)
    assert packed_attention(known("llama"), capability=gpu, half_precision=half) == function


@pytest.mark.parametrize(
    ("model_type", "config", "name", "because"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, "sdpa_varlen", "transformers does not support SDPA for gemma2"),
        ("gpt_oss", {}, "sdpa", "transformers does not support it for gpt_oss"),
        ("gpt_oss", {}, "flash_attention_2", "gpt_oss works with kernels-community/"),
        ("llama4_text", {}, "sdpa_varlen", "llama4_text does not pass the lengths of documents to its attention"),
        ("llama4_text", {}, "flash_attention_2", "transformers does not support it for llama4_text"),
        ("llama", {"attn_logit_softcapping": 30.0}, "sdpa_varlen", "it caps its scores"),
        ("llama", {"layer_types": ["chunked_attention"]}, "sdpa_varlen", "it attends within chunks"),
        ("gpt2", {}, "flex_attention", "transformers does not support it for gpt2"),
    ],
)
def test_a_model_says_why_not_a_function(model_type: str, config: dict[str, Any], name: str, because: str) -> None:
    assert (known(model_type, **config).why_not(name) or "").startswith(because)


def test_decoders_that_pass_document_lengths_run_without_a_mask_and_an_unknown_one_is_not_judged() -> None:
    for model_type in ("llama", "gemma3_text", "deepseek_v3"):
        assert known(model_type).working == ("sdpa_varlen", "sdpa", "eager")
    assert known("gpt_oss").working == ("eager",)
    assert read_model_attention({"model_type": "../llama"}) is None
    assert packed_attention(None, capability=None, half_precision=False) is None
    # Only functions of variable length need no mask.
    names = ["sdpa", "eager", "flex_attention", "sdpa_varlen", "flash_attention_2", "kernels-community/flash-attn3"]
    assert [name for name in names if needs_no_mask(name)] == names[3:]
    assert not needs_no_mask(None)


@pytest.mark.parametrize(("installed", "missing"), [((), "flash-attn"), (("kernels",), None), (("flash_attn",), None)])
def test_flash_attention_needs_its_package_or_one_that_fetches_it(
    installed: tuple[str, ...], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_importable", lambda module: module in installed)
    assert attention.missing_attention_package("flash_attention_2") == missing
    assert attention.missing_attention_package("sdpa") is None

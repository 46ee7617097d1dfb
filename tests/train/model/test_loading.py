"""Dtypes of weights: trained ones in fp32, frozen ones in the compute dtype. Patterns freeze parameters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import TINY
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments
from toolkit.job.job import Job
from toolkit.train.checkpointing import in_fp32
from toolkit.train.model.loading import (
    choose_attention,
    dequantized,
    freeze,
    load_model,
    load_tokenizer,
    loaded_dtype,
    prepare_model,
)

SAVES_HEAD: dict[str, Any] = {"lora_r": 4, "lora_config": {"modules_to_save": ["lm_head"]}}


@pytest.mark.parametrize(
    "fields", [{"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}, None, "none"]
)
def test_a_model_whose_own_weights_are_trained_is_loaded_in_fp32(fields: Any) -> None:
    how = {"train_only": ["lm_head.*"]} if fields == "none" else {"lora_r": 4, "lora_config": fields}
    dtype = torch.bfloat16 if fields in (None, {"use_dora": True}) else torch.float32
    assert loaded_dtype(ModelArguments(model_name_or_path="m", **how), torch.bfloat16) == dtype


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "how", [{"lora_r": 4}, SAVES_HEAD, {"freeze": ["model.layers.0.*"]}, {"train_only": ["lm_head.*"]}]
)
def test_weights_have_the_dtype_of_their_role_and_a_gradient_if_trained(how: Any, compute: torch.dtype) -> None:
    arguments = ModelArguments(model_name_or_path="m", **how)
    config = AutoConfig.for_model("llama", **TINY)
    made = AutoModelForCausalLM.from_config(config, dtype=loaded_dtype(arguments, compute))
    model = prepare_model(made, arguments, compute_dtype=compute)
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(True, torch.float32), (False, compute)}
    tokens = torch.arange(8).view(1, 8)
    with torch.autocast("cpu", dtype=compute, enabled=compute != torch.float32):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


def test_a_state_of_both_dtypes_is_raised_to_fp32_and_tied_weights_stay_tied() -> None:
    tied, trained, count = torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.001), torch.tensor(3)
    state = in_fp32({"embed": tied, "norm": trained, "head": tied, "count": count})
    assert state["embed"].data_ptr() == state["head"].data_ptr()
    assert (state["embed"].dtype, state["norm"] is trained, state["count"] is count) == (torch.float32, True, True)


def tied_model() -> Any:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "layer": torch.nn.Linear(2, 2)})
    model["head"] = torch.nn.Linear(2, 4, bias=False)
    model["head"].weight = model["embed"].weight
    return model


TIED = "head.weight is tied to embed.weight: the pattern applies to all of them"


@pytest.mark.parametrize(
    "patterns", [{"frozen": ["layer.b*"], "trained": None}, {"frozen": None, "trained": ["head.*"]}]
)
def test_patterns_freeze_what_they_name_and_tied_weights_with_it(patterns: Any) -> None:
    model = tied_model()
    assert freeze(model, **patterns) == ([TIED] if patterns["trained"] else [])
    left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert left == ({"embed.weight"} if patterns["trained"] else {"embed.weight", "layer.weight"})


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest() -> None:
    with pytest.raises(ToolkitError, match=r"'layer.weigth' matches no parameter") as refused:
        freeze(tied_model(), frozen=["layer.weigth"], trained=None)
    assert refused.value.hint == "there is `layer.weight`"
    with pytest.raises(ToolkitError, match="leaves nothing to train"):
        freeze(tied_model(), frozen=["*"], trained=None)


PACKED = [(None, True, "sdpa_varlen"), ("auto", True, "sdpa_varlen"), ("sdpa", True, "sdpa")]
PADDED = [(None, False, None), ("auto", False, None), ("eager", False, "eager")]


@pytest.mark.parametrize(("name", "packing", "chosen"), PACKED + PADDED)
def test_packed_rows_need_no_mask(name: str | None, packing: bool, chosen: str | None, tiny_model: Path) -> None:
    job = Job(model_name_or_path=str(tiny_model), attn_implementation=name, packing=packing)
    assert choose_attention(job, compute_dtype=torch.float32, on_cpu=True) == chosen


def test_a_model_that_runs_no_such_attention_keeps_its_default_and_refuses_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    job = Job(model_name_or_path=str(tmp_path), packing=True)
    assert choose_attention(job, compute_dtype=torch.float32, on_cpu=True) is None
    with pytest.raises(ToolkitError, match="does not support SDPA for gpt_oss") as refused:
        choose_attention(replace(job, attn_implementation="sdpa_varlen"), compute_dtype=torch.float32, on_cpu=True)
    assert refused.value.hint == "`--attn_implementation eager`"


def test_a_tokenizers_length_that_is_no_number_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": {"a": 1}}))
    with pytest.raises(ToolkitError, match="model_max_length is"):
        load_tokenizer(ModelArguments(model_name_or_path=str(tmp_path)), chat_template=None)


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "gptq", None])
def test_weights_of_fewer_bits_are_asked_for_dequantized_also_where_a_gpu_would_keep_them(method: str | None) -> None:
    config = AutoConfig.for_model(
        "llama", **TINY, **({"quantization_config": {"quant_method": method}} if method else {})
    )
    asked = dequantized(config).get("quantization_config")
    assert (asked is not None and asked.dequantize) == (method in ("mxfp4", "fp8"))


def test_an_fp8_checkpoint_is_trained_from_its_dequantized_weights(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = model.state_dict()[name].to(torch.float8_e4m3fn)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: expected, f"{name}_scale_inv": torch.full((1, 1), 0.5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = load_model(ModelArguments(model_name_or_path=str(tmp_path)), compute_dtype=torch.bfloat16)
    assert torch.equal(loaded.state_dict()[name].float(), expected.float() * 0.5)
    assert "quantization_config" not in loaded.config.to_dict()

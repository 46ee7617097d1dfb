"""The formulas for activation sizes against the counting on fake tensors, and the counting against real models.

This is the contract between the two sources of `SavedActivations`: for every architecture that has formulas, and for
every option that changes the result, the formulas agree with what transformers and autograd really do.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import saved_storages
from model_configs import EXPERTS, WIDE, built, config_file
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.activations import PARTIAL_ROTARY, TWO_ROTARY_EMBEDDINGS, Activations
from toolkit.models.config_fields import ConfigFields
from toolkit.models.count_from_transformers import (
    LENGTHS,
    RANKS,
    ROWS,
    _fit,
    _fit_two,
    _kind_of_each_layer,
    describe_activations,
)
from toolkit.models.decoders import sliding_window
from toolkit.models.lora import share_inputs
from toolkit.models.read_model import read_model
from toolkit.models.shape import MASKS, MATH, CountedActivations
from toolkit.plan.planned_job import with_attention

BATCH, LENGTH = 2, 96
EXPERTS_80 = EXPERTS | {"moe_intermediate_size": 80}
HEAD_32 = WIDE | {"head_dim": 32}
OPT = WIDE | {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0, "max_position_embeddings": 4096}
GPT2 = {"vocab_size": 96, "n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": 4096}
# Every architecture with formulas, then the options that change what its layers save.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama-biases": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite": ("granite", WIDE),
    "smollm3": ("smollm3", WIDE),
    "mistral": ("mistral", HEAD_32),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", HEAD_32),
    "gemma": ("gemma", HEAD_32),
    "gemma2": ("gemma2", HEAD_32),
    "gemma3": ("gemma3_text", HEAD_32 | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("qwen2_moe", WIDE | EXPERTS_80 | {"shared_expert_intermediate_size": 96}),
    "qwen3-moe": ("qwen3_moe", HEAD_32 | EXPERTS_80),
    "qwen3-moe-dense-layer": ("qwen3_moe", HEAD_32 | EXPERTS_80 | {"mlp_only_layers": [1]}),
    "gpt2": ("gpt2", GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2-dropout": ("gpt2", GPT2),
    "gpt-neox": ("gpt_neox", WIDE),
    "olmo": ("olmo", WIDE),
    "olmo2": ("olmo2", WIDE),
    "opt": ("opt", OPT),
    "opt-gelu-dropout": ("opt", OPT | {"dropout": 0.1, "activation_function": "gelu"}),
    "phi": ("phi", WIDE),
    "phi3": ("phi3", WIDE),
    "stablelm": ("stablelm", WIDE | {"num_key_value_heads": 4}),
}


@pytest.mark.nightly  # counting takes 5 to 15 s each
@pytest.mark.filterwarnings("ignore")  # of transformers and peft, for people who train
@pytest.mark.parametrize("name", MODELS)
def test_formulas_agree_with_the_counting(name: str, tmp_path: Path) -> None:
    """Under bf16 and autocast, full and LoRA of two ranks, with every mask that the model has."""
    path = config_file(tmp_path, *MODELS[name])
    model = built(path)
    rows = describe_activations(model.config, _kind_of_each_layer(model))["activations"]
    shape, counted = read_model(str(path)), CountedActivations.read(rows, RANKS[0])
    masks = [mask for mask in MASKS if (False, False, mask) in counted.saved]
    for autocast, lora_r, mask in itertools.product((False, True), (None, 8, 24), masks):
        case = (name, f"autocast={autocast}", f"lora_r={lora_r}", mask)
        formula = Activations(shape=shape, autocast=autocast, lora_r=lora_r).saved(mask)
        found = counted.at(autocast=autocast, lora_r=lora_r, mask=mask)
        for length in (32, 2048):
            # Partial rotary embeddings are counted as full ones: some bytes per token, once for all layers.
            slack = 2 * (4 if autocast else 2) * shape.head_dim if shape.model_type in PARTIAL_ROTARY else 0
            layers = formula.layers.token_bytes(length), found.layers.token_bytes(length)
            assert layers[0] == pytest.approx(layers[1], rel=0.0025, abs=slack), case
            peaks = [
                part.largest_layer.token_bytes(length) + max(0, part.backward.token_bytes(length))
                for part in (formula, found)
            ]
            assert peaks[0] == pytest.approx(peaks[1], rel=0.2), case
        # Position indices and, for mixtures, a few fixed bytes are not in the formulas.
        assert formula.outer.per_token == pytest.approx(found.outer.per_token, abs=8), case
        assert formula.layers.fixed == pytest.approx(found.layers.fixed, rel=0.04, abs=16_384), case
        assert formula.logit_bytes == found.logit_bytes, case
        if len(shape.layer_kinds) == 1 and shape.model_type not in TWO_ROTARY_EMBEDDINGS:
            largest = formula.largest_layer, found.largest_layer
            assert largest[0].per_token == pytest.approx(largest[1].per_token, rel=0.0025), case
            assert largest[0].per_position == pytest.approx(largest[1].per_position), case


def test_a_storage_that_does_not_double_with_its_row_is_fitted_over_three_lengths() -> None:
    even = [{0: 64, 1: 4 * ROWS * n, 2: 2 * ROWS * n * n} for n in LENGTHS]
    odd = [{0: 7 + 3 * ROWS * n} for n in LENGTHS]
    assert _fit(even[:2]) == _fit(even) == [64, 4, 2.0]
    assert _fit_two(*odd[:2]) is None
    assert _fit(odd) == [7, 3, 0.0]


def saved_bytes(path: Path, *, autocast: bool, padded: bool, lora_r: int | None = None, math: bool = False) -> int:
    """Bytes of the storages that one forward of a real model saves, without parameters and buffers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent), dtype=torch.float32)
    if lora_r is not None:
        lora = LoraConfig(r=lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model.to(torch.bfloat16), lora, autocast_adapter_dtype=autocast)
        share_inputs(model)
    model = model.train() if autocast else model.to(torch.bfloat16).train()
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0 if padded else 1
    compute = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    kernels = sdpa_kernel([SDPBackend.MATH] if math else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    with saved_storages((*model.parameters(), *model.buffers())) as saved, compute, kernels:
        model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False)
    return sum(saved.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("name", "autocast", "padded", "lora_r", "math"),
    [
        ("llama", False, True, None, False),
        ("qwen3", True, True, None, False),
        ("gemma2", True, False, None, False),
        ("mixtral", True, False, None, False),
        ("opt", False, False, None, False),
        ("llama", True, False, 8, False),
        ("llama", False, False, None, True),  # bf16 on a GPU without bf16 units has no fused kernel
    ],
)
def test_formulas_agree_with_the_tensors_that_a_real_layer_saves(
    name: str, autocast: bool, padded: bool, lora_r: int | None, math: bool, tmp_path: Path
) -> None:
    """Bytes per token that one more layer saves, with the copies of its weights."""
    model_type, fields = MODELS[name]
    saved, planned = [], []
    for layers in (2, 3):
        config = config_file(tmp_path / str(layers), model_type, fields | {"num_hidden_layers": layers})
        saved.append(saved_bytes(config, autocast=autocast, padded=padded, lora_r=lora_r, math=math))
        shape = with_attention(read_model(str(config)), MATH) if math else read_model(str(config))
        formulas = Activations(shape=shape, autocast=autocast, lora_r=lora_r)
        planned.append(formulas.saved("padding" if padded else "none").layers)
    per_token = planned[1].token_bytes(LENGTH) - planned[0].token_bytes(LENGTH)
    one_layer = BATCH * LENGTH * per_token + planned[1].fixed - planned[0].fixed
    assert one_layer == pytest.approx(saved[1] - saved[0], rel=0.03)


def test_rows_as_long_as_the_sliding_window_have_a_mask(tmp_path: Path) -> None:
    fields = HEAD_32 | {"sliding_window": 512}
    shape = read_model(str(config_file(tmp_path, "gemma3_text", fields)))
    activations = Activations(shape=shape)
    assert shape.num_sliding_layers == shape.num_layers  # every sixth layer is full, and there are fewer
    assert [activations.mask_at(length, padded=False) for length in (511, 512)] == ["none", "window"]
    assert activations.mask_at(511, padded=True) == "padding"
    plain, window, padding = (activations.saved(mask).layers for mask in MASKS[:1] + MASKS[:0:-1])
    assert window.token_bytes(512) == padding.token_bytes(512) > plain.token_bytes(512)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {}, (4096, 12)),
        ("mistral", {"sliding_window": None}, (None, 0)),
        ("gemma2", {"sliding_window": 4096}, (4096, 6)),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 9}, (4096, 3)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, (4096, 8)),
        ("phi3", {"sliding_window": 2047}, (2047, 12)),
        ("llama", {"sliding_window": 2047}, (None, 0)),
    ],
)
def test_sliding_windows_are_read(model_type: str, fields: dict[str, Any], expected: tuple[int | None, int]) -> None:
    assert sliding_window(model_type, ConfigFields(fields, "config.json"), num_layers=12) == expected

"""Activation bytes of the plan, held against the tensors that real models save for their backward."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from test_models import EXPERTS, TINY, config_file

from toolkit.models.fields import Fields
from toolkit.models.read import _counted_shape, read_model
from toolkit.models.windows import window_of
from toolkit.plan.activations import Activations
from toolkit.plan.job import LOSSES
from toolkit.plan.logits import logits_bytes

BATCH, LENGTH = 2, 96
WIDE = TINY | {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": WIDE | {"head_dim": 32},
    "qwen2": WIDE,
    "qwen3": WIDE | {"head_dim": 32},
    "gemma": WIDE | {"head_dim": 32},
    "gemma2": WIDE | {"head_dim": 32},
    "gemma3_text": WIDE | {"head_dim": 32},
    "mixtral": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": WIDE | EXPERTS | {"head_dim": 32, "moe_intermediate_size": 80},
    "gpt_neox": WIDE,
    "olmo": WIDE,
    "olmo2": WIDE,
    "opt": WIDE | {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0},
    "phi": WIDE,
    "phi3": WIDE,
    "stablelm": WIDE | {"num_key_value_heads": 4},
}


def saved_bytes(path: Path, *, autocast: bool, padded: bool, lora_r: int | None = None) -> int:
    """Bytes of the storages that one forward saves, without parameters and what is computed once for all layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent), dtype=torch.float32)
    if lora_r is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora_r, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = model.train() if autocast else model.to(torch.bfloat16).train()
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    kept: list[Any] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    tokens = torch.randint(1, 90, (BATCH, LENGTH))
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0 if padded else 1
    mode = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False)
    return sum(storages.values())


def of_one_layer(folder: Path, model_type: str, **how: Any) -> float:
    """Bytes a token that one more layer saves."""
    sizes = []
    for layers in (2, 3):
        fields = MODELS[model_type] | {"num_hidden_layers": layers}
        sizes.append(saved_bytes(config_file(folder / str(layers), model_type, fields), **how))
    return (sizes[1] - sizes[0]) / (BATCH * LENGTH)


def planned(folder: Path, *, autocast: bool, padded: bool, lora_r: int | None = None) -> float:
    """The same, by arithmetic: bf16 copies of a layer's weights are shared by its tokens."""
    two, three = (
        Activations(shape=read_model(str(folder / str(layers))), autocast=autocast, lora_r=lora_r) for layers in (2, 3)
    )
    tokens = three.layer_bytes_per_token(seq_length=LENGTH, padded=padded)
    return tokens + (three.fixed_bytes - two.fixed_bytes) / (BATCH * LENGTH)


# All of them, with and without padding: benchmarks/activations.py.
CASES = [
    ("llama", False, True),
    ("llama", True, False),
    ("qwen3", True, True),
    ("gemma2", True, False),
    ("mixtral", True, False),
    ("gpt_neox", True, False),
    ("olmo2", False, True),
    ("opt", False, False),
    ("stablelm", True, True),
]


@pytest.mark.parametrize(("model_type", "autocast", "padded"), CASES)
def test_a_layer_keeps_what_the_plan_says(model_type: str, autocast: bool, padded: bool, tmp_path: Path) -> None:
    real = of_one_layer(tmp_path, model_type, autocast=autocast, padded=padded)
    assert planned(tmp_path, autocast=autocast, padded=padded) == pytest.approx(real, rel=0.02)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("model_type", "autocast"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_a_layer_with_adapters_keeps_what_the_plan_says(model_type: str, autocast: bool, tmp_path: Path) -> None:
    real = of_one_layer(tmp_path, model_type, autocast=autocast, padded=False, lora_r=8)
    assert planned(tmp_path, autocast=autocast, padded=False, lora_r=8) == pytest.approx(real, rel=0.03)


def test_what_is_counted_on_fake_tensors_is_what_the_formulas_say(tmp_path: Path) -> None:
    path = config_file(tmp_path, "mistral", WIDE | {"sliding_window": LENGTH, "num_hidden_layers": 40})
    counted, known = _counted_shape(path), read_model(str(path))
    assert counted.kept is not None, counted.why_not_kept
    for autocast, lora_r, padded, length in itertools.product((False, True), (None, 24), (False, True), (32, 2048)):
        how = {"seq_length": length, "padded": padded}
        both = [Activations(shape=shape, autocast=autocast, lora_r=lora_r) for shape in (counted, known)]
        real, formula = (activations.all_layers_bytes_per_token(**how) for activations in both)
        # Below frozen layers nothing is kept for the first input's gradient, which the formulas count.
        assert formula == pytest.approx(real, rel=0.005 if lora_r is None else 0.02), (autocast, lora_r, how)
        assert both[1].layer_bytes_per_token(**how) == pytest.approx(both[0].layer_bytes_per_token(**how), rel=0.02)


def test_experts_with_adapters_are_kept_merged_and_autocasts_copies_of_what_is_frozen_are_not_cached(
    tmp_path: Path,
) -> None:
    shape = read_model(str(config_file(tmp_path, "mixtral", MODELS["mixtral"] | {"num_hidden_layers": 1})))
    experts, linear = 4 * 3 * 352 * 128, 2 * 128 * 128 + 2 * 32 * 128
    in_bf16, under_autocast = (Activations(shape=shape, lora_r=4, autocast=autocast) for autocast in (False, True))
    assert in_bf16.fixed_bytes == 2 * experts
    assert under_autocast.fixed_bytes == 4 * experts + 2 * linear
    assert Activations(shape=shape, autocast=True).fixed_bytes == 2 * linear
    assert Activations(shape=shape, autocast=True).caches_copies
    assert not under_autocast.caches_copies


def test_rows_as_long_as_a_window_have_a_mask(tmp_path: Path) -> None:
    shape = read_model(str(config_file(tmp_path, "gemma3_text", MODELS["gemma3_text"] | {"sliding_window": 512})))
    activations = Activations(shape=shape)
    plain, masked = (activations.all_layers_bytes_per_token(seq_length=512, padded=padded) for padded in (False, True))
    assert shape.num_sliding_layers == shape.num_layers  # every sixth is full, and there are fewer
    assert plain == masked > activations.all_layers_bytes_per_token(seq_length=511)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {}, (4096, 12)),
        ("mistral", {"sliding_window": None}, (None, 0)),
        ("gemma2", {"sliding_window": 4096}, (4096, 6)),
        ("gemma3_text", {"sliding_window": 1024}, (1024, 10)),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 9}, (4096, 3)),
        ("qwen2", {"sliding_window": 4096}, (None, 0)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, (4096, 8)),
        ("phi3", {"sliding_window": 2047}, (2047, 12)),
        ("llama", {"sliding_window": 2047}, (None, 0)),
    ],
)
def test_windows_are_read_as_transformers_reads_them(
    model_type: str, fields: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    assert window_of(model_type, Fields(fields, "config.json"), layers=12) == expected


def test_llamas_terms_by_hand(tmp_path: Path) -> None:
    shape = read_model(str(config_file(tmp_path, "llama", WIDE)))
    # 16·128 + 4·(128 + 32) + 8·352 + 4·8 + 8
    assert Activations(shape=shape).layer_bytes_per_token(seq_length=LENGTH) == 5544
    assert Activations(shape=shape, autocast=True).checkpoint_bytes_per_token == 4 * 128


def test_full_cross_entropy_takes_twelve_bytes_a_logit_and_others_less() -> None:
    peaks = {loss: max(logits_bytes(loss=loss, tokens=4096, vocab_size=32000, hidden_size=4096)) for loss in LOSSES}
    assert peaks["full"] == 12 * 4096 * 32000
    assert peaks["full"] > peaks["chunked"] > peaks["fused"]

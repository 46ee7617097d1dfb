"""The numerics contract (docs/concepts/numerics.md) in bf16, which every preset uses on a GPU.

Trained weights are fp32 masters with fp32 optimizer states, frozen ones are held once, in the compute dtype.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import attested_ranks, losses, nightly, rank_rows, read
from random_models import random_llama
from safetensors.torch import load_file

from toolkit.checkpoint.hf_export import export, verify
from toolkit.compare.parity import FIRST_LOSS_FLOOR, LOSS_CURVE_FLOOR
from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset

pytestmark = pytest.mark.launch

P, EMBEDDING, LAYER = 336_192, 4096 * 64, 36_992
ADAPTERS = 8_192  # rank 4: per layer 512 for q and o each, 384 for k and v, 768 for gate, up and down
FROZEN = EMBEDDING + LAYER
# Parameters, gradients and optimizer states of each of two ranks: DeepSpeed keeps bf16 parameters and fp32 masters, and
# ZeRO-3 keeps norms gathered; under DDP and FSDP2 the fp32 parameter is its own master.
BF16_BYTES = {
    "ddp": (4 * P, 4 * P, 8 * P),
    "zero2": (2 * P, 2 * P // 2, 12 * P // 2),
    "zero3": (2 * P // 2 + 2 * 5 * 64, 2 * P // 2, 12 * P // 2),
    "fsdp2": (4 * P // 2, 4 * P // 2, 8 * P // 2),
}
REDUCE_DTYPE = {"ddp": "float32", "zero2": "bfloat16", "zero3": "bfloat16", "fsdp2": "bfloat16"}
LORA_BYTES = {"ddp": 2 * P + 4 * ADAPTERS, "zero2": 2 * (P + ADAPTERS)}
# What each of two ranks holds, and the dtype of the final model.
FREEZE_PRESETS = {
    "ddp": (2 * FROZEN + 4 * (P - FROZEN), "float32"),
    "zero3": (None, "bfloat16"),
    "fsdp2": (FROZEN + 2 * (P - FROZEN), "float32"),
}
FULL = ("--bf16", "true", "--activation_checkpointing", "true", "--save_model", "false")
LORA = ("--bf16", "true", "--lora_r", "4")
FREEZE = ("--bf16", "true", "--neftune_noise_alpha", "5", "--freeze", "model.embed_tokens.*", "model.layers.0.*")
BF16_ROUNDING = 2**-8
Start = Callable[..., Path]


def assert_same_losses(folder: Path, baseline: Path) -> None:
    own, expected = losses(folder), losses(baseline)
    # accelerate's policy for FSDP2 rounds the loss itself to bf16 (`output_dtype`).
    floor = BF16_ROUNDING if folder.name.startswith("fsdp2") else FIRST_LOSS_FLOOR["bfloat16"]
    assert own[0] == pytest.approx(expected[0], rel=floor)
    assert own == pytest.approx(expected, rel=LOSS_CURVE_FLOOR["bfloat16"])


@pytest.mark.parametrize("preset", ["ddp", *nightly("zero2", "zero3", "fsdp2")])
def test_master_weights_and_optimizer_states_are_fp32_under_bf16_compute(start: Start, preset: str) -> None:
    folder = start(preset, *FULL)
    for rank in attested_ranks(folder):
        dtypes = [rank[f"{name}_dtype"] for name in ("compute", "master", "optimizer", "reduce")]
        assert dtypes == ["bfloat16", "float32", "float32", REDUCE_DTYPE[preset]]
        assert tuple(rank[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer")) == BF16_BYTES[preset]
        assert rank["activation_checkpointing"] is True
        assert rank["initial_weights_sha256"] == attested_ranks(start("ddp", *FULL))[0]["initial_weights_sha256"]
    own, expected = ([rank_rows(run, rank)[0]["loss"] for rank in range(2)] for run in (folder, start("ddp", *FULL)))
    if preset == "fsdp2":  # accelerate rounds its loss to bf16: near 8.3 to multiples of 1/16
        expected = [torch.tensor(loss).bfloat16().item() for loss in expected]
    assert own == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("preset", ["fsdp2", *nightly("ddp", "zero2", "zero3")])
def test_a_lora_base_is_held_once_in_bf16_as_planned(start: Start, preset: str, tiny_model: Path) -> None:
    folder, weights = start(preset, *LORA), job_weights(read_model(str(tiny_model)), 4)
    for number, rank in enumerate(attested_ranks(folder)):
        dtypes = [rank[f"{name}_dtype"] for name in ("compute", "frozen", "master", "optimizer")]
        assert dtypes == ["bfloat16", "bfloat16", "float32", "float32"]
        engine = engine_settings(load_preset(preset), world_size=2, hidden_size=64, rank=number)
        assert rank["parameter_bytes"] == model_states(engine, weights).parameter_bytes
        assert rank["parameter_bytes"] == LORA_BYTES.get(preset, rank["parameter_bytes"]) < 2.1 * P
    saved = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == ADAPTERS
    held = "torch.bfloat16" if preset.startswith("zero") else "torch.float32"
    assert {str(tensor.dtype) for tensor in saved.values()} == {held}
    assert_same_losses(folder, start("ddp", *LORA))


@pytest.mark.parametrize("preset", nightly("fsdp2", "ddp", "zero3"))
def test_frozen_weights_do_not_change_and_all_others_do(start: Start, preset: str, tiny_model: Path) -> None:
    folder, (parameter_bytes, dtype) = start(preset, *FREEZE), FREEZE_PRESETS[preset]
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model, folder))
    frozen = {name for name in before if name == "model.embed_tokens.weight" or "layers.0." in name}
    # Near 1, where norms begin, bf16 has no smaller step than 2**-8, so fp32 weights are compared as they are.
    same = {name for name in before if torch.equal(after[name], before[name].bfloat16().to(after[name].dtype))}
    assert (same, len(frozen)) == (frozen, 10)
    assert {str(tensor.dtype) for tensor in after.values()} == {f"torch.{dtype}"}
    assert read(folder / "config.json")["dtype"] == dtype
    for rank in attested_ranks(folder):
        assert (rank["num_params"], rank["num_trainable_params"]) == (P, P - FROZEN)
        assert (rank["frozen_dtype"], rank["master_dtype"]) == ("bfloat16", "float32")
        assert parameter_bytes in (rank["parameter_bytes"], None)
        assert rank["neftune_noise_alpha"] == 5
    assert_same_losses(folder, start("ddp", *FREEZE))


@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), ("--lora_r", "4")])
def test_zero3_is_verified_where_it_keeps_each_small_layer_gathered(
    start: Start, words: tuple[str, ...], tmp_path: Path, tokenizer: Any
) -> None:
    sizes = {"hidden_size": 16, "head_dim": 2, "intermediate_size": 8, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = random_llama(tmp_path / "model", tokenizer, **sizes, **heads, max_position_embeddings=512)
    folder = start("zero3", "--model_name_or_path", str(model), "--save_model", "false", *words)
    # Each tensor of a layer, and of an adapter, has at most 10 x 16 elements: only the embedding is released.
    for rank in attested_ranks(folder):
        gathered = rank["num_params"] - 49_152 * 16
        assert rank["parameter_bytes"] == 4 * (49_152 * 16 // 2 + gathered // 2 + gathered)


@pytest.mark.nightly
def test_a_checkpoint_of_both_dtypes_resumes_and_is_exported_in_one(start: Start, tmp_path: Path) -> None:
    whole = start("fsdp2", *FREEZE, "--save_strategy", "steps", "--save_steps", "2")
    checkpoint = whole / "checkpoint-2"
    resumed = start("fsdp2", *FREEZE, "--save_model", "false", "--resume_from_checkpoint", str(checkpoint))
    assert losses(resumed) == losses(whole)[2:]
    export(checkpoint, tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in exported.values()} == {"torch.float32"}
    assert verify(tmp_path / "model").sound

"""Frozen weights in the compute dtype, trained ones in fp32: LoRA and `--freeze` in bf16 on two CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, losses, read

from toolkit.checkpoint.hf_export import export
from toolkit.checkpoint.verify import verify
from toolkit.compare.parity import FIRST_LOSS_FLOOR, LOSS_CURVE_FLOOR
from toolkit.models.read_model import read_model
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.model_states import job_weights, model_states
from toolkit.presets import load_preset

pytestmark = pytest.mark.launch

P, EMBEDDING, LAYER = 3_219_776, 49_152 * 64, 36_992
ADAPTERS = 8_192  # rank 4: per layer 512 for q and o each, 384 for k and v, 768 for gate, up and down
FROZEN = EMBEDDING + LAYER
PARAMETER_BYTES = {"ddp": 2 * P + 4 * ADAPTERS, "zero2": 2 * (P + ADAPTERS)}
LORA_PRESETS = (*PARAMETER_BYTES, "zero3", "fsdp2")
FREEZE = ["--freeze", "model.embed_tokens.*", "model.layers.0.*"]
# What each of two ranks holds, and the dtype of the final model.
FREEZE_PRESETS = {
    "ddp": (2 * FROZEN + 4 * (P - FROZEN), "float32"),
    "zero3": (None, "bfloat16"),
    "fsdp2": (FROZEN + 2 * (P - FROZEN), "float32"),
}
BF16_ROUNDING = 2**-8
Start = Callable[..., Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Start:
    """Return a function that trains three steps in bf16 under a preset with more arguments."""

    def run(preset: str, *words: str) -> Path:
        folder = tmp_path_factory.mktemp("frozen") / preset
        job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        job += ["--max_steps", "3", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--bf16", "true"]
        job += ["--output_dir", str(folder), *words]
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *job)
        assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return folder

    return run


@pytest.fixture(scope="module")
def lora_runs(start: Start) -> dict[str, Path]:
    job = ["--lora_r", "4", "--save_strategy", "no"]
    return {preset: start(preset, *job) for preset in LORA_PRESETS}


@pytest.fixture(scope="module")
def freeze_runs(start: Start) -> dict[str, Path]:
    """Only that of FSDP2 saves a checkpoint, to be resumed."""
    job = [*FREEZE, "--neftune_noise_alpha", "5", "--save_steps", "2", "--save_strategy"]
    return {preset: start(preset, *job, "steps" if preset == "fsdp2" else "no") for preset in FREEZE_PRESETS}


def ranks(folder: Path) -> list[dict[str, Any]]:
    attestation = read(folder / "attestation.json")
    assert attestation["verdict"] == "attested"
    facts: list[dict[str, Any]] = attestation["ranks"]
    return facts


def assert_same_losses(folder: Path, baseline: Path) -> None:
    own, expected = losses(folder), losses(baseline)
    # accelerate's policy for FSDP2 rounds the loss itself to bf16 (`output_dtype`).
    floor = BF16_ROUNDING if folder.name.startswith("fsdp2") else FIRST_LOSS_FLOOR["bfloat16"]
    assert own[0] == pytest.approx(expected[0], rel=floor)
    assert own == pytest.approx(expected, rel=LOSS_CURVE_FLOOR["bfloat16"])


@pytest.mark.parametrize("preset", LORA_PRESETS)
def test_a_lora_base_is_held_once_in_bf16_as_planned(lora_runs: dict[str, Path], preset: str, tiny_model: Path) -> None:
    weights = job_weights(read_model(str(tiny_model)), 4)
    for number, rank in enumerate(ranks(lora_runs[preset])):
        dtypes = [rank[f"{name}_dtype"] for name in ("compute", "frozen", "master", "optimizer")]
        assert dtypes == ["bfloat16", "bfloat16", "float32", "float32"]
        engine = engine_settings(load_preset(preset), world_size=2, hidden_size=64, rank=number)
        assert rank["parameter_bytes"] == model_states(engine, weights).parameter_bytes
        assert rank["parameter_bytes"] == PARAMETER_BYTES.get(preset, rank["parameter_bytes"]) < 2.1 * P


@pytest.mark.parametrize("preset", LORA_PRESETS)
def test_only_adapters_are_saved_in_the_dtype_in_which_the_engine_holds_them(
    lora_runs: dict[str, Path], preset: str
) -> None:
    from safetensors.torch import load_file

    saved = load_file(lora_runs[preset] / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == ADAPTERS
    dtype = "torch.bfloat16" if preset.startswith("zero") else "torch.float32"
    assert {str(tensor.dtype) for tensor in saved.values()} == {dtype}


@pytest.mark.parametrize("preset", LORA_PRESETS[1:])
def test_lora_on_a_bf16_base_has_ddps_losses(lora_runs: dict[str, Path], preset: str) -> None:
    assert_same_losses(lora_runs[preset], lora_runs["ddp"])


@pytest.mark.parametrize("preset", FREEZE_PRESETS)
def test_frozen_weights_do_not_change_and_all_others_do(
    freeze_runs: dict[str, Path], preset: str, tiny_model: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    folder, (parameter_bytes, dtype) = freeze_runs[preset], FREEZE_PRESETS[preset]
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model, folder))
    frozen = {name for name in before if name == "model.embed_tokens.weight" or "layers.0." in name}
    # Near 1, where norms begin, bf16 has no smaller step than 2**-8, so fp32 weights are compared as they are.
    same = {name for name in before if torch.equal(after[name], before[name].bfloat16().to(after[name].dtype))}
    assert (same, len(frozen)) == (frozen, 10)
    assert {str(tensor.dtype) for tensor in after.values()} == {f"torch.{dtype}"}
    assert read(folder / "config.json")["dtype"] == dtype
    for rank in ranks(folder):
        assert (rank["num_params"], rank["num_trainable_params"]) == (P, P - FROZEN)
        assert (rank["frozen_dtype"], rank["master_dtype"]) == ("bfloat16", "float32")
        assert parameter_bytes in (rank["parameter_bytes"], None)
        assert rank["neftune_noise_alpha"] == 5


@pytest.mark.parametrize("preset", list(FREEZE_PRESETS)[1:])
def test_a_partly_trained_model_has_ddps_losses(freeze_runs: dict[str, Path], preset: str) -> None:
    assert_same_losses(freeze_runs[preset], freeze_runs["ddp"])


def test_a_checkpoint_of_both_dtypes_resumes_and_is_exported_in_one(
    freeze_runs: dict[str, Path], start: Start, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    checkpoint = freeze_runs["fsdp2"] / "checkpoint-2"
    again = ["--save_strategy", "no", "--save_model", "false", "--resume_from_checkpoint", str(checkpoint)]
    resumed = start("fsdp2", *FREEZE, "--neftune_noise_alpha", "5", *again)
    assert losses(resumed) == losses(freeze_runs["fsdp2"])[2:]
    export(checkpoint, tmp_path / "model")
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {
        "torch.float32"
    }
    assert verify(tmp_path / "model").sound

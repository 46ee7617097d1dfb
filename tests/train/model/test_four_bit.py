"""QLoRA with sharded 4-bit weights on two CPU ranks: bytes, losses, resume, and an adapter that loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, losses, read

from toolkit.models.read_model import read_model
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.model_states import job_weights, model_states
from toolkit.presets import load_preset
from toolkit.versions import is_importable

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed"),
]
LORA_R = 4
SHARDED = ("fsdp2", "zero3")
REPLICATED = ("ddp", "zero2")
# zero3 also keeps tensors of up to ten times the hidden size gathered: the four weights of attention in each of two
# layers, packed into 512, 256, 256 and 512 fp32 numbers.
GATHERED_BYTES = {"zero3": 2 * 4 * (512 + 256 + 256 + 512)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """Three steps under each preset, and the last one again from a checkpoint; fp32, so that losses compare closely."""
    folder = tmp_path_factory.mktemp("qlora")
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "3", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
    words += ["--lora_r", str(LORA_R), "--load_in_4bit", "true"]
    saves = ["--save_steps", "2"]
    cases = {preset: ["--save_strategy", "no", "--save_model", "false"] for preset in REPLICATED}
    for preset in SHARDED:
        cases[preset] = saves
        resumed = ["--resume_from_checkpoint", str(folder / preset / "checkpoint-2")]
        cases[f"{preset}-resumed"] = [*resumed, "--save_strategy", "no", "--save_model", "false"]
    for case, more in cases.items():
        config = ROOT / "accelerate_configs" / f"{case.removesuffix('-resumed')}.yaml"
        ended = accelerate_launch(config, *words, *more, "--output_dir", str(folder / case))
        assert ended.returncode == 0, f"{case}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {case: folder / case for case in cases}


def ranks(folder: Path) -> list[dict[str, Any]]:
    attestation = read(folder / "attestation.json")
    assert attestation["verdict"] == "attested"
    found: list[dict[str, Any]] = attestation["ranks"]
    return found


@pytest.mark.parametrize("preset", SHARDED)
def test_each_rank_holds_half_of_the_4_bit_weights_and_all_constants(runs: dict[str, Path], preset: str) -> None:
    (whole, _), sharded = ranks(runs["ddp"]), ranks(runs[preset])
    for rank in sharded:
        assert 2 * (rank["quantized_bytes"] - GATHERED_BYTES.get(preset, 0)) == whole["quantized_bytes"]
        assert rank["quantization_constant_bytes"] == whole["quantization_constant_bytes"]
        assert rank["quantized_storage_dtype"] == "float32"
        assert rank["num_params"] == whole["num_params"]
        assert rank["initial_weights_sha256"] == whole["initial_weights_sha256"]
    assert sum(rank["quantized_bytes"] for rank in sharded) >= whole["quantized_bytes"]


@pytest.mark.parametrize("preset", [*REPLICATED, *SHARDED])
def test_planned_bytes_are_those_that_rank_0_holds(runs: dict[str, Path], preset: str, tiny_model: Path) -> None:
    shape = read_model(str(tiny_model))
    engine = engine_settings(load_preset(preset), world_size=2, hidden_size=shape.hidden_size, mixed_precision="no")
    planned = model_states(engine, job_weights(shape, LORA_R, True, element_bytes=4))
    assert ranks(runs[preset])[0]["parameter_bytes"] == planned.parameter_bytes


def test_a_replicated_base_is_held_in_4_bits_by_each_rank(runs: dict[str, Path]) -> None:
    for rank in ranks(runs["zero2"]):
        assert (rank["load_in_4bit"], rank["master_dtype"]) == (True, "float32")
        assert rank["parameter_bytes"] < 4 * rank["num_params"]


@pytest.mark.parametrize("preset", [*SHARDED, "zero2"])
def test_losses_are_those_of_replicated_qlora(runs: dict[str, Path], preset: str) -> None:
    assert losses(runs[preset]) == pytest.approx(losses(runs["ddp"]), rel=1e-5)


@pytest.mark.parametrize("preset", SHARDED)
def test_a_resumed_run_repeats_the_last_step_bit_for_bit(runs: dict[str, Path], preset: str) -> None:
    assert losses(runs[f"{preset}-resumed"]) == losses(runs[preset])[2:]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("has_avx512bf16", [False, True])
@pytest.mark.parametrize("preset", SHARDED)
def test_the_adapter_on_a_base_in_4_bits_has_the_live_models_logits(
    runs: dict[str, Path], preset: str, has_avx512bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both kinds of CPU: with AVX512-BF16, bitsandbytes would repack the weights in evaluation."""
    from toolkit.checkpoint.verify import verify

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: has_avx512bf16)
    result = verify(runs[preset])
    assert result.problems == []
    assert result.four_bit_matmul == "dequantized"
    assert result.max_difference is not None
    assert result.max_difference < 1e-4

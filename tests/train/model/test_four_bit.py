"""QLoRA with sharded 4-bit weights on two CPU ranks: bytes, losses, resume, and an adapter that loads again."""

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import attested_ranks, losses

from toolkit.checkpoint.hf_export import verify
from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.versions import is_importable

pytestmark = [pytest.mark.launch, pytest.mark.nightly]
pytestmark += [pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")]
LORA_R = 4
SHARDED = ("fsdp2", "zero3")
PRESETS = ["zero2", *SHARDED]
# zero3 also keeps tensors of up to ten times the hidden size gathered: the four weights of attention in each of two
# layers, packed into 512, 256, 256 and 512 fp32 numbers.
GATHERED_BYTES = {"zero3": 2 * 4 * (512 + 256 + 256 + 512)}
JOB = ("--lora_r", str(LORA_R), "--load_in_4bit", "true")  # fp32, so that losses compare closely
Start = Callable[..., Path]


def run_of(start: Start, preset: str) -> Path:
    saves = ("--save_strategy", "steps", "--save_steps", "2") if preset in SHARDED else ("--save_model", "false")
    return start(preset, *JOB, *saves)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_rank_holds_planned_4_bit_weights_with_ddps_losses(start: Start, preset: str, tiny_model: Path) -> None:
    folder, baseline, shape = run_of(start, preset), run_of(start, "ddp"), read_model(str(tiny_model))
    whole, *_ = attested_ranks(baseline)
    for rank in attested_ranks(folder):
        assert (rank["load_in_4bit"], rank["master_dtype"]) == (True, "float32")
        assert rank["parameter_bytes"] < 4 * rank["num_params"]
        for same in ("quantization_constant_bytes", "num_params", "initial_weights_sha256"):
            assert rank[same] == whole[same]
        if preset in SHARDED:
            assert 2 * (rank["quantized_bytes"] - GATHERED_BYTES.get(preset, 0)) == whole["quantized_bytes"]
            assert rank["quantized_storage_dtype"] == "float32"
    engine = engine_settings(load_preset(preset), world_size=2, hidden_size=shape.hidden_size, mixed_precision="no")
    planned = model_states(engine, job_weights(shape, LORA_R, True, element_bytes=4))
    assert attested_ranks(folder)[0]["parameter_bytes"] == planned.parameter_bytes
    assert losses(folder) == pytest.approx(losses(baseline), rel=1e-5)


@pytest.mark.parametrize("preset", PRESETS[-2:])
def test_a_resumed_run_repeats_the_last_step_bit_for_bit(start: Start, preset: str) -> None:
    whole = run_of(start, preset)
    checkpoint = str(whole / "checkpoint-2")
    resumed = start(preset, *JOB, "--save_model", "false", "--resume_from_checkpoint", checkpoint)
    assert losses(resumed) == losses(whole)[2:]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("has_avx512bf16", [False, True])
@pytest.mark.parametrize("preset", PRESETS[-2:])
def test_the_adapter_on_4_bits_has_the_live_logits(
    start: Start, preset: str, has_avx512bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both kinds of CPU: with AVX512-BF16, bitsandbytes would repack the weights in evaluation."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: has_avx512bf16)
    result = verify(run_of(start, preset))
    assert (result.problems, result.four_bit_matmul) == ([], "dequantized")
    assert result.max_difference < 1e-4

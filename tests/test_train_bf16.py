"""The numerics contract in bf16, which every preset uses on a GPU: fp32 masters and states under bf16 compute."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, losses, read

pytestmark = pytest.mark.launch

P = 3_219_776  # of the tiny Llama, see test_train_presets.py
NORMS = 5 * 64
# DeepSpeed keeps bf16 parameters and fp32 masters; under DDP and FSDP2 the fp32 parameter is its own master.
HELD_BYTES = {
    "ddp": {"parameter": 4 * P, "gradient": 4 * P, "optimizer": 8 * P},
    "zero1": {"parameter": 2 * P, "gradient": 2 * P, "optimizer": 12 * P // 2},
    "zero2": {"parameter": 2 * P, "gradient": 2 * P // 2, "optimizer": 12 * P // 2},
    "zero3": {"parameter": 2 * P // 2 + 2 * NORMS, "gradient": 2 * P // 2, "optimizer": 12 * P // 2},
    "fsdp2": {"parameter": 4 * P // 2, "gradient": 4 * P // 2, "optimizer": 8 * P // 2},
}
REDUCE_DTYPE = {preset: "bfloat16" for preset in HELD_BYTES} | {"ddp": "float32"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """One short run a preset with `--bf16 true` on the CPU, recomputing activations."""
    folder = tmp_path_factory.mktemp("bf16")
    for preset in HELD_BYTES:
        words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--bf16", "true", "--save_model", "false"]
        words += ["--save_strategy", "no", "--activation_checkpointing", "true", "--output_dir", str(folder / preset)]
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words)
        assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {preset: folder / preset for preset in HELD_BYTES}


@pytest.mark.parametrize("preset", HELD_BYTES)
def test_masters_and_states_are_fp32_and_compute_is_bf16(runs: dict[str, Path], preset: str) -> None:
    for rank in read(runs[preset] / "attestation.json")["ranks"]:
        dtypes = [rank[f"{what}_dtype"] for what in ("compute", "master", "optimizer", "reduce")]
        assert dtypes == ["bfloat16", "float32", "float32", REDUCE_DTYPE[preset]]
        assert {part: rank[f"{part}_bytes"] for part in HELD_BYTES[preset]} == HELD_BYTES[preset]
        assert rank["activation_checkpointing"] is True


@pytest.mark.parametrize("preset", HELD_BYTES)
def test_the_first_loss_is_that_of_ddp_within_bf16(runs: dict[str, Path], preset: str) -> None:
    assert losses(runs[preset])[0] == pytest.approx(losses(runs["ddp"])[0], rel=1e-3)
    weights = {read(runs[p] / "attestation.json")["ranks"][0]["initial_weights_sha256"] for p in ("ddp", preset)}
    assert len(weights) == 1

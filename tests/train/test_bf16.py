"""The numerics contract (docs/concepts/numerics.md) in bf16, which every preset uses on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, losses, read
from tiny_model_bytes import BF16_BYTES

pytestmark = pytest.mark.launch

# Of zero1, which differs from zero2 in the bytes of its gradients, test_presets_trained.py checks the bytes.
REDUCE_DTYPE = {"ddp": "float32", "zero2": "bfloat16", "zero3": "bfloat16", "fsdp2": "bfloat16"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """One short run per preset with `--bf16 true` on the CPU, with activation checkpointing."""
    folder = tmp_path_factory.mktemp("bf16")
    for preset in REDUCE_DTYPE:
        words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        words += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--bf16", "true", "--save_model", "false"]
        words += ["--save_strategy", "no", "--activation_checkpointing", "true", "--output_dir", str(folder / preset)]
        ended = accelerate_launch(ROOT / "accelerate_configs" / f"{preset}.yaml", *words)
        assert ended.returncode == 0, f"{preset}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {preset: folder / preset for preset in REDUCE_DTYPE}


@pytest.mark.parametrize("preset", REDUCE_DTYPE)
def test_master_weights_and_optimizer_states_are_fp32_under_bf16_compute(runs: dict[str, Path], preset: str) -> None:
    for rank in read(runs[preset] / "attestation.json")["ranks"]:
        dtypes = [rank[f"{name}_dtype"] for name in ("compute", "master", "optimizer", "reduce")]
        assert dtypes == ["bfloat16", "float32", "float32", REDUCE_DTYPE[preset]]
        assert {part: rank[f"{part}_bytes"] for part in BF16_BYTES[preset]} == BF16_BYTES[preset]
        assert rank["activation_checkpointing"] is True


@pytest.mark.parametrize("preset", REDUCE_DTYPE)
def test_the_first_loss_equals_ddps_within_bf16_rounding(runs: dict[str, Path], preset: str) -> None:
    assert losses(runs[preset])[0] == pytest.approx(losses(runs["ddp"])[0], rel=1e-3)
    weights = {read(runs[p] / "attestation.json")["ranks"][0]["initial_weights_sha256"] for p in ("ddp", preset)}
    assert len(weights) == 1

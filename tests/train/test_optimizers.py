"""Optimizers other than AdamW on two CPU ranks: read back by their own name, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, losses, read

from toolkit.versions import is_importable

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed"),
]

P, NORMS = 3_219_776, 5 * 64
# A rank's flat partition of everything with weight decay: 8 bits for each moment and one fp32 scale per 256 elements.
DECAYED = (P - NORMS) // 2
BNB_BYTES = 4 * P // 2 + 2 * (DECAYED + 4 * DECAYED // 256) + 2 * 4 * NORMS // 2 + 2 * 4 * 256
# One row and one column of each matrix: q and o, k and v, gate, up and down; and the norms' own variance.
LAYER_ROWS_AND_COLUMNS = 2 * (64 + 64) + 2 * (32 + 64) + 3 * (128 + 64)
ADAFACTOR_BYTES = 4 * (49152 + 64 + 2 * LAYER_ROWS_AND_COLUMNS + NORMS)

# preset, optimizer -> class, dtypes of the states, bytes per rank
CASES = {
    ("zero3", "adamw_bnb_8bit"): ("bitsandbytes.AdamW", "float32+uint8", BNB_BYTES),
    ("ddp", "adafactor"): ("transformers.Adafactor", "float32", ADAFACTOR_BYTES),
}


@pytest.fixture
def words(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--max_steps", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
    return [*words, "--save_model", "false"]


@pytest.mark.parametrize(("preset", "optim"), CASES)
def test_an_optimizer_holds_its_own_states_and_resumes(
    preset: str, optim: str, words: list[str], tmp_path: Path
) -> None:
    config, words = ROOT / "accelerate_configs" / f"{preset}.yaml", [*words, "--optim", optim]
    saves = ["--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(tmp_path / "whole")]
    ended = accelerate_launch(config, *words, *saves)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    attestation = read(tmp_path / "whole" / "attestation.json")
    assert attestation["verdict"] == "attested"
    for rank in attestation["ranks"]:
        held = (rank["optimizer_class"], rank["optimizer_dtype"], rank["optimizer_bytes"])
        assert held == CASES[preset, optim]
    resumed = ["--save_strategy", "no", "--output_dir", str(tmp_path / "resumed")]
    resumed += ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]
    ended = accelerate_launch(config, *words, *resumed)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[2:]


def test_accelerates_replacement_of_an_offloaded_optimizer_is_detected(words: list[str], tmp_path: Path) -> None:
    config = ROOT / "accelerate_configs" / "zero3_cpu_offload.yaml"
    words += ["--optim", "adamw_bnb_8bit", "--output_dir", str(tmp_path / "out")]
    ended = accelerate_launch(config, *words, script="unsupported_optimizer.py")
    assert ended.returncode != 0
    assert "adam_w_mode on rank 0 is False, expected True" in ended.stderr
    ranks = read(tmp_path / "out" / "attestation.json")["ranks"]
    assert {(rank["optimizer_class"], rank["optimizer_dtype"]) for rank in ranks} == {
        ("deepspeed.DeepSpeedCPUAdam", "float32")
    }


def test_muon_orthogonalises_whole_matrices_where_fsdp2_shards_them(words: list[str], tmp_path: Path) -> None:
    found = {}
    for preset in ("ddp", "fsdp2"):
        config, output = ROOT / "accelerate_configs" / f"{preset}.yaml", tmp_path / preset
        job = [*words, "--optim", "muon", "--save_strategy", "no", "--output_dir", str(output)]
        ended = accelerate_launch(config, *job, script="muon_in_fp32.py")
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        found[preset] = losses(output)
        ranks = read(output / "attestation.json")["ranks"]
        assert {rank["optimizer_class"] for rank in ranks} == {"toolkit.MuonWithAdamW"}
        hidden = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
        assert sum(rank["optimizer_bytes"] for rank in ranks) == 4 * (2 * P - hidden) * (2 if preset == "ddp" else 1)
    assert found["fsdp2"] == pytest.approx(found["ddp"], rel=1e-6)

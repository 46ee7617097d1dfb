"""Runs that would silently train something else: verification ends them, with both values."""

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, read

pytestmark = pytest.mark.launch


@pytest.fixture
def words(tmp_path: Path, tiny_job: list[str]) -> list[str]:
    return [*tiny_job, "--max_steps", "2", "--per_device_train_batch_size", "1", "--output_dir", str(tmp_path / "out")]


@pytest.mark.nightly
def test_one_process_instead_of_two_is_detected(tmp_path: Path, words: list[str]) -> None:
    config = tmp_path / "multi_cpu.yaml"
    config.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    ended = accelerate_launch(config, *words, num_processes=2)
    assert ended.returncode != 0
    assert "world_size on rank 0 is 1, expected 2" in ended.stderr
    assert read(tmp_path / "out" / "failure.json")["kind"] == "attestation_failed"


def test_ddp_instead_of_fsdp_is_detected(tmp_path: Path, words: list[str]) -> None:
    ended = accelerate_launch(ROOT / "accelerate_configs/fsdp2.yaml", *words, script="ddp_for_fsdp")
    assert ended.returncode != 0
    assert "engine on rank 0 is ddp, expected fsdp2" in ended.stderr
    assert ended.stderr.count("the run does not match its preset") == 1  # once, not once a rank
    differences = read(tmp_path / "out" / "attestation.json")["differences"]
    assert {"fact": "sharding", "rank": 1, "expected": "full_shard", "found": "replicate"} in differences
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["exit_code"]) == ("attestation_failed", 1)
    assert not (tmp_path / "out" / "model.safetensors").exists()

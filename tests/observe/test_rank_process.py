"""What the process of a rank imports, starts, and leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT, accelerate_launch, preset_job, read

pytestmark = pytest.mark.launch


def test_a_rank_imports_neither_bitsandbytes_nor_inductor_asks_no_numactl_and_leaves_no_shared_memory(
    tmp_path: Path, tiny_model: Path, faq_alpaca: Path
) -> None:
    """DeepSpeed would start it each time that it counts devices, and peft and DeepSpeed's Muon import the others."""
    words = [*preset_job("zero3", tiny_model, faq_alpaca), "--lora_r", "4", "--output_dir", str(tmp_path / "out")]
    ended = accelerate_launch(ROOT / "accelerate_configs" / "zero3.yaml", *words, script="rank_costs.py")
    assert ended.returncode == 0, ended.stderr[-3000:]
    rank = read(tmp_path / "out.json")
    assert {"peft", "deepspeed.runtime.zero.muon.original_muon"} <= set(rank["modules"])
    assert not {"bitsandbytes", "torch._inductor.compile_fx"} & set(rank["modules"])
    assert "numactl" not in rank["started"]
    buffers = [line for line in rank["mapped"] if "deepspeed_allreduce_buffer" in line]
    assert len(buffers) == 2, "one of each rank"
    assert all(line.endswith("(deleted)") for line in buffers), "DeepSpeed leaves 64 MiB per rank in /dev/shm"

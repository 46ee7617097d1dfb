"""Exported checkpoints give the logits of the model that the run saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code
from launching import read

# peft reads a deprecated attribute of transformers; `toolkit checkpoint` hides the warning too.
DEPRECATED = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.launch, pytest.mark.filterwarnings(DEPRECATED)]

# Observed: 4e-7 after merging an adapter in fp32, 0 otherwise.
TOLERANCE = 1e-6


def logits(folder: Path, base: Path | None = None) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base or folder)
    model = model if base is None else PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(100, 140)[None]).logits


@pytest.mark.parametrize("case", ["zero2", "zero3-lora", "fsdp2-lora"])  # others: test_verify.py
def test_an_export_gives_the_logits_of_the_model_that_the_run_saved(
    saved_runs: dict[str, Path], case: str, tiny_model: Path, tmp_path: Path
) -> None:
    import torch

    from toolkit.checkpoint.hf_export import export

    base = tiny_model if case.endswith("-lora") else None
    export(saved_runs[case] / "checkpoint-6", tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out", base), logits(saved_runs[case], base), rtol=0, atol=TOLERANCE)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    if base is not None:
        export(saved_runs[case] / "checkpoint-6", tmp_path / "merged", merge_lora=True)
        torch.testing.assert_close(logits(tmp_path / "merged"), logits(saved_runs[case], base), rtol=0, atol=TOLERANCE)


def test_a_checkpoint_with_a_damaged_file_is_not_exported(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(checkpoint.glob("global_step6/*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert exit_code("checkpoint", "inspect", checkpoint) == 1
    assert f"damaged: global_step6/{file.name} is damaged (checksum)" in capsys.readouterr().out
    assert exit_code("checkpoint", "export", checkpoint, tmp_path / "out") == 2
    assert file.name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_never_overwrites_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    from toolkit.checkpoint.hf_export import export
    from toolkit.errors import ToolkitError

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ToolkitError, match="not empty"):
        export(checkpoint, tmp_path / "out")


def test_shards_respect_the_size_limit_and_load(saved_runs: dict[str, Path], tmp_path: Path) -> None:
    import torch

    from toolkit.checkpoint.hf_export import export

    export(saved_runs["fsdp2"] / "checkpoint-6", tmp_path / "out", max_shard_bytes=200_000)
    index = read(tmp_path / "out" / "model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) == 3  # the embedding alone, then 296,192 bytes of the rest
    torch.testing.assert_close(logits(tmp_path / "out"), logits(saved_runs["fsdp2"]), rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_during_an_export_is_reported_and_nothing_is_left(
    saved_runs: dict[str, Path], tmp_path: Path
) -> None:
    from toolkit.checkpoint.hf_export import export
    from toolkit.errors import ToolkitError

    with pytest.raises(
        ToolkitError, match=r"out cannot be written: File too large; everything written so far was removed"
    ):
        export(saved_runs["zero2"] / "checkpoint-6", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

"""The chunked loss on two CPU ranks under every engine: the losses and gradient norms of the full logits under DDP.

Where layers are sharded, activation checkpointing gathers them again, so it is on in these runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, losses, read

pytestmark = pytest.mark.launch

CHUNKED = ["--loss", "chunked", "--loss_chunk_tokens", "16"]
RECOMPUTED = [*CHUNKED, "--activation_checkpointing", "true"]  # changes no loss either
RUNS = {
    "full": ("ddp", ["--loss", "full"]),
    "ddp": ("ddp", CHUNKED),
    "zero3": ("zero3", RECOMPUTED),
    "fsdp2": ("fsdp2", RECOMPUTED),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> dict[str, Path]:
    """Two steps of two accumulation steps each, with chunks of 16 of a batch's 128 tokens."""
    root = tmp_path_factory.mktemp("chunked")
    for name, (preset, words) in RUNS.items():
        job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        job += ["--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
        job += ["--learning_rate", "1e-3", "--save_model", "false", "--save_strategy", "no", *words]
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        ended = accelerate_launch(config, *job, "--output_dir", str(root / name))
        assert ended.returncode == 0, f"{name}:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return {name: root / name for name in RUNS}


@pytest.mark.parametrize("name", [name for name in RUNS if name != "full"])
def test_losses_and_gradient_norms_are_those_of_the_full_logits(runs: dict[str, Path], name: str) -> None:
    assert losses(runs[name]) == pytest.approx(losses(runs["full"]), rel=1e-6)
    # Each engine computes the norm in its own way: theirs are 1.8e-4 from DDP's with full logits too.
    assert norms(runs[name]) == pytest.approx(norms(runs["full"]), rel=1e-5 if name == "ddp" else 3e-4)


def test_each_rank_reads_the_loss_in_effect(runs: dict[str, Path]) -> None:
    def read_back(name: str) -> set[tuple[Any, Any]]:
        attestation = read(runs[name] / "attestation.json")
        assert attestation["verdict"] == "attested"
        return {(rank["loss"], rank["loss_chunk_tokens"]) for rank in attestation["ranks"]}

    assert {name: read_back(name) for name in RUNS} == {
        "full": {("full", None)},
        **{name: {("chunked", 16)} for name in RUNS if name != "full"},
    }


def test_activation_checkpointing_is_in_effect_where_layers_are_sharded(runs: dict[str, Path]) -> None:
    in_effect = {
        name: {rank["activation_checkpointing"] for rank in read(folder / "attestation.json")["ranks"]}
        for name, folder in runs.items()
    }
    assert in_effect == {"full": {False}, "ddp": {False}, "zero3": {True}, "fsdp2": {True}}


def norms(folder: Path) -> list[float]:
    return [json.loads(row)["grad_norm"] for row in (folder / "ranks" / "rank0.jsonl").read_text().splitlines()]

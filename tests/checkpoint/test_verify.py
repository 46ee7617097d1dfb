"""Checkpoints of every engine verify, and damaged models are reported by tensor name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

# peft reads a deprecated attribute of transformers; `toolkit checkpoint` hides the warning too.
DEPRECATED = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.launch, pytest.mark.filterwarnings(DEPRECATED)]

TOLERANCE = 1e-6  # observed: 4e-7 after merging an adapter in fp32, 0 otherwise
CASES = ["ddp", "zero2", "zero3", "fsdp2", "zero3-lora", "fsdp2-lora"]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_logits_of_the_live_model(saved_runs: dict[str, Path], case: str) -> None:
    from toolkit.checkpoint.verify import verify

    found = verify(saved_runs[case] / "checkpoint-6")
    assert found.problems == []
    assert found.max_difference is not None
    assert found.max_difference < TOLERANCE


@pytest.mark.parametrize("case", ["zero2", "zero3", "fsdp2", "zero3-lora", "fsdp2-lora"])
def test_a_trained_model_gives_the_logits_of_the_live_model(saved_runs: dict[str, Path], case: str) -> None:
    from toolkit.checkpoint.verify import verify

    found = verify(saved_runs[case])
    assert (found.kind, found.problems) == ("model", [])
    assert found.max_difference is not None
    assert found.max_difference < TOLERANCE


@pytest.fixture
def trained_model(saved_runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a trained model with the live model's fingerprint."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in saved_runs["ddp"].iterdir():
        if path.is_file() and path.suffix in (".json", ".safetensors", ".jinja"):
            shutil.copyfile(path, folder / path.name)
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda *_: {}, "model.norm.weight is missing"),
        (lambda name, weight: {name: weight[:0]}, "model.norm.weight is empty"),
        (lambda name, weight: {name: weight.index_fill(0, weight.argmax()[None], float("nan"))}, "has 1 NaN of 64"),
        (lambda name, weight: {name: weight * float("inf")}, "has 64 infinite of 64"),
        (lambda name, weight: {name: weight, "model.extra": weight.clone()}, "model.extra is unexpected"),
        (lambda name, weight: {name: weight[:32]}, "has shape"),
        (lambda name, weight: {name: weight * 1.01}, "logits differ"),
        (lambda name, weight: {name: weight}, None),
    ],
    ids=["missing", "empty", "nan", "inf", "unexpected", "shape", "perturbed", "sound"],
)
def test_a_damaged_tensor_is_reported_by_name(trained_model: Path, damage: Any, message: str | None) -> None:
    from safetensors.torch import load_file, save_file

    from toolkit.checkpoint.verify import verify

    weights = load_file(trained_model / "model.safetensors")
    weights |= damage("model.norm.weight", weights.pop("model.norm.weight"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, trained_model / "model.safetensors")
    problems = verify(trained_model).problems
    assert (problems == []) if message is None else (len(problems) == 1 and message in problems[0]), problems

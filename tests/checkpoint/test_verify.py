"""Checkpoints of every engine, and their exports, give the logits of the live model; damage is reported by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import exit_code
from launching import nightly, read
from safetensors.torch import load_file, save_file

from toolkit.checkpoint.hf_export import export, verify
from toolkit.checkpoint.inspect import inspect_all

Runs = dict[str, Path]

# peft reads a deprecated attribute of transformers; `toolkit checkpoint` hides the warning too.
DEPRECATED = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.launch, pytest.mark.filterwarnings(DEPRECATED)]

TOLERANCE = 1e-6  # observed: 4e-7 after merging an adapter in fp32, 0 otherwise
CASES = ["fsdp2", *nightly("ddp", "zero2", "zero3", "zero3-lora", "fsdp2-lora")]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_and_the_trained_model_give_the_live_logits(saved_runs: Runs, case: str) -> None:
    for folder, kind in ((saved_runs[case] / "checkpoint-6", "checkpoint"), (saved_runs[case], "model")):
        found = verify(folder)
        assert (found.kind, found.problems) == (kind, [])
        assert found.max_difference is not None
        assert found.max_difference < TOLERANCE


def logits(folder: Path, base: Path | None = None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base or folder)
    model = model if base is None else PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(100, 140)[None]).logits


@pytest.mark.parametrize("case", ["zero2", *nightly("zero3-lora", "fsdp2-lora")])
def test_an_export_gives_the_saved_models_logits(saved_runs: Runs, case: str, tiny_model: Path, tmp_path: Path) -> None:
    base = tiny_model if case.endswith("-lora") else None
    export(saved_runs[case] / "checkpoint-6", tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out", base), logits(saved_runs[case], base), rtol=0, atol=TOLERANCE)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    if base is not None:
        export(saved_runs[case] / "checkpoint-6", tmp_path / "merged", merge_lora=True)
        torch.testing.assert_close(logits(tmp_path / "merged"), logits(saved_runs[case], base), rtol=0, atol=TOLERANCE)


def test_inspect_lists_checkpoints_and_says_where_a_manifest_is_missing(
    saved_runs: Runs, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("checkpoint", "inspect", saved_runs["zero2"], "--json") == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(each["step"], each["state"]) for each in found] == [(step, "complete") for step in (6, 3)]
    facts = {"engine": "deepspeed", "preset": "zero2", "world_size": 2, "num_params": 336_192, "adapter": False}
    assert {name: found[0][name] for name in facts} == facts
    assert found[0]["optimizer_bytes"] >= 12 * 336_192
    (checkpoint / "manifest.json").unlink()
    (summary,) = inspect_all(checkpoint)
    assert summary.state == "no manifest: completeness unknown"
    assert (summary.engine, summary.step, summary.world_size) == ("deepspeed", 6, 2)


def test_shards_of_an_export_respect_the_size_limit_and_load(saved_runs: Runs, tmp_path: Path) -> None:
    export(saved_runs["fsdp2"] / "checkpoint-6", tmp_path / "out", max_shard_bytes=200_000)
    index = read(tmp_path / "out" / "model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) == 3  # the embedding alone, then 296,192 bytes of the rest
    torch.testing.assert_close(logits(tmp_path / "out"), logits(saved_runs["fsdp2"]), rtol=0, atol=TOLERANCE)


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
    ],
    ids=["missing", "empty", "nan", "inf", "unexpected", "shape", "perturbed"],
)
def test_a_damaged_tensor_is_named(saved_runs: Runs, tmp_path: Path, damage: Any, message: str) -> None:
    for path in saved_runs["ddp"].iterdir():
        if path.is_file() and path.suffix in (".json", ".safetensors", ".jinja"):
            shutil.copyfile(path, tmp_path / path.name)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= damage("model.norm.weight", weights.pop("model.norm.weight"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    (problem,) = verify(tmp_path).problems
    assert message in problem

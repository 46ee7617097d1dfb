"""A rehearsal on fake tensors counts the model states of its rank and the tensors of each phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import toolkit
from small_llama import LLAMA, NUM_PARAMS

from toolkit.errors import ToolkitError
from toolkit.presets import load_preset
from toolkit.rehearse.rehearsal import plan_rehearsal

PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """16 rows of 256 tokens under FSDP2, so that logits outweigh everything else."""
    path = tmp_path_factory.mktemp("traced") / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(path), "--max_seq_length", "256", "--per_device_train_batch_size", "16"]
    words += ["--loss", "full"]
    ended = toolkit("rehearse", "--preset", "fsdp2", "--num-processes", "4", "--fake-tensors", "--json", "--", *words)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.launch
def test_fake_tensors_hold_the_model_states_of_this_rank_only(traced: dict[str, Any]) -> None:
    """The first of four ranks holds 253 of 1009 rows of the embedding and the head, and a quarter of the rest."""
    held = NUM_PARAMS // 4 + 2 * (253 * 4 - 1009) * 64 // 4
    assert traced["num_params"] == NUM_PARAMS
    assert {part: traced[part] for part in PARTS} == {
        "parameter_bytes": 4 * held,
        "gradient_bytes": 4 * held,
        "optimizer_bytes": 8 * held,
    }
    step = traced["peaks"]["step"]["parts"]
    assert (step["parameter"], step["gradient"], step["optimizer"]) == (4 * held, 4 * held, 8 * held)


@pytest.mark.launch
def test_fake_tensors_count_the_logits_and_their_copies(traced: dict[str, Any]) -> None:
    """bf16 logits, their fp32 copy and its log-softmax are alive when the loss is taken; in backward one more."""
    logits = 16 * 256 * 1009
    assert traced["peaks"]["forward"]["parts"]["logits"] == (2 + 4 + 4) * logits
    assert traced["peaks"]["backward"]["parts"]["logits"] >= (4 + 4) * logits
    total = traced["peaks"]["forward"]
    assert total["total_bytes"] == sum(total["parts"].values())


@pytest.mark.launch
def test_fake_tensors_count_what_waits_between_accumulation_steps(tmp_path: Path) -> None:
    """The bf16 gradients of all parameters, or a quarter of them in fp32."""
    path, peaks = tmp_path / "config.json", {}
    path.write_text(json.dumps(LLAMA))
    words = ["--model_name_or_path", str(path), "--max_seq_length", "64", "--per_device_train_batch_size", "1"]
    words += ["--gradient_accumulation_steps", "2", "--bf16", "true"]
    for accumulate in ("sharded", "whole"):
        given = ["--fake-tensors", "--json", "--", *words, "--accumulate", accumulate]
        ended = toolkit("rehearse", "--preset", "fsdp2", "--num-processes", "4", *given)
        assert ended.returncode == 0, ended.stderr
        peaks[accumulate] = json.loads(ended.stdout)["peaks"]
    held = NUM_PARAMS // 4 + 2 * (253 * 4 - 1009) * 64 // 4
    waiting = {name: peak["forward"]["total_bytes"] for name, peak in peaks.items()}
    assert waiting["whole"] - waiting["sharded"] == 2 * NUM_PARAMS - 4 * held
    assert peaks["whole"]["step"]["parts"]["gradient"] == peaks["sharded"]["step"]["parts"]["gradient"] == 4 * held


@pytest.mark.parametrize(
    ("preset", "words", "message"),
    [
        ("zero3", [], "--fake-tensors does not work with preset 'zero3': DeepSpeed reads the values"),
        (
            "fsdp2_cpu_offload",
            [],
            "--fake-tensors does not work with preset 'fsdp2_cpu_offload': offloaded and",
        ),
        ("fsdp2_tp", ["--tp", "2"], "preset 'fsdp2_tp': fake tensors were never run where layers or sequences are"),
        ("fsdp2", ["--dataset", "rows.jsonl"], "--dataset is not traced"),
        ("ddp", ["--packing"], "--packing is not traced"),
    ],
)
def test_a_job_that_cannot_be_traced_is_refused(tmp_path: Path, preset: str, words: list[str], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    argv = ["--model_name_or_path", str(tmp_path), *(str(tmp_path / w) if w.endswith(".jsonl") else w for w in words)]
    with pytest.raises(ToolkitError, match=message):
        plan_rehearsal(load_preset(preset), world_size=4, rank=0, training_argv=argv, cpu=True, fake_tensors=True)

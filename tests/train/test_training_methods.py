"""Training methods on two CPU ranks: each is read back from the live objects, and its effect is checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, accelerate_launch, losses, read

from toolkit.versions import is_importable

pytestmark = pytest.mark.launch

P = 3_219_776
Start = Callable[..., Path]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, faq_alpaca: Path) -> Start:
    """Return a function that trains three steps under a preset with more arguments and returns the run folder."""

    def run(preset: str, *words: str, num_processes: int = 2, variables: dict[str, str] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("methods") / preset
        job = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
        job += ["--max_steps", "3", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]
        job += ["--save_strategy", "no", "--output_dir", str(folder), *words]
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        ended = accelerate_launch(config, *job, num_processes=num_processes, variables=variables)
        assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return folder

    return run


def ranks(folder: Path) -> list[dict[str, Any]]:
    attestation = read(folder / "attestation.json")
    assert attestation["verdict"] == "attested"
    facts: list[dict[str, Any]] = attestation["ranks"]
    return facts


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# name -> bytes sent in the last step, of the 4 P bytes that DDP would send, and their dtypes
HOOKS = {
    "bf16": (2 * P, "bfloat16"),
    # half of 1 % of two buckets, rounded up for each: an int32 index and an fp32 value
    "top_k": (None, "float32+int32"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_live_model_calls_the_communication_hook_and_its_bytes_are_counted(start: Start, hook: str) -> None:
    profiled = ["--profile_steps", "2:2"] if hook == "bf16" else []
    folder = start("ddp", "--ddp_comm_hook", hook, "--save_model", "false", *profiled)
    sent, dtypes = HOOKS[hook]
    run = read(folder / "run.json")
    facts = run["ddp_comm_hook"]
    assert facts["uncompressed_bytes_per_step"] == 4 * P
    if sent is not None:
        assert facts["communication_bytes_per_step"] == sent
    else:
        assert 0.02 * P * 4 <= facts["communication_bytes_per_step"] <= 0.02 * P * 4 + 2 * 8
    for rank in ranks(folder):
        assert (rank["ddp_comm_hook"], rank["reduce_dtype"]) == (hook, dtypes)
    if profiled:
        check_profile(folder, run["profile"])
        check_memory_by_phase(folder, run)


# Linux adds a thread's pages to the process's peak after 64 page faults, and to its present size as soon as it is read.
RSS_LAG_BYTES = 64 * 4096


def check_memory_by_phase(folder: Path, run: dict[str, Any]) -> None:
    """Resident bytes of each rank's first step, in its first row only; the run has the maximum of each phase."""
    rows = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("ranks/*.jsonl"))
    ]
    assert [["memory_by_phase" in row for row in rank] for rank in rows] == [[True, False, False]] * 2
    first, second = (rank[0]["memory_by_phase"] for rank in rows)
    assert first["bytes_of"] == "rss"
    for phase in ("load", "forward", "backward", "step"):
        highest = max(rank[0]["peak_host_bytes"] for rank in rows) + RSS_LAG_BYTES
        assert 4 * P < min(first[phase], second[phase]) <= highest
        assert run["measured"]["memory_by_phase"][phase] == max(first[phase], second[phase])


def check_profile(folder: Path, profile: dict[str, Any]) -> None:
    """One row per rank, parts that add up to the step, one trace per rank; the step is not timed."""
    assert [(row["rank"], row["step"]) for row in profile["steps"]] == [(0, 2), (1, 2)]
    for row in profile["steps"]:
        parts = [row[f"{part}_seconds"] for part in ("compute", "exposed_communication", "data_wait", "idle")]
        assert sum(parts) == pytest.approx(row["step_seconds"])
        assert min(row["compute_seconds"], row["communication_seconds"]) > 0
    first, second = profile["timeline"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert abs(first["start_unix"] - second["start_unix"]) < first["seconds"]  # one clock: the ranks meet in the step
    for rank in (first, second):
        assert rank["lanes"]["compute"]
        assert rank["lanes"]["communication"]
        assert all(0 <= start < end <= rank["seconds"] + 1e-6 for lane in rank["lanes"].values() for start, end in lane)
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    lines = (folder / "ranks" / "rank0.jsonl").read_text().splitlines()
    assert ['"profiled": true' in line for line in lines] == [False, True, False]


@pytest.mark.parametrize("preset", ["ddp", "fsdp2"])
def test_compiled_layers_have_no_graph_break_and_the_losses_of_uncompiled_ones(
    start: Start, preset: str, preset_runs: dict[str, Path]
) -> None:
    compiled = ["--torch_compile", "true", "--torch_compile_backend", "aot_eager"]  # the graph without inductor's C++
    folder = start(preset, *compiled, "--untimed_steps", "1")
    for rank in ranks(folder):
        assert (rank["torch_compile"], rank["engine"]) == (True, preset)
        assert (rank["compiled_modules"], rank["graph_breaks"]) == (2, 0)
    measured = read(folder / "run.json")["measured"]
    assert (measured["recompilations_after_first_steps"], measured["graph_breaks_after_first_steps"]) == (0, 0)
    assert losses(folder) == pytest.approx(losses(preset_runs["ddp"]), rel=1e-6)
    assert weights(folder).keys() == weights(preset_runs[preset]).keys()


def test_dora_trains_and_saves_under_zero3_with_a_scaled_rate(start: Start) -> None:
    scaling = ["--lr_scaling", "linear", "--lr_reference_batch_size", "2"]
    folder = start("zero3", "--lora_r", "4", "--lora_config", "use_dora=true", "use_rslora=true", *scaling)
    config = read(folder / "adapter_config.json")
    assert (config["use_dora"], config["use_rslora"], config["r"]) == (True, True, 4)
    spec = read(folder / "run.json")["spec"]
    assert (spec["learning_rate"], spec["lr_scaling"]["base_learning_rate"]) == (2e-3, 1e-3)
    assert "learning rate 0.001 × 4/2 (linear) = 0.002, after a warm-up of 5%" in (folder / "train.log").read_text()


needs_bitsandbytes = pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")


@pytest.mark.gpu
@needs_bitsandbytes
def test_qlora_computes_in_bf16_on_a_gpu(start: Start) -> None:
    seen = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    folder = start("single", "--lora_r", "4", "--load_in_4bit", "true", num_processes=1, variables=seen)
    (rank,) = ranks(folder)
    assert rank["device"].startswith("cuda")
    assert (rank["load_in_4bit"], rank["compute_dtype"], rank["master_dtype"]) == (True, "bfloat16", "float32")
    assert rank["parameter_bytes"] < 4 * rank["num_params"]
    steps = [json.loads(line) for line in (folder / "ranks" / "rank0.jsonl").read_text().splitlines()]
    assert all(math.isfinite(step["loss"]) for step in steps)

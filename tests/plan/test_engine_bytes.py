"""Planned model states against real engines, to the byte: rank 0 and the last rank of up to 64, in one process.

The process group is torch's `fake` one, whose collectives move nothing; the rest is real (`scripts/engine_bytes.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, cpu_environment, run_warm
from model_configs import EXPERTS, GPT2, TINY, config_file
from preset_files import deepspeed_pair

from toolkit.models.job_weights import job_weights
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, is_low_rank
from toolkit.models.read_model import read_model
from toolkit.plan.engine_buffers import engine_buffers
from toolkit.plan.engine_settings import engine_settings
from toolkit.plan.model_states import model_states
from toolkit.plan.planned_job import PlannedJob
from toolkit.presets import load_preset
from toolkit.versions import is_importable

pytestmark = pytest.mark.launch

Case = dict[str, Any]
WIDE = TINY | {"hidden_size": 128, "intermediate_size": 160, "vocab_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY | {"vocab_size": 97}),
    "llama-tied": ("llama", TINY | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", TINY),
    "gemma": ("gemma", TINY | {"head_dim": 8}),
    "mistral": ("mistral", TINY),
    "qwen3-moe": ("qwen3_moe", TINY | EXPERTS),
    "gpt2": ("gpt2", GPT2),
    # Large enough for 8-bit states (4,096 elements in a shard), with tensors that are not.
    "wide": ("llama", WIDE),
    "wide-tied": ("llama", WIDE | {"tie_word_embeddings": True}),
}
PRESETS = ["zero1", "zero2", "zero3", "zero2_cpu_offload", "zero3_cpu_offload", "fsdp2", "fsdp2_grad_op"]
PRESETS += ["fsdp2_hybrid", "fsdp2_cpu_offload"]
# A few of each: every preset, size and model is there, and both ends of a group.
SPARSE = [
    ("llama", 64, 0, PRESETS, None),
    ("gpt2", 64, 63, ["zero1", "zero2", "fsdp2"], None),
    ("gemma", 8, 0, ["zero1", "zero2", "zero3", "fsdp2"], None),
    ("qwen3-moe", 8, 0, ["zero2", "zero3", "fsdp2", "fsdp2_hybrid"], None),
    ("llama", 8, 7, ["zero2", "fsdp2", "fsdp2_hybrid"], 4),
    ("llama-tied", 4, 0, ["zero1", "zero3", "fsdp2"], 4),
    ("qwen2", 2, 1, ["ddp", "zero2", "fsdp2"], None),
    ("mistral", 2, 0, ["ddp", "zero3", "fsdp2_grad_op"], 4),
    ("gpt2", 1, 0, ["ddp", "zero1", "zero3"], None),
]
OPTIMIZED = [
    ("wide", ["ddp", "zero2", "zero3"], "adamw_bnb_8bit"),
    ("wide-tied", ["ddp", "zero1"], "paged_adamw_8bit"),
    ("wide", ["ddp", "zero2"], "lion_8bit"),
    ("wide", ["ddp", "zero2"], "ademamix"),
    ("wide-tied", ["ddp"], "rmsprop_bnb_8bit"),
    ("wide", ["ddp", "zero3"], "paged_adamw_32bit"),
    ("qwen3-moe", ["ddp"], "adafactor"),
    ("wide", ["ddp", "zero2", "fsdp2"], "sgd"),
    ("wide", ["ddp", "zero2", "fsdp2"], "rmsprop"),
    ("wide", ["ddp"], "adagrad"),
    ("wide", ["ddp", "fsdp2"], "muon"),
    ("qwen3-moe", ["ddp"], "muon"),
    ("gpt2", ["ddp"], "muon"),
]
# torchao is no dependency: peft imports it into every rank, where it takes a second and torch's compiler.
QUANTIZED_BY_TORCHAO = [("wide", ["ddp", "fsdp2"], "adamw_torch_8bit"), ("wide", ["ddp"], "adamw_torch_4bit")]


def cases_of(folder: Path, rows: Iterable[tuple[str, int, int, list[str], int | None, str]]) -> list[Case]:
    """A case for each preset of a row: model, world size, rank, presets, rank of adapters, optimizer."""
    cases = []
    for name, size, rank, presets, lora_r, optim in rows:
        path = folder / name / "config.json"
        if not path.is_file():
            config_file(folder / name, *MODELS[name])
        job = {"config": str(path), "world_size": size, "rank": rank, "lora_r": lora_r, "optim": optim}
        cases += [{"preset": preset, **job} for preset in presets]
    return cases


def planned(case: Case) -> dict[str, int]:
    shape, preset = read_model(case["config"]), load_preset(case["preset"])
    engine = engine_settings(preset, world_size=case["world_size"], hidden_size=shape.hidden_size, rank=case["rank"])
    states = model_states(engine, job_weights(shape, case["lora_r"], False), OPTIMIZERS[case["optim"]])
    return {part: getattr(states, f"{part}_bytes") for part in ("parameter", "gradient", "optimizer")}


def run_engines(cases: list[Case], folder: Path) -> list[dict[str, int]]:
    """What the script prints of each case, in one child process forked from the session's server."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(SCRIPTS / "engine_bytes.py"), str(folder / "cases.json")]
    done = run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # DeepSpeed logs to stdout


def differing(cases: list[Case], folder: Path) -> list[tuple[Case, dict[str, int], dict[str, int]]]:
    """Cases in which the engines hold other bytes."""
    held = run_engines(cases, folder)
    return [(case, real, planned(case)) for case, real in zip(cases, held, strict=True) if real != planned(case)]


@pytest.mark.nightly
def test_planned_states_are_those_that_engines_hold(tmp_path: Path) -> None:
    optimized = [(name, 2, 0, presets, None, optim) for name, presets, optim in OPTIMIZED]
    cases = cases_of(tmp_path, [*((*row, DEFAULT_OPTIMIZER) for row in SPARSE), *optimized])
    assert differing(cases, tmp_path) == []
    assert {case["preset"] for case in cases} >= {*PRESETS, "ddp"}
    libraries = {OPTIMIZERS[optim].class_name for _, _, optim in [*OPTIMIZED, *QUANTIZED_BY_TORCHAO]}
    others = {OPTIMIZERS[DEFAULT_OPTIMIZER].class_name}  # GaLore's and APOLLO's: tests/models/test_optimizers.py
    others |= {spec.class_name for name, spec in OPTIMIZERS.items() if is_low_rank(name)}
    assert libraries >= {spec.class_name for spec in OPTIMIZERS.values()} - others


@pytest.mark.nightly
@pytest.mark.skipif(not is_importable("torchao"), reason="torchao is not installed: pip install torchao")
def test_planned_states_are_those_that_torchao_holds(tmp_path: Path) -> None:
    rows = [(name, 2, 0, presets, None, optim) for name, presets, optim in QUANTIZED_BY_TORCHAO]
    assert differing(cases_of(tmp_path, rows), tmp_path) == []


@pytest.mark.nightly
def test_zero_3_prefetches_as_many_parameters_as_may_be_live(tmp_path: Path) -> None:
    """The end of the forward has one tensor of a layer more at most, the backward the embedding."""
    model = TINY | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "vocab_size": 1024}
    config_file(tmp_path, "llama", model)
    shape = read_model(str(tmp_path / "config.json"))
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    job = {"config": str(tmp_path / "config.json"), "world_size": 2, "rank": 0, "gathers": True}
    cases = []
    for live, lora_r in ((0, None), (150_000, None), (150_000, 4)):
        config["zero_optimization"] |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": 100_000}
        cases.append(job | {"preset": str(deepspeed_pair(tmp_path / str(live), config)), "lora_r": lora_r})
    for case, real in zip(cases, run_engines(cases, tmp_path), strict=True):
        engine = engine_settings(load_preset(case["preset"]), world_size=2, hidden_size=64)
        weights = job_weights(shape, case["lora_r"])
        buffers = engine_buffers(engine, weights, model_states(engine, weights), PlannedJob())
        at_end = buffers.forward_bytes // engine.element_bytes
        highest = at_end + buffers.midway_bytes // engine.element_bytes
        assert 0 <= at_end - real["end_of_forward"] <= weights.largest_in_layer, (case, real, at_end)
        assert 0 <= highest - real["highest"] <= weights.largest_in_layer, (case, real, highest)

"""Planned model states of each optimizer against real engines, to the byte, and what ZeRO-3 gathers ahead.

A rank of two is rehearsed: torch's `fake` process group moves nothing, and the rest is real. AdamW's bytes under every
preset and many world sizes are in `benchmarks/results/shard_bytes.jsonl`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, SCRIPTS, cpu_environment, read, run_warm
from model_configs import EXPERTS, GPT2, TINY, config_file
from preset_files import deepspeed_pair

from toolkit.engines.zero import BF16_MASTERS, BF16_STATES
from toolkit.models.job_weights import job_weights
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, is_low_rank
from toolkit.models.read_model import read_model
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import engine_settings, model_states
from toolkit.presets import load_preset
from toolkit.versions import is_importable

pytestmark = [pytest.mark.launch, pytest.mark.nightly]

PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
# Large enough for 8-bit states (4,096 elements in a shard), with tensors that are not.
WIDE = TINY | {"hidden_size": 128, "intermediate_size": 160, "vocab_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", TINY | EXPERTS),
    "gpt2": ("gpt2", GPT2),
    "wide": ("llama", WIDE),
    "wide-tied": ("llama", WIDE | {"tie_word_embeddings": True}),
}
OPTIMIZED = [("wide", "ddp zero2 zero3", "adamw_bnb_8bit"), ("wide-tied", "ddp zero1", "paged_adamw_8bit")]
OPTIMIZED += [("wide", "ddp zero2", "lion_8bit"), ("wide", "ddp zero2", "ademamix")]
OPTIMIZED += [("wide-tied", "ddp", "rmsprop_bnb_8bit"), ("wide", "ddp zero3", "paged_adamw_32bit")]
OPTIMIZED += [("qwen3-moe", "ddp", "adafactor"), ("wide", "ddp zero2 fsdp2", "sgd")]
OPTIMIZED += [("wide", "ddp zero2 fsdp2", "rmsprop"), ("wide", "ddp", "adagrad"), ("wide", "ddp fsdp2", "muon")]
OPTIMIZED += [("qwen3-moe", "ddp", "muon"), ("gpt2", "ddp", "muon")]
# torchao is no dependency: peft imports it into every rank, where it takes a second and torch's compiler.
BY_TORCHAO = [("wide", "ddp fsdp2", "adamw_torch_8bit"), ("wide", "ddp", "adamw_torch_4bit")]
needs_torchao = pytest.mark.skipif(not is_importable("torchao"), reason="torchao is not installed: pip install torchao")


def rehearsed(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return each case with what its rank holds."""
    paths = [folder / "cases.json", folder / "found.json"]
    paths[0].write_text(json.dumps(cases))
    done = run_warm([sys.executable, str(SCRIPTS / "rehearse_cases.py"), *map(str, paths)], cpu_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return list(read(paths[1]))


@pytest.mark.parametrize("rows", [OPTIMIZED, pytest.param(BY_TORCHAO, marks=needs_torchao)], ids=["all", "torchao"])
def test_planned_states_are_those_that_engines_hold(rows: list[tuple[str, str, str]], tmp_path: Path) -> None:
    paths = {name: str(config_file(tmp_path / name, *model)) for name, model in MODELS.items()}
    cases = [
        {"architecture": paths[name], "preset": preset, "world_size": 2, "rank": 0, "arguments": ["--optim", optim]}
        for name, presets, optim in rows
        for preset in presets.split()
    ]
    for case in rehearsed(cases, tmp_path):
        shape = read_model(case["architecture"])
        place = {"world_size": 2, "hidden_size": shape.hidden_size, "mixed_precision": "no"}
        engine = engine_settings(load_preset(case["preset"]), **place)
        states = model_states(engine, job_weights(shape), OPTIMIZERS[case["arguments"][1]])
        assert [case.get(part) for part in PARTS] == [getattr(states, part) for part in PARTS], case


def test_planned_bf16_states_are_those_that_deepspeed_holds(tmp_path: Path) -> None:
    bf16 = {"enabled": True, BF16_MASTERS: True, BF16_STATES: True}
    path, cases = str(config_file(tmp_path / "wide", *MODELS["wide"])), []
    for stage in (1, 2, 3):
        settings = read(ROOT / "ds_configs" / f"zero{stage}.json") | {"bf16": bf16}
        preset = str(deepspeed_pair(tmp_path / str(stage), settings))
        arguments = ["--bf16", "true"]
        cases.append({"architecture": path, "preset": preset, "world_size": 2, "rank": 0, "arguments": arguments})
    shape = read_model(path)
    for case in rehearsed(cases, tmp_path):
        engine = engine_settings(load_preset(case["preset"]), world_size=2, hidden_size=shape.hidden_size)
        states = model_states(engine, job_weights(shape))
        assert [case.get(part) for part in PARTS] == [getattr(states, part) for part in PARTS], case


def test_each_class_of_optimizer_is_compared() -> None:
    """Those of schedulefree, dion, GaLore and APOLLO are compared in tests/models/test_optimizers.py."""
    here = {name: each.class_name for name, each in OPTIMIZERS.items() if not is_low_rank(name)}
    classes = {name for name in here.values() if not name.startswith(("schedulefree.", "dion."))}
    compared = {OPTIMIZERS[optim].class_name for _, _, optim in [*OPTIMIZED, *BY_TORCHAO]}
    assert classes - {OPTIMIZERS[DEFAULT_OPTIMIZER].class_name} == compared


def test_zero_3_prefetches_as_many_parameters_as_may_be_live(tmp_path: Path) -> None:
    """The end of the forward has one tensor of a layer more at most, the backward the embedding."""
    model = TINY | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "vocab_size": 1024}
    path = config_file(tmp_path, "llama", model)
    config, cases = read(ROOT / "ds_configs" / "zero3.json"), []
    for live, lora_r in ((0, None), (150_000, None), (150_000, 4)):
        config["zero_optimization"] |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": 100_000}
        preset = deepspeed_pair(tmp_path / str(live), config)
        cases.append({"config": str(path), "preset": str(preset), "lora_r": lora_r})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(SCRIPTS / "zero3_gathers.py"), str(tmp_path / "cases.json")]
    done = run_warm(command, cpu_environment() | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # DeepSpeed logs to stdout
    for case, real in zip(cases, map(json.loads, lines), strict=True):
        engine = engine_settings(load_preset(case["preset"]), world_size=2, hidden_size=64)
        weights = job_weights(read_model(str(path)), case["lora_r"])
        buffers = engine.traits.buffers(engine, weights, model_states(engine, weights), PlannedJob())
        at_end = buffers.forward_bytes // engine.element_bytes
        highest = at_end + buffers.midway_bytes // engine.element_bytes
        assert 0 <= at_end - real["end_of_forward"] <= weights.largest_in_layer, (case, real, at_end)
        assert 0 <= highest - real["highest"] <= weights.largest_in_layer, (case, real, highest)

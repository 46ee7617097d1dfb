"""Model states worked out by hand, and QLoRA's bytes compared with what bitsandbytes holds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, read
from model_configs import LLAMA_8B_PARAMS, config_file, llama_8b
from preset_files import deepspeed_pair

from toolkit.engines.zero import BF16_MASTERS, BF16_STATES
from toolkit.models.job_weights import job_weights, total
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape, linear
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import all_ranks_bytes, engine_settings, model_states
from toolkit.presets import list_presets, load_preset
from toolkit.presets.spec import PresetSpec
from toolkit.versions import is_importable

MEASURED = read(ROOT / "tests" / "fixtures" / "quantized_bytes.json")
needs_bitsandbytes = pytest.mark.skipif(not is_importable("bitsandbytes"), reason="bitsandbytes is not installed")


@pytest.mark.parametrize("preset", [preset for preset in list_presets() if preset.engine != "pipeline"], ids=str)
def test_the_states_of_all_ranks_on_a_cpu_are_those_of_a_plan_without_mixed_precision(preset: PresetSpec) -> None:
    size = preset.max_world_size or 8
    for words in ({}, {"lora_r": 8}, {"optim": "adafactor"}):
        job = PlannedJob(**words, **dict.fromkeys(preset.degrees, 2))
        plan = plan_memory(llama_8b(), preset, world_size=size, job=job, mixed_precision="no")
        found = all_ranks_bytes(llama_8b(), preset, world_size=size, job=job)
        assert found == size * plan.states.total_bytes > 0


def test_model_states_of_an_8b_model_by_hand() -> None:
    def held(name: str) -> tuple[float, ...]:
        engine = engine_settings(load_preset(name), world_size=8, hidden_size=4096)
        states = model_states(engine, job_weights(llama_8b()))
        found = states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes
        return tuple(part / LLAMA_8B_PARAMS for part in found)

    assert held("ddp") == (4, 4, 8)
    assert held("zero1") == (2, 2, 12 / 8)
    assert held("zero2") == (2, 2 / 8, 12 / 8)
    assert held("fsdp2") == (4 / 8, 4 / 8, 8 / 8)


def test_bf16_states_of_deepspeed_by_hand(tmp_path: Path) -> None:
    """A bf16 master weight, momentum and variance; states stay fp32 where only the master weights are bf16."""

    def held(stage: int, bf16: dict[str, bool], optim: str = DEFAULT_OPTIMIZER, **zero: Any) -> tuple[float, ...]:
        settings = {"bf16": {"enabled": "auto"} | bf16, "zero_optimization": {"stage": stage} | zero}
        path = deepspeed_pair(tmp_path, settings)
        engine = engine_settings(load_preset(str(path)), world_size=8, hidden_size=4096)
        states = model_states(engine, job_weights(llama_8b()), OPTIMIZERS[optim])
        return states.gradient_bytes / LLAMA_8B_PARAMS, states.optimizer_bytes / LLAMA_8B_PARAMS

    masters, both = {BF16_MASTERS: True}, {BF16_MASTERS: True, BF16_STATES: True}
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert held(1, both) == (2, 6 / 8)
    assert held(2, both) == (2 / 8, 6 / 8)
    assert held(2, both, "sgd") == (2 / 8, 2 / 8)
    assert held(2, both, "paged_adamw_32bit") == (2 / 8, 10 / 8)  # its states are fp32 whatever it updates
    assert held(2, masters, **offload) == (2 / 8, 10 / 8)
    assert held(2, both, **offload) == (2 / 8, 6 / 8)


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["architecture"])
def test_planned_4_bit_weights_have_the_measured_bytes(row: dict[str, Any], tmp_path: Path) -> None:
    fields = {name: value for name, value in row["config"].items() if name != "model_type"}
    shape = read_model(str(config_file(tmp_path, row["config"]["model_type"], fields)))
    weights = job_weights(shape, MEASURED["lora_r"], True)
    engine = engine_settings(load_preset("single"), world_size=1, hidden_size=shape.hidden_size)
    num_in_4bit = total(weights.in_4bit, lambda tensor: tensor.num_elements)
    held = {"num_in_4bit": num_in_4bit, "parameter_bytes": model_states(engine, weights).parameter_bytes}
    assert held == row["held"]


@pytest.mark.nightly
@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["llama_tied", "mixtral"])
def test_bitsandbytes_holds_the_measured_bytes(architecture: str, tmp_path: Path) -> None:
    """Loaded as the training script loads it; packed weights, their constants, the rest in bf16, adapters in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.engines.tensors import constant_bytes, local_bytes, quantized_modules
    from toolkit.job.argument_fields import ModelArguments
    from toolkit.train.model.loading import load_model

    row = next(row for row in MEASURED["rows"] if row["architecture"] == architecture)
    config = AutoConfig.for_model(**row["config"])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    arguments = ModelArguments(model_name_or_path=str(tmp_path), lora_r=MEASURED["lora_r"], load_in_4bit=True)
    model = load_model(arguments, compute_dtype=torch.bfloat16)
    assert row["held"] == {
        "num_in_4bit": sum(math.prod(module.quant_state.shape) for module in quantized_modules(model)),
        "parameter_bytes": local_bytes(model.parameters()) + constant_bytes(model),
    }


def test_engines_that_shard_hold_their_part_of_the_packed_weights_and_all_constants() -> None:
    """A layer of 10 x 64 weights: 640 elements are 160 bf16 numbers, 10 scales, one of their own, and the tables."""
    sizes = {"hidden_size": 64, "intermediate_size": 10, "num_layers": 1, "vocab_size": 10, "head_dim": 64}
    heads = {"num_attention_heads": 1, "num_kv_heads": 1, "gated_mlp": False, "tied_embeddings": True}
    shape = ModelShape(model_type="llama", **sizes, **heads, layers=(linear("up_proj", 10, 64),), outer=())
    constants, adapters = 10 + 4 + 4 * 273, 2 * (64 + 10)
    held = {}
    for name in ("ddp", "zero2", "fsdp2", "zero3"):
        engine = engine_settings(load_preset(name), world_size=2, hidden_size=1)
        states = model_states(engine, job_weights(shape, 2, True, ("up_proj",)))
        held[name] = states.parameter_bytes
    assert held["ddp"] == 2 * 160 + constants + 4 * adapters
    assert held["zero2"] == 2 * 160 + constants + 2 * adapters
    assert held["fsdp2"] == 2 * 80 + constants + 4 * adapters // 2
    # ZeRO-3 keeps tensors of up to ten times the hidden size, here 1, gathered too: none
    assert held["zero3"] == 2 * 80 + constants + 2 * adapters // 2


def test_planned_states_equal_the_recorded_bytes_of_1103_rehearsals(tmp_path: Path) -> None:
    """Eleven presets on 1 to 64 ranks in fp32; the first line of the record has the configurations."""
    record = ROOT / "benchmarks" / "results" / "shard_bytes.jsonl"
    facts, *rows = map(json.loads, record.read_text().splitlines())
    assert sum(len(row["bytes"]) for row in rows) == 1_103
    shapes = {}
    for name, config in facts["architectures"].items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        shapes[name] = read_model(str(tmp_path / name / "config.json"))
    for row in rows:
        shape, lora_r = shapes[row["architecture"]], 4 if row["arguments"] == ["--lora_r", "4"] else None
        weights = job_weights(shape, lora_r)
        numbers = (weights.num_trained + weights.num_frozen, weights.num_trained)
        assert numbers == (row["num_params"], row["num_trainable_params"])
        for place, held in row["bytes"].items():
            world_size, rank = map(int, place.split())
            where = {"world_size": world_size, "rank": rank, "hidden_size": shape.hidden_size}
            engine = engine_settings(load_preset(row["preset"]), mixed_precision="no", **where)
            states = model_states(engine, weights)
            assert [states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes] == held, (row, place)

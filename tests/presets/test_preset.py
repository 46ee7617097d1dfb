"""Presets: what their files specify, and which files are refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from preset_files import deepspeed_pair, listed_presets, write

from toolkit.errors import ToolkitError
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets import list_presets, load_preset, preset_names, read_preset

ROOT = Path(__file__).parents[2]
JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
ALL, TWO = ("parameter", "gradient", "optimizer"), ("gradient", "optimizer")
# name: engine, sharding, offload of the optimizer, of the parameters, processes, the states that ranks share
SPECIFIED: dict[str, tuple[str, str, str | None, str | None, str, tuple[str, ...]]] = {
    "cp": ("fsdp2", "full_shard", None, None, "2+", ALL),
    "ddp": ("ddp", "replicate", None, None, "1+", ()),
    "ep": ("fsdp2", "full_shard", None, None, "2+", ALL),
    "ep_tp": ("fsdp2", "full_shard", None, None, "4+", ALL),
    "fsdp2": ("fsdp2", "full_shard", None, None, "2+", ALL),
    "fsdp2_cpu_offload": ("fsdp2", "full_shard", "cpu", "cpu", "2+", ALL),
    "fsdp2_grad_op": ("fsdp2", "shard_grad_op", None, None, "2+", ALL),
    "fsdp2_hybrid": ("fsdp2", "hybrid_shard", None, None, "4+, by 2", ALL),
    "fsdp2_tp": ("fsdp2", "full_shard", None, None, "4+", ALL),
    "hsdp_tp": ("fsdp2", "hybrid_shard", None, None, "8+", ALL),
    "pipeline_1f1b": ("pipeline", "replicate", None, None, "2+", ()),
    "single": ("none", "replicate", None, None, "1", ()),
    "tp": ("fsdp2", "replicate", None, None, "2+", ()),
    "ulysses": ("deepspeed", "full_shard", None, None, "2+", ALL),
    "zero1": ("deepspeed", "shard_optimizer", None, None, "1+", ("optimizer",)),
    "zero2": ("deepspeed", "shard_grad_op", None, None, "1+", TWO),
    "zero2_cpu_offload": ("deepspeed", "shard_grad_op", "cpu", None, "1+", TWO),
    "zero3": ("deepspeed", "full_shard", None, None, "1+", ALL),
    "zero3_cpu_offload": ("deepspeed", "full_shard", "cpu", "cpu", "1+", ALL),
    "zero3_nvme_offload": ("deepspeed", "full_shard", "nvme", "nvme", "1+", ALL),
    "zeropp": ("deepspeed", "hybrid_shard", None, None, "8+, by 8", ALL),
}
# Dimensions from the outermost to the innermost; the others divide their ranks for data parallelism alone.
PARALLEL = {
    **{"cp": ["dp_shard", "cp"], "ep": ["dp_shard", "ep"], "ep_tp": ["dp_shard", "tp", "ep"]},
    **{"fsdp2_tp": ["dp_shard", "tp"], "hsdp_tp": ["dp_replicate", "dp_shard", "tp"], "ulysses": ["dp_shard", "sp"]},
    **{"tp": ["dp_replicate", "tp"], "pipeline_1f1b": ["dp_replicate", "pp"]},
}
# accelerate starts the ranks only; transformers shards the model while it loads it.
SHARDED_AT_LOAD = {"ep", "ep_tp", "fsdp2_tp", "hsdp_tp", "tp"}
# What only the machine or the model knows: the launcher and the training script give it.
MACHINE_FACTS = {
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu"),
    *("same_network", "rdzv_backend", "fsdp_transformer_layer_cls_to_wrap", "parallelism_config_dp_shard_size"),
}
# DeepSpeed's name of what `TrainingArguments` owns too; `zero_optimization` sizes follow the model and are its own.
OWNED_BY_TRAINING_ARGUMENTS = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "per_device_train_batch_size"),
    **{"gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm"},
    **{"bf16": "bf16", "fp16": "fp16", "optimizer": "optim", "scheduler": "lr_scheduler_type"},
}
ROW_KEYS = (
    "name engine sharding parallel offload_optimizer offload_param mixed_precision min_world_size accelerate_config"
    " deepspeed_config summary contract"
)


def test_every_preset_is_listed_with_the_documented_keys() -> None:
    found = listed_presets()
    assert list(found) == list(SPECIFIED) == preset_names() == [preset.name for preset in list_presets()]
    assert all(list(row) == ROW_KEYS.split() for row in found.values())
    assert {path.stem for path in JSONS} == {n for n in SPECIFIED if SPECIFIED[n][0] == "deepspeed"} - {"ulysses"}


@pytest.mark.parametrize("name", SPECIFIED)
def test_a_row_equals_what_the_files_specify(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sharding, optimizer, param, processes, sharded = SPECIFIED[name]
    yaml_path, json_path = ROOT / "accelerate_configs" / f"{name}.yaml", ROOT / "ds_configs" / f"{name}.json"
    json_path = json_path.with_stem("zero3") if name == "ulysses" else json_path
    has_json = engine == "deepspeed"
    monkeypatch.chdir(tmp_path)  # paths are absolute
    preset = load_preset(name)
    assert preset.as_row() == {
        "name": name, "engine": engine, "sharding": sharding, "parallel": PARALLEL.get(name, []),
        "offload_optimizer": optimizer, "offload_param": param, "mixed_precision": "bf16",
        "min_world_size": int(processes.partition("+")[0]), "accelerate_config": str(yaml_path),
        "deepspeed_config": str(json_path) if has_json else None,
        "summary": yaml_path.read_text().splitlines()[0].removeprefix("# "),
    }  # fmt: skip
    assert preset.summary.endswith(".")
    assert (preset.processes, preset.sharded_parts) == (processes, sharded)
    assert preset.sharded_at_load is (name in SHARDED_AT_LOAD)
    assert (preset.replicas, preset.dp_shard_size(16)) == ((2, 8) if name == "fsdp2_hybrid" else (1, None))
    assert (preset.needs_gpu is not None) is (name == "zeropp")
    assert (preset.deepspeed_config() is not None) is has_json
    assert [Path(path).name for path in preset.texts()] == [yaml_path.name, json_path.name][: 1 + has_json]


def test_a_preset_holds_no_node_specific_values() -> None:
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        keys = set(config) | {key for block in config.values() if isinstance(block, dict) for key in block}
        assert not keys & MACHINE_FACTS, path.name


def test_fields_that_training_arguments_own_are_auto() -> None:
    assert set(OWNED_BY_TRAINING_ARGUMENTS.values()) <= trainer_argument_names()
    for path in JSONS:
        config = json.loads(path.read_text())
        owned = {key: config[key] for key in OWNED_BY_TRAINING_ARGUMENTS if key in config}
        assert {"train_batch_size", "gradient_clipping", "bf16"} <= set(owned), path.name
        assert {value["enabled"] if isinstance(value, dict) else value for value in owned.values()} == {"auto"}


CPU = {"device": "cpu"}
QUANTIZED = {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True}
# `max_in_cpu` 0: otherwise the first 10^9 elements of each rank stay in host memory, and a small model never leaves it
SWAPPED = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "auto"},
    "offload_param": {"device": "nvme", "nvme_path": "auto", "max_in_cpu": 0},
    **{"sub_group_size": 10**8, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
}


@pytest.mark.parametrize(
    ("plain", "other", "block", "added"),
    [
        ("zero2", "zero2_cpu_offload", "zero_optimization", {"offload_optimizer": CPU}),
        ("zero3", "zero3_cpu_offload", "zero_optimization", {"offload_optimizer": CPU, "offload_param": CPU}),
        ("zero3", "zeropp", "zero_optimization", QUANTIZED),
        ("zero3", "zero3_nvme_offload", "zero_optimization", SWAPPED),
        ("fsdp2", "fsdp2_grad_op", "fsdp_config", {"fsdp_reshard_after_forward": False}),
        ("fsdp2", "fsdp2_cpu_offload", "fsdp_config", {"fsdp_offload_params": True}),
        ("fsdp2", "fsdp2_hybrid", "parallelism_config", {"parallelism_config_dp_replicate_size": 2}),
    ],
)
def test_a_variant_differs_only_in_what_its_name_says(
    plain: str, other: str, block: str, added: dict[str, Any]
) -> None:
    presets = (load_preset(plain), load_preset(other))
    whole, variant = (preset.deepspeed_config() or preset.accelerate_config() for preset in presets)
    assert variant == whole | {block: whole.get(block, {}) | added}


def test_a_users_yaml_is_loaded_by_its_path(tmp_path: Path) -> None:
    block = ", fsdp_reshard_after_forward: false, fsdp_offload_params: true}\nmixed_precision: fp16\n"
    preset = load_preset(str(write(tmp_path / "mine.yaml", FSDP2 + block)))
    assert (preset.name, preset.engine, preset.sharding) == ("mine", "fsdp2", "shard_grad_op")
    assert (preset.mixed_precision, preset.offload_optimizer, preset.offload_param) == ("fp16", "cpu", "cpu")
    preset = load_preset(str(write(tmp_path / "hybrid.yaml", f"{FSDP2}}}\n{MESH}2}}\n")))
    assert (preset.sharding, preset.min_world_size, preset.replicas) == ("hybrid_shard", 4, 2)


def test_a_json_beside_the_yaml_is_found(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "none"}}
    preset = load_preset(str(deepspeed_pair(tmp_path, {"fp16": {"enabled": True}, "zero_optimization": zero})))
    assert (preset.sharding, preset.mixed_precision) == ("full_shard", "fp16")
    assert (preset.offload_optimizer, preset.offload_param) == ("nvme", None)
    assert preset.deepspeed_config_path == (tmp_path / "mine.json").resolve()


SETTINGS = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}


@pytest.mark.parametrize(
    "text",
    [
        "|\n    " + json.dumps(SETTINGS, indent=2).replace("\n", "\n    "),
        f"'{json.dumps(SETTINGS)}'",
        base64.urlsafe_b64encode(json.dumps(SETTINGS).encode()).decode(),
    ],
)
def test_settings_in_the_yaml_itself_are_read_in_every_form_that_accelerate_takes(text: str, tmp_path: Path) -> None:
    block = f"{DEEPSPEED}deepspeed_config:\n  deepspeed_config_file: {text}\n"
    preset = load_preset(str(write(tmp_path / "mine.yaml", block)))
    assert (preset.sharding, preset.mixed_precision, preset.deepspeed_config_path) == ("shard_optimizer", "bf16", None)
    assert preset.deepspeed_config() == SETTINGS
    assert preset.settings_argument == json.dumps(SETTINGS)


DDP, FSDP, DEEPSPEED = (f"distributed_type: {name}\n" for name in ("MULTI_GPU", "FSDP", "DEEPSPEED"))
FSDP2 = FSDP + "fsdp_config: {fsdp_version: 2"
MESH = "parallelism_config: {parallelism_config_dp_replicate_size: "


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{FSDP}fsdp_config: {{fsdp_sharding_strategy: FULL_SHARD}}", "this is FSDP1, which presets do"),
        (f"{DEEPSPEED}deepspeed_config: {{zero_stage: 3}}", "names no deepspeed_config_file"),
        (f"{DEEPSPEED}deepspeed_config: {{deepspeed_config_file: gone.json}}", "file 'gone.json' does not exist"),
        (f"{DEEPSPEED}deepspeed_config: {{deepspeed_config_file: '{{'}}", "deepspeed_config_file, line 1: not JSON"),
        ("distributed_type: MEGATRON_LM", "expected one of NO, MULTI_GPU"),
        (f"{FSDP2}, parallel: [cp, dp_shard]}}", "['cp', 'dp_shard'], expected names in this order: dp_replicate, d"),
        (f"{DDP}fsdp_config: {{parallel: [dp_shard, cp]}}", "of the engine: ddp (dp_replicate, dp_shard, ep, tp) or"),
        (f"{DDP}fsdp_config: {{parallel: [xp]}}", "expected a list of dp_replicate, dp_shard, pp"),
    ],
)
def test_an_invalid_yaml_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as refused:
        read_preset(write(tmp_path / "mine.yaml", text))
    assert refused.value.message.startswith(f"{tmp_path / 'mine.yaml'}")
    assert why in refused.value.message


def test_an_unknown_preset_lists_all_and_a_missing_file_is_named() -> None:
    with pytest.raises(ToolkitError, match=f"unknown preset 'zero4'; available: {', '.join(SPECIFIED)}"):
        load_preset("zero4")
    with pytest.raises(ToolkitError, match=r"no such file: nowhere/mine\.yaml"):
        load_preset("nowhere/mine.yaml")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ddp_fp16", "did you mean `ddp`? fp16 is no preset: it is automatic"),
        ("qlora", "--lora-r 16 --load-in-4bit"),
        ("deepspeed_zero3", "did you mean `zero3`?"),
        ("zero3_offload", "did you mean `zero3_cpu_offload`?"),
        ("fsdp", "did you mean `fsdp2`?"),
        ("zero4", "did you mean `zero3`?"),
        ("ds_configs/zero3.json", "did you mean `zero3`?"),
        ("megatron", "see `toolkit presets`"),
    ],
)
def test_a_name_that_no_preset_has_is_answered_with_what_to_type(name: str, hint: str) -> None:
    with pytest.raises(ToolkitError, match="unknown preset") as caught:
        load_preset(name)
    assert hint in str(caught.value.hint)

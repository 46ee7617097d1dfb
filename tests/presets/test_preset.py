"""Presets: what their files specify, and which files are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from preset_files import deepspeed_pair, listed_presets, write

from toolkit.errors import ToolkitError
from toolkit.job.trainer_schema import trainer_argument_names
from toolkit.presets import list_presets, load_preset, preset_names, read_preset

ROOT = Path(__file__).parents[2]


YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


JSONS = sorted((ROOT / "ds_configs").glob("*.json"))


NAMES = [
    *("cp", "ddp", "ep", "ep_tp", "fsdp2", "fsdp2_cpu_offload", "fsdp2_grad_op", "fsdp2_hybrid", "fsdp2_tp"),
    *("hsdp_tp", "pipeline_1f1b", "single", "tp", "ulysses"),
    *("zero1", "zero2", "zero2_cpu_offload", "zero3", "zero3_cpu_offload", "zero3_nvme_offload", "zeropp"),
]


ROW_KEYS = (
    "name engine sharding parallel offload_optimizer offload_param mixed_precision min_world_size accelerate_config"
    " deepspeed_config summary contract"
)


# name: engine, sharding, offload of the optimizer, of the parameters, smallest world size, has a DeepSpeed JSON
PROMISES: dict[str, tuple[str, str, str | None, str | None, int, bool]] = {
    "cp": ("fsdp2", "full_shard", None, None, 2, False),
    "ddp": ("ddp", "replicate", None, None, 1, False),
    "ep": ("fsdp2", "full_shard", None, None, 2, False),
    "ep_tp": ("fsdp2", "full_shard", None, None, 4, False),
    "fsdp2": ("fsdp2", "full_shard", None, None, 2, False),
    "fsdp2_cpu_offload": ("fsdp2", "full_shard", "cpu", "cpu", 2, False),
    "fsdp2_grad_op": ("fsdp2", "shard_grad_op", None, None, 2, False),
    "fsdp2_hybrid": ("fsdp2", "hybrid_shard", None, None, 4, False),
    "fsdp2_tp": ("fsdp2", "full_shard", None, None, 4, False),
    "hsdp_tp": ("fsdp2", "hybrid_shard", None, None, 8, False),
    "pipeline_1f1b": ("pipeline", "replicate", None, None, 2, False),
    "single": ("none", "replicate", None, None, 1, False),
    "tp": ("fsdp2", "replicate", None, None, 2, False),
    "ulysses": ("deepspeed", "full_shard", None, None, 2, True),
    "zero1": ("deepspeed", "shard_optimizer", None, None, 1, True),
    "zero2": ("deepspeed", "shard_grad_op", None, None, 1, True),
    "zero2_cpu_offload": ("deepspeed", "shard_grad_op", "cpu", None, 1, True),
    "zero3": ("deepspeed", "full_shard", None, None, 1, True),
    "zero3_cpu_offload": ("deepspeed", "full_shard", "cpu", "cpu", 1, True),
    "zeropp": ("deepspeed", "hybrid_shard", None, None, 8, True),
    "zero3_nvme_offload": ("deepspeed", "full_shard", "nvme", "nvme", 1, True),
}


# Dimensions from the outermost to the innermost; the others divide their ranks for data parallelism alone.
PARALLEL = {
    "cp": ["dp_shard", "cp"],
    "ep": ["dp_shard", "ep"],
    "ep_tp": ["dp_shard", "tp", "ep"],
    "fsdp2_tp": ["dp_shard", "tp"],
    "hsdp_tp": ["dp_replicate", "dp_shard", "tp"],
    "pipeline_1f1b": ["dp_replicate", "pp"],
    "tp": ["dp_replicate", "tp"],
    "ulysses": ["dp_shard", "sp"],
}
# accelerate starts the ranks only; transformers shards the model while it loads it.
SHARDED_AT_LOAD = {"ep", "ep_tp", "fsdp2_tp", "hsdp_tp", "tp"}
JSON_OF = {"ulysses": "zero3"}


SHARDED_PARTS = {name: ("parameter", "gradient", "optimizer") for name in NAMES} | {
    "ddp": (),
    "pipeline_1f1b": (),
    "single": (),
    "tp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradient", "optimizer"),
    "zero2_cpu_offload": ("gradient", "optimizer"),
    "zero3": ("parameter", "gradient", "optimizer"),
    "zero3_cpu_offload": ("parameter", "gradient", "optimizer"),
    "zero3_nvme_offload": ("parameter", "gradient", "optimizer"),
}


# What only the machine or the model knows: the launcher and the training script give it.
MACHINE_FACTS = {
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "use_cpu"),
    *("same_network", "rdzv_backend", "fsdp_transformer_layer_cls_to_wrap", "parallelism_config_dp_shard_size"),
}


# DeepSpeed's name of what `TrainingArguments` owns too; `zero_optimization` sizes follow the model and are its own.
OWNED_BY_TRAINING_ARGUMENTS = {
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16": "bf16",
    "fp16": "fp16",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
}


def test_every_preset_is_listed_with_the_documented_keys() -> None:
    found = listed_presets()
    assert list(found) == NAMES == preset_names() == [preset.name for preset in list_presets()]
    assert all(list(row) == ROW_KEYS.split() for row in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_equals_what_the_files_specify(name: str) -> None:
    engine, sharding, optimizer, param, smallest, has_json = PROMISES[name]
    preset = load_preset(name)
    comment = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
    assert preset.as_row() == {
        "name": name,
        "engine": engine,
        "sharding": sharding,
        "parallel": PARALLEL.get(name, []),
        "offload_optimizer": optimizer,
        "offload_param": param,
        "mixed_precision": "bf16",
        "min_world_size": smallest,
        "accelerate_config": str(ROOT / "accelerate_configs" / f"{name}.yaml"),
        "deepspeed_config": str(ROOT / "ds_configs" / f"{JSON_OF.get(name, name)}.json") if has_json else None,
        "summary": comment,
    }
    assert preset.sharded_parts == SHARDED_PARTS[name]
    assert preset.sharded_at_load is (name in SHARDED_AT_LOAD)


def test_every_json_belongs_to_a_preset_of_its_name() -> None:
    assert [path.stem for path in YAMLS] == NAMES
    assert [path.stem for path in JSONS] == [name for name in NAMES if PROMISES[name][5] and name not in JSON_OF]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_the_first_line_says_when_to_choose_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_preset_holds_no_node_specific_values(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    keys = set(config) | {key for block in config.values() if isinstance(block, dict) for key in block}
    assert not keys & MACHINE_FACTS


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_fields_that_training_arguments_own_are_auto(path: Path) -> None:
    config = json.loads(path.read_text())
    assert set(OWNED_BY_TRAINING_ARGUMENTS.values()) <= trainer_argument_names()
    owned = {key: config[key] for key in OWNED_BY_TRAINING_ARGUMENTS if key in config}
    assert {"train_batch_size", "gradient_clipping", "bf16"} <= set(owned)
    values = {key: value["enabled"] if isinstance(value, dict) else value for key, value in owned.items()}
    assert set(values.values()) == {"auto"}


@pytest.mark.parametrize(
    ("plain", "other", "added"),
    [
        ("zero2", "zero2_cpu_offload", {"offload_optimizer": {"device": "cpu"}}),
        ("zero3", "zero3_cpu_offload", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (
            "zero3",
            "zeropp",
            {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        ),
    ],
)
def test_a_deepspeed_variant_differs_only_in_what_its_name_says(plain: str, other: str, added: dict[str, Any]) -> None:
    whole, variant = (json.loads((ROOT / "ds_configs" / f"{name}.json").read_text()) for name in (plain, other))
    assert variant["zero_optimization"] == whole["zero_optimization"] | added
    assert {key: variant[key] for key in variant if key != "zero_optimization"} == {
        key: whole[key] for key in whole if key != "zero_optimization"
    }


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("fsdp2_grad_op", {"fsdp_config": {"fsdp_reshard_after_forward": False}}),
        ("fsdp2_cpu_offload", {"fsdp_config": {"fsdp_offload_params": True}}),
        ("fsdp2_hybrid", {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}),
    ],
)
def test_an_fsdp2_variant_differs_only_in_what_its_name_says(name: str, changed: dict[str, Any]) -> None:
    plain, variant = load_preset("fsdp2").accelerate_config(), load_preset(name).accelerate_config()
    assert variant == {**plain, **{block: {**plain.get(block, {}), **keys} for block, keys in changed.items()}}


@pytest.mark.parametrize(
    ("name", "processes", "multiple", "replicas", "dp_shard_size_of_16"),
    [
        ("single", "1", 1, 1, None),
        ("zero3", "1+", 1, 1, None),
        ("fsdp2", "2+", 1, 1, None),
        ("fsdp2_hybrid", "4+, by 2", 2, 2, 8),
        ("cp", "2+", 1, 1, None),
        ("tp", "2+", 1, 1, None),
        ("ep", "2+", 1, 1, None),
        ("ep_tp", "4+", 1, 1, None),
        ("fsdp2_tp", "4+", 1, 1, None),
        ("hsdp_tp", "8+", 1, 1, None),
        ("ulysses", "2+", 1, 1, None),
        ("zeropp", "8+, by 8", 8, 1, None),
    ],
)
def test_a_preset_specifies_its_world_sizes(
    name: str, processes: str, multiple: int, replicas: int, dp_shard_size_of_16: int | None
) -> None:
    preset = load_preset(name)
    assert (preset.processes, preset.world_size_multiple, preset.replicas) == (processes, multiple, replicas)
    assert preset.dp_shard_size(16) == dp_shard_size_of_16


def test_only_quantised_weights_need_a_gpu() -> None:
    reasons = {preset.name: preset.needs_gpu for preset in list_presets() if preset.needs_gpu}
    assert reasons == {"zeropp": "zero_quantized_weights runs CUDA kernels of DeepSpeed's"}


# In a process of its own, since importing deepspeed prints and warns.
PARSE_ZEROPP = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig

config = json.load(open(sys.argv[1]))
config |= {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
config |= {"gradient_clipping": 1.0, "bf16": {"enabled": True}}
config["zero_optimization"] = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
zero = DeepSpeedConfig(config).zero_config
read = [int(zero.stage), zero.zero_hpz_partition_size, zero.zero_quantized_weights, zero.zero_quantized_gradients]
print("READ " + json.dumps(read))
"""


def test_deepspeed_itself_reads_zeropp() -> None:
    command = [sys.executable, "-c", PARSE_ZEROPP, str(ROOT / "ds_configs" / "zeropp.json")]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    read = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert read.returncode == 0, read.stderr[-2000:]
    assert json.loads(read.stdout.rpartition("READ ")[2]) == [3, 8, True, True]


def test_zero3_nvme_offload_is_zero3_with_what_swapping_needs() -> None:
    plain, swapped = (read_json(n) for n in ("zero3", "zero3_nvme_offload"))
    zero = swapped["zero_optimization"]
    assert zero.pop("offload_optimizer") == {"device": "nvme", "nvme_path": "auto"}
    # 0: otherwise the first 10^9 elements of each rank stay in host memory, and a small model never leaves it
    assert zero.pop("offload_param") == {"device": "nvme", "nvme_path": "auto", "max_in_cpu": 0}
    assert zero.pop("sub_group_size") == 10**8
    assert zero.pop("stage3_max_reuse_distance") == 0
    assert zero.pop("stage3_prefetch_bucket_size") == 0
    assert plain["zero_optimization"].pop("stage3_prefetch_bucket_size") == "auto"
    assert swapped == plain


def read_json(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    return config


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_itself_reads_the_yaml(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    kinds = {"none": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED", "pipeline": "MULTI_GPU"}
    kind = kinds[PROMISES[name][0]]
    assert config.distributed_type == ("MULTI_GPU" if name in SHARDED_AT_LOAD else kind)
    # -1 is accelerate's word for: `--num_processes` must be given
    assert config.num_processes == (1 if name == "single" else -1)


@pytest.mark.parametrize("name", NAMES)
def test_the_python_interface_gives_absolute_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = load_preset(name)
    config, deepspeed = preset.accelerate_config(), preset.deepspeed_config()
    if PROMISES[name][5]:
        assert Path(config["deepspeed_config"]["deepspeed_config_file"]).is_file()
        assert deepspeed is not None
        assert deepspeed["zero_optimization"]["stage"] == {"zero1": 1, "zero2": 2, "zero2_cpu_offload": 2}.get(name, 3)
        json_path = f"ds_configs/{JSON_OF.get(name, name)}.json"
        assert list(preset.texts()) == [f"accelerate_configs/{name}.yaml", json_path]
    else:
        assert deepspeed is None
        assert list(preset.texts()) == [f"accelerate_configs/{name}.yaml"]


def test_a_users_yaml_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        "distributed_type: FSDP\nmixed_precision: fp16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_offload_params: true}\n",
    )
    preset = load_preset(str(path))
    assert (preset.name, preset.engine, preset.sharding, preset.mixed_precision, preset.summary) == (
        "mine", "fsdp2", "shard_grad_op", "fp16", "",
    )  # fmt: skip
    assert (preset.offload_optimizer, preset.offload_param) == ("cpu", "cpu")
    assert preset.sharded_parts == ("parameter", "gradient", "optimizer")  # FSDP2 reshards after backward


def test_a_replicated_mesh_is_hybrid_shard(tmp_path: Path) -> None:
    block = "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n"
    path = write(tmp_path / "hybrid.yaml", f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n{block}")
    preset = load_preset(str(path))
    assert (preset.sharding, preset.min_world_size, preset.replicas) == ("hybrid_shard", 4, 2)


def test_a_json_beside_the_yaml_is_found(tmp_path: Path) -> None:
    path = deepspeed_pair(tmp_path, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    preset = load_preset(str(path))
    assert (preset.sharding, preset.mixed_precision) == ("shard_grad_op", "fp16")
    assert preset.deepspeed_config_path == (tmp_path / "mine.json").resolve()


def test_an_nvme_device_is_read_from_the_file(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
        "offload_param": {"device": "none"},
    }
    preset = load_preset(str(deepspeed_pair(tmp_path, {"zero_optimization": zero})))
    assert (preset.offload_optimizer, preset.offload_param) == ("nvme", None)


def refusal(path: Path) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        read_preset(path)
    assert str(path.parent) in caught.value.message
    return caught.value


@pytest.mark.parametrize("block", ["fsdp_config: {}", "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", ""])
def test_fsdp1_is_refused(block: str, tmp_path: Path) -> None:
    error = refusal(write(tmp_path / "mine.yaml", f"distributed_type: FSDP\n{block}\n"))
    assert "this is FSDP1" in error.message
    assert error.hint == "add `fsdp_version: 2`"


def test_an_fsdp1_word_for_resharding_is_refused(tmp_path: Path) -> None:
    block = "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: SHARD_GRAD_OP}"
    error = refusal(write(tmp_path / "mine.yaml", f"distributed_type: FSDP\n{block}\n"))
    assert "'SHARD_GRAD_OP', expected true or false" in error.message


def test_a_missing_json_is_refused(tmp_path: Path) -> None:
    path = deepspeed_pair(tmp_path, {})
    (tmp_path / "mine.json").unlink()
    assert "deepspeed_config_file 'mine.json' does not exist" in refusal(path).message


def test_deepspeed_without_a_json_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    assert "names no deepspeed_config_file" in refusal(path).message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("distributed_type: MEGATRON_LM", "expected one of NO, MULTI_GPU"),
        ("- a list", "holds list, expected keys and values"),
        ("a: [", "is not YAML: while parsing"),
        ("distributed_type: FSDP\nfsdp_config: true", "fsdp_config is True, expected keys and values"),
        ("1: 2", "has the key 1, expected a name"),
    ],
)
def test_an_invalid_yaml_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    assert why in refusal(write(tmp_path / "mine.yaml", text)).message


@pytest.mark.parametrize("size", [0, "8", True])
def test_an_invalid_hpz_partition_size_is_refused(size: object, tmp_path: Path) -> None:
    path = deepspeed_pair(tmp_path, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}})
    assert f"zero_hpz_partition_size is {size!r}, expected a whole number of 1 or more" in refusal(path).message


@pytest.mark.parametrize("size", [0, "two"])
def test_an_invalid_replicate_degree_is_refused(size: object, tmp_path: Path) -> None:
    block = f"parallelism_config: {{parallelism_config_dp_replicate_size: {size}}}"
    path = write(tmp_path / "mine.yaml", f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n{block}\n")
    assert (
        f"parallelism_config_dp_replicate_size is {size!r}, expected a whole number of 1 or more"
        in refusal(path).message
    )


def test_an_unknown_zero_stage_is_refused(tmp_path: Path) -> None:
    assert (
        "stage is 4, expected 0, 1, 2 or 3"
        in refusal(deepspeed_pair(tmp_path, {"zero_optimization": {"stage": 4}})).message
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, parallel: [cp, dp_shard]}",
         "fsdp_config.parallel is ['cp', 'dp_shard'], expected names in this order: dp_replicate, dp_shard, pp, cp"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {parallel: [tp, tp]}", "expected names in this order"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {parallel: [dp_shard, cp]}",
         "expected dimensions of the engine: ddp (dp_replicate, dp_shard, ep, tp) or pipeline (dp_replicate, pp)"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, parallel: [tp]}", "dimensions of the engine"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {parallel: [xp]}", "expected a list of dp_replicate, dp_shard, pp"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {parallel: tp}", "expected a list of dp_replicate, dp_shard, pp"),
    ],
)  # fmt: skip
def test_dimensions_that_an_engine_cannot_divide_are_refused(text: str, why: str, tmp_path: Path) -> None:
    assert why in refusal(write(tmp_path / "mine.yaml", text)).message


def test_an_unknown_preset_lists_all_and_names_the_nearest() -> None:
    with pytest.raises(ToolkitError, match=f"unknown preset 'zero4'; available: {', '.join(NAMES)}") as caught:
        load_preset("zero4")
    assert caught.value.hint == "did you mean `zero3`?"
    with pytest.raises(ToolkitError) as caught:
        load_preset("megatron")
    assert caught.value.hint == "see `toolkit presets`"


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ToolkitError, match=r"no such file: nowhere/mine\.yaml"):
        load_preset("nowhere/mine.yaml")

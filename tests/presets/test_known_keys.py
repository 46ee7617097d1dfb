"""The key lists equal those of the installed accelerate and DeepSpeed, and unknown keys are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from preset_files import deepspeed_pair, write

from toolkit.errors import ToolkitError
from toolkit.presets import known_keys as known
from toolkit.presets import read_preset


def refusal(path: Path) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        read_preset(path)
    assert str(path.parent) in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("distributed_typ: NO", "distributed_typ", "distributed_type"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forwrd: false}",
            "fsdp_reshard_after_forwrd",
            "fsdp_reshard_after_forward",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_fil: zero3.json}",
            "deepspeed_config_fil",
            "deepspeed_config_file",
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_shard_siz: 2}",
            "parallelism_config_dp_shard_siz",
            "parallelism_config_dp_shard_size",
        ),
    ],
)
def test_an_unknown_key_of_the_yaml_is_refused_with_the_nearest_one(
    text: str, key: str, nearest: str, tmp_path: Path
) -> None:
    error = refusal(write(tmp_path / "mine.yaml", text))
    assert f"unknown key '{key}'" in error.message
    assert error.hint == f"did you mean `{nearest}`?"


@pytest.mark.parametrize(
    ("config", "key", "nearest"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket": 5}}, "reduce_bucket", "reduce_bucket_size"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "devise", "device"),
    ],
)
def test_an_unknown_key_of_the_json_is_refused_with_the_nearest_one(
    config: dict[str, Any], key: str, nearest: str, tmp_path: Path
) -> None:
    error = refusal(deepspeed_pair(tmp_path, config))
    assert f"unknown key '{key}'" in error.message
    assert error.hint == f"did you mean `{nearest}`?"


@pytest.mark.parametrize("key", ["elasticity", "amp", "sparse_gradients"])
def test_a_key_that_deepspeed_removed_is_refused(key: str, tmp_path: Path) -> None:
    assert f"unknown key '{key}'" in refusal(deepspeed_pair(tmp_path, {key: {"enabled": False}})).message


def test_the_accelerate_keys_are_those_of_the_installed_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions}
    assert {field.name for field in dataclasses.fields(ClusterConfig)} == known.ACCELERATE_KEYS
    # `fsdp_ignored_modules` has no flag: accelerate reads it from the YAML alone.
    # `parallel` is the toolkit's own, which accelerate passes over.
    assert {flag for flag in flags if flag.startswith("fsdp_")} == known.FSDP_KEYS - {
        "fsdp_ignored_modules",
        "parallel",
    }
    assert {flag for flag in flags if flag.startswith("parallelism_config_")} == known.PARALLELISM_KEYS
    block = {flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_", "gradient_"))}
    assert block == known.DEEPSPEED_BLOCK_KEYS - {"parallel"}


# DeepSpeed's top level has no model: the dict notes which keys DeepSpeedConfig asks for. In a process of its own,
# since importing deepspeed prints and warns.
READ_DEEPSPEED_KEYS = """
import json
from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

class Watched(dict):
    asked = set()
    def __contains__(self, key): self.asked.add(key); return super().__contains__(key)
    def __getitem__(self, key): self.asked.add(key); return super().__getitem__(key)
    def get(self, key, default=None): self.asked.add(key); return super().get(key, default)
    def keys(self): return self
    def __copy__(self): return self

def current(model):
    fields = {field.alias or name: field.json_schema_extra or {} for name, field in model.model_fields.items()}
    return [name for name, extra in fields.items() if not extra.get("deprecated")]

config.DeepSpeedConfig(Watched(train_batch_size=1))
removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
print("KEYS " + json.dumps({
    "bf16": current(DeepSpeedBF16Config),
    "fp16": current(DeepSpeedFP16Config),
    "top": sorted(Watched.asked - removed - {"bfloat16"}),
    "zero": current(DeepSpeedZeroConfig),
    "offload_optimizer": current(DeepSpeedZeroOffloadOptimizerConfig),
    "offload_param": current(DeepSpeedZeroOffloadParamConfig),
}))
"""


def test_the_deepspeed_keys_are_those_of_the_installed_deepspeed() -> None:
    read = subprocess.run(
        [sys.executable, "-c", READ_DEEPSPEED_KEYS],
        env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = {name: set(keys) for name, keys in json.loads(read.stdout.rpartition("KEYS ")[2]).items()}
    assert found["top"] == known.DEEPSPEED_KEYS  # `bfloat16` is an old spelling of `bf16`
    assert found["zero"] == known.ZERO_KEYS
    assert {name: found[name] for name in ("bf16", "fp16")} == known.PRECISION_KEYS
    assert found["offload_optimizer"] == known.OFFLOAD_KEYS["offload_optimizer"]
    assert found["offload_param"] == known.OFFLOAD_KEYS["offload_param"]

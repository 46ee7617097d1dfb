"""Keys and types equal those of the installed accelerate and DeepSpeed; other keys and values are refused by name."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_command
from preset_files import deepspeed_pair, write

from toolkit.errors import ToolkitError
from toolkit.lint.rules.values import LOOSE_BLOCKS
from toolkit.presets import known_keys as known
from toolkit.presets import read_preset

FSDP: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
# Values that no key of these types takes.
WRONG: dict[str, list[Any]] = {
    "true or false": ["false", 1, [True], {"a": 1}],
    "true or false under FSDP2": ["SHARD_GRAD_OP", 1, None],
    "text in one line": [5, False, ["a"], {"a": "b"}, "", "a\nb", "\x1b[31m", "x" * 5000],
    "a whole number of 0 or more": [-1, 2.5, "8", True, [3], {}],
    "a whole number of 1 or more": [0, -1, 2.5, "8", True, [3], None],
    "a list": ["a", 3, {"a": 1}],
    "a list, or text": [3, True, {"a": 1}],
    "text": [5, False, ["a"]],
    "keys and values": ["a", 3, [{}], True],
    "0, 1, 2 or 3": [4, -1, "3", True, [3], None, 2.5],
    "none, cpu or nvme": ["disk", 1, ["cpu"], "auto"],
    "no, fp16 or bf16": [False, "fp8", ["bf16"], True],
    "nothing: no preset uses it": [{"training_script": "evil.py"}, "run.sh", True],
}


def preset_with(folder: Path, file: str, key: str, value: Any) -> Path:
    content: dict[str, Any] = json.loads(json.dumps(FSDP if file == "yaml" else {"zero_optimization": OFFLOADED}))
    block = content
    for part in key.split(".")[:-1]:
        block = block.setdefault(part, {})
    block[key.rpartition(".")[2]] = value
    return deepspeed_pair(folder, content) if file == "json" else write(folder / "mine.yaml", yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("file", "key", "nearest"),
    [
        ("yaml", "distributed_typ", "distributed_type"),
        ("yaml", "fsdp_config.fsdp_reshard_after_forwrd", "fsdp_reshard_after_forward"),
        ("json", "gradient_cliping", "gradient_clipping"),
        ("json", "zero_optimization.offload_param.devise", "device"),
        ("json", "elasticity", None),  # DeepSpeed removed it
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(
    file: str, key: str, nearest: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as refused:
        read_preset(preset_with(tmp_path, file, key, 1))
    assert refused.value.message.startswith(f"{tmp_path / f'mine.{file}'}: unknown key '{key.rpartition('.')[2]}'")
    assert nearest is None or refused.value.hint == f"did you mean `{nearest}`?"


def test_a_value_of_another_type_is_refused_by_file_and_key(tmp_path: Path) -> None:
    refused = 0
    for file, blocks in (("yaml", known.ACCELERATE_BLOCKS), ("json", known.DEEPSPEED_BLOCKS)):
        kinds = {f"{block}.{key}".lstrip("."): kind for block in blocks for key, kind in blocks[block].items()}
        for key, kind in kinds.items():
            for value in WRONG.get(kind.expected.removesuffix(', or "auto"'), [[[3]], {"a": [1]}]):
                if kind.accepts(value):
                    assert value is None or kind.expected.startswith(("text", "nothing", "a value that DeepSpeed"))
                    continue
                path = preset_with(tmp_path, file, key, value)
                with pytest.raises(ToolkitError) as error:
                    read_preset(path)
                message, refused = error.value.message, refused + 1
                assert message.startswith(f"{path.with_suffix(f'.{file}')}: ")
                assert key in message or "distributed_type" in message
                assert "expected" in message
                assert len(message) < len(str(path)) + 250
    assert refused > 500


def test_what_libraries_read_as_the_same_is_accepted(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": "auto", "offload_param": None}
    preset = read_preset(deepspeed_pair(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    assert (preset.sharding, preset.offload_param, preset.mixed_precision) == ("full_shard", None, "bf16")
    written_by_accelerate_config = (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "num_machines: 1\nnum_processes: 2\nrdzv_backend: static\ntpu_env: []\ntpu_use_cluster: false\n"
    )
    assert read_preset(write(tmp_path / "other.yaml", written_by_accelerate_config)).engine == "ddp"


@pytest.mark.parametrize("command", ["preset show", "plan", "train", "compare", "rehearse"])
def test_every_command_refuses_a_wrong_preset_in_two_lines(
    command: str, tmp_path: Path, tiny_model: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = str(preset_with(tmp_path, "json", "zero_optimization.stage", [3])), str(tmp_path / "out")
    job = ["--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca)]
    argv = {
        "preset show": ["preset", "show", path],
        "plan": ["plan", str(tiny_model), "--preset", path, "--gpu", "h100", "--num-processes", "2"],
        "train": ["train", "--preset", path, "--cpu", *job, "--output_dir", output],
        "compare": ["compare", "--preset", path, "--cpu", "--output-dir", output, *job],
        "rehearse": ["rehearse", "--preset", path, "--cpu", "--num-processes", "2", *job],
    }[command]
    code, _, printed = run_command(argv, capsys)
    assert (code, len(printed.splitlines()) <= 2, Path(output).exists()) == (2, True, False)
    assert printed.startswith(f"error: {tmp_path / 'mine.json'}: zero_optimization.stage is [3], expected 0, 1, 2 or 3")


def test_the_accelerate_keys_and_types_are_those_of_the_installed_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    accelerate = known.ACCELERATE_BLOCKS
    flags = {action.dest for action in launch_command_parser()._actions}
    types = {field.name: str(field.type) for field in dataclasses.fields(ClusterConfig)}
    assert types.keys() == accelerate[""].keys()
    # accelerate reads `fsdp_ignored_modules` from the YAML alone, and passes over `parallel`, which is the toolkit's.
    fsdp = {flag for flag in flags if flag.startswith("fsdp_")}
    assert fsdp == accelerate["fsdp_config"].keys() - {"fsdp_ignored_modules", "parallel"}
    assert {flag for flag in flags if flag.startswith("parallelism_config_")} == accelerate["parallelism_config"].keys()
    block = {flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_", "gradient_"))}
    assert block == accelerate["deepspeed_config"].keys() - {"parallel"}
    words = {"true or false": "bool", "a whole number of 0 or more": "int", "keys and values": "dict"}
    for key, kind in accelerate[""].items():
        assert words.get(kind.expected, "") in types[key], key


# DeepSpeed's top level has no model: the dict notes which keys DeepSpeedConfig asks for. In a process of its own,
# since importing deepspeed prints and warns.
READ_DEEPSPEED = """
import json
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

class Watched(dict):
    def __init__(self, **values): self.asked = set(); super().__init__(**values)
    def __contains__(self, key): self.asked.add(key); return super().__contains__(key)
    def __getitem__(self, key): self.asked.add(key); return super().__getitem__(key)
    def get(self, key, default=None): self.asked.add(key); return super().get(key, default)
    def keys(self): return self
    def __copy__(self): return self

loose = {name: Watched() for name in LOOSE}
watched = Watched(train_batch_size=1, **loose)
config.DeepSpeedConfig(watched)
models = {
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.zenflow": ZenFlowConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "hybrid_engine": config.HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}
fields = {
    block: {field.alias or name: field for name, field in model.model_fields.items()} for block, model in models.items()
}
print("READ " + json.dumps({
    "": sorted(watched.asked - set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) - {"bfloat16"}),
    **{block: sorted(values.asked) for block, values in loose.items()},
    **{
        block: [name for name, field in of_block.items() if not (field.json_schema_extra or {}).get("deprecated")]
        for block, of_block in fields.items()
    },
    "types": {block: {name: str(field.annotation) for name, field in of_block.items()}
              for block, of_block in fields.items()},
}))
"""
# Keys that DeepSpeed asks for only beside others.
ASKED_LATE = {"torch_autocast": {"dtype", "lower_precision_safe_modules"}}


@pytest.mark.nightly
def test_the_deepspeed_keys_and_types_are_those_of_the_installed_deepspeed() -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", READ_DEEPSPEED.replace("LOOSE", repr(LOOSE_BLOCKS))]
    read = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(read.stdout.rpartition("READ ")[2])
    types = found.pop("types")
    assert {block: {*keys, *ASKED_LATE.get(block, ())} for block, keys in found.items()} == {
        block: set(keys) for block, keys in known.DEEPSPEED_BLOCKS.items()
    }
    words = {"true or false": "bool", "keys and values": "deepspeed", "whole number": "int", "list": "list"}
    for block, key in ((place, key) for place in types for key in known.DEEPSPEED_BLOCKS[place]):
        kind, named = known.DEEPSPEED_BLOCKS[block][key].expected, types[block][key]
        if key not in ("stage", "tp", "partition_config") and not kind.startswith("a value"):
            found_words = {word for word, name in words.items() if re.search(rf"\b{name}\b", named.lower())}
            assert {word for word in words if word in kind} == found_words, (block, key)
            may_be_null = "Optional" in named or "None" in named or key == "leaf_module"
            assert known.DEEPSPEED_BLOCKS[block][key].accepts(None) == may_be_null, key

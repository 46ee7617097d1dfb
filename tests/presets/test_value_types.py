"""The types of a preset's values are those of the installed libraries, and every other type is refused by its key."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from preset_files import deepspeed_pair, write

from toolkit.cli.program import main
from toolkit.errors import ToolkitError
from toolkit.presets import known_keys, read_preset, value_types

FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
# Values that no key of these types takes, and one that is `null` where null means nothing.
WRONG: dict[str, list[Any]] = {
    "true or false": ["false", 1, [True], {"a": 1}],
    'true or false, or "auto"': ["false", 1, [True]],
    "true or false under FSDP2": ["SHARD_GRAD_OP", 1, None],
    "text in one line": [5, False, ["a"], {"a": "b"}, "", "a\nb", "\x1b[31m", "x" * 5000],
    "a whole number of 0 or more": [-1, 2.5, "8", True, [3], {}],
    'a whole number of 0 or more, or "auto"': [-1, 2.5, "8", True, [3], {}],
    "a whole number of 1 or more": [0, -1, 2.5, "8", True, [3], None],
    'a whole number of 1 or more, or "auto"': [0, -1, 2.5, "8", True, [3], None],
    "keys and values": ["a", 3, [{}], True],
    "0, 1, 2 or 3": [4, -1, "3", True, [3], None, 2.5],
    "none, cpu or nvme": ["disk", 1, ["cpu"], "auto"],
    "no, fp16 or bf16": [False, "fp8", ["bf16"], True],
    "nothing: no preset uses it": [{"training_script": "evil.py"}, "run.sh", True],
}


def places() -> list[tuple[str, str, value_types.ValueType]]:
    """Return the file, the dotted key and the type of every value whose type is known."""
    files = {"yaml": value_types.ACCELERATE_BLOCKS, "json": value_types.DEEPSPEED_BLOCKS}
    return [
        (file, f"{block}.{key}" if block else key, kind)
        for file, blocks in files.items()
        for block, types in blocks.items()
        for key, kind in types.items()
    ]


def preset_with(folder: Path, file: str, key: str, value: Any) -> Path:
    """Write a valid preset, except for one value."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    content: dict[str, Any] = {"json": {"zero_optimization": zero}, "yaml": yaml.safe_load(FSDP)}[file]
    block = content
    for part in key.split(".")[:-1]:
        block = block.setdefault(part, {})
    block[key.rpartition(".")[2]] = value
    return deepspeed_pair(folder, content) if file == "json" else write(folder / "mine.yaml", yaml.safe_dump(content))


@pytest.mark.parametrize(("file", "key", "kind"), places(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_value_of_another_type_is_refused_by_file_and_key(
    file: str, key: str, kind: value_types.ValueType, tmp_path: Path
) -> None:
    wrong = WRONG.get(kind.expected, [[[3]], {"a": [1]}])
    for number, value in enumerate(wrong):
        if kind.accepts(value):
            assert value is None or kind.expected.startswith(("text", "nothing"))
            continue
        path = preset_with(tmp_path / str(number), file, key, value)
        with pytest.raises(ToolkitError) as refused:
            read_preset(path)
        message = refused.value.message
        assert message.startswith(f"{path.with_suffix(f'.{file}')}: ")
        assert key in message or "distributed_type" in message
        assert "expected" in message
        assert len(message) < len(str(path)) + 250


def test_every_known_key_of_an_accelerate_yaml_has_a_type() -> None:
    assert value_types.ACCELERATE_TYPES.keys() == known_keys.ACCELERATE_KEYS
    assert value_types.FSDP_TYPES.keys() == known_keys.FSDP_KEYS
    assert value_types.DEEPSPEED_BLOCK_TYPES.keys() == known_keys.DEEPSPEED_BLOCK_KEYS
    assert value_types.PARALLELISM_TYPES.keys() == known_keys.PARALLELISM_KEYS


def test_every_known_key_of_zero_has_a_type_and_every_other_type_belongs_to_a_known_key() -> None:
    assert value_types.ZERO_TYPES.keys() == known_keys.ZERO_KEYS
    assert value_types.DEEPSPEED_TYPES.keys() <= known_keys.DEEPSPEED_KEYS
    for part, keys in known_keys.OFFLOAD_KEYS.items():
        types = value_types.DEEPSPEED_BLOCKS[f"zero_optimization.{part}"]
        assert types.keys() == keys


def test_the_types_are_those_of_the_installed_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    types = {field.name: str(field.type) for field in dataclasses.fields(ClusterConfig)}
    for key, kind in value_types.ACCELERATE_TYPES.items():
        if kind.expected == "true or false":
            assert "bool" in types[key], key
        if kind.expected == "a whole number of 0 or more":
            assert "int" in types[key], key
        if kind.expected == "keys and values":
            assert "dict" in types[key], key


# In a process of its own, since importing deepspeed prints and warns.
READ_TYPES = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
print("TYPES " + json.dumps({f.alias or n: str(f.annotation) for n, f in DeepSpeedZeroConfig.model_fields.items()}))
"""


def test_the_types_are_those_of_the_installed_deepspeed() -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    read = subprocess.run(
        [sys.executable, "-c", READ_TYPES], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    types = json.loads(read.stdout.rpartition("TYPES ")[2])
    for key, kind in value_types.ZERO_TYPES.items():
        assert ("true or false" in kind.expected) == ("bool" in types[key]), key
        assert ("whole number" in kind.expected) == ("'int'" in types[key]), key
        assert ("keys and values" in kind.expected) == ("deepspeed" in types[key] and key != "stage"), key


def test_what_libraries_read_as_the_same_is_accepted(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": "auto", "offload_param": None}
    preset = read_preset(deepspeed_pair(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    assert (preset.sharding, preset.offload_param, preset.mixed_precision) == ("full_shard", None, "bf16")
    written_by_accelerate_config = (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\ngpu_ids: all\nmachine_rank: 0\nmain_training_function: main\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\nrdzv_backend: static\nsame_network: true\n"
        "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )
    assert read_preset(write(tmp_path / "other.yaml", written_by_accelerate_config)).engine == "ddp"


@pytest.mark.parametrize("command", ["preset show", "plan", "train", "compare", "rehearse"])
def test_every_command_refuses_a_wrong_preset_in_two_lines(
    command: str, tmp_path: Path, tiny_model: Path, faq_alpaca: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(preset_with(tmp_path, "json", "zero_optimization.stage", [3]))
    job = ["--", "--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca)]
    output = str(tmp_path / "out")
    argv = {
        "preset show": ["preset", "show", path],
        "plan": ["plan", str(tiny_model), "--preset", path, "--gpu", "h100", "--num-processes", "2"],
        "train": ["train", "--preset", path, "--cpu", *job, "--output_dir", output],
        "compare": ["compare", "--preset", path, "--cpu", "--output-dir", output, *job],
        "rehearse": ["rehearse", "--preset", path, "--cpu", "--num-processes", "2", *job],
    }[command]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len(lines) <= 2
    assert lines[0].startswith(
        f"error: {tmp_path / 'mine.json'}: zero_optimization.stage is [3], expected 0, 1, 2 or 3"
    )
    assert not Path(output).exists()

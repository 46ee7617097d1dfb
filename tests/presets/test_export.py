"""`toolkit preset show | export`: files that hold from any working directory, and nothing overwritten by accident."""

import json
from pathlib import Path

import pytest
import yaml
from command_line import run_command
from launching import ROOT
from preset_files import deepspeed_pair, write
from transformers import HfArgumentParser, TrainingArguments

from toolkit.engines.fsdp2 import FSDP_ENVIRONMENT_KEYS
from toolkit.errors import ToolkitError
from toolkit.launch.command import launcher_environment
from toolkit.presets import list_presets, load_preset, preset_names, read_preset
from toolkit.presets.export import export_presets, preset_text
from toolkit.presets.training_arguments import strategy_variables, trainer_arguments

DEEPSPEED = [preset.name for preset in list_presets() if preset.engine == "deepspeed"]
FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize("name", preset_names())
def test_the_files_are_shown_as_they_are(name: str) -> None:
    preset = load_preset(name)
    text = preset_text(preset, "accelerate")
    assert yaml.safe_load(text) == preset.accelerate_config()
    assert text == preset.accelerate_config_path.read_text()
    if name in DEEPSPEED:
        assert json.loads(preset_text(preset, "deepspeed")) == preset.deepspeed_config()
    else:
        with pytest.raises(ToolkitError, match=f"'{name}' has no DeepSpeed JSON: its engine is {preset.engine}"):
            preset_text(preset, "deepspeed")


def test_a_json_that_the_yaml_names_is_found_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "mine.json", "{}")
    text = "# Why.\n{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: mine.json}}\n"
    shown = preset_text(read_preset(write(tmp_path / "mine.yaml", text)), "accelerate")
    assert shown.startswith("# Why.\n")
    assert yaml.safe_load(shown)["deepspeed_config"] == {"deepspeed_config_file": str(tmp_path / "mine.json")}


def test_the_command_prints_what_was_asked_for_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "ds_configs" / "zero2.json").read_text()
    assert run_command(["preset", "show", "zero2", "--as", "deepspeed"], capsys) == (0, text, "")
    refused = run_command(["preset", "show", "zero2", "--as", "megatron"], capsys)
    assert refused == (2, "", "error: --as megatron is not one of accelerate, deepspeed, trainer\n")


@pytest.mark.parametrize("name", ["ddp", "zero3", *(name for name in preset_names() if name.startswith("fsdp2"))])
def test_transformers_itself_takes_the_trainers_form(name: str, tmp_path: Path) -> None:
    told = yaml.safe_load(preset_text(load_preset(name), "trainer"))
    assert Path(told.pop("deepspeed", ROOT)).exists()  # DeepSpeed's own parsing has its tests under torchrun
    told |= {"output_dir": str(tmp_path), "use_cpu": True}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(told)
    assert arguments.bf16 is True
    if load_preset(name).traits.uses_fsdp_plugin:
        plugin = arguments.fsdp_plugin_args
        assert (plugin["fsdp_version"], plugin["state_dict_type"]) == (2, "SHARDED_STATE_DICT")
        assert plugin["reshard_after_forward"] is (name != "fsdp2_grad_op")
        assert plugin.get("cpu_offload", False) is (name == "fsdp2_cpu_offload")


LINES = {
    "fsdp2_hybrid": [
        "#   export FSDP_CPU_RAM_EFFICIENT_LOADING=true",
        "#   export PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2",
        "#   export PARALLELISM_CONFIG_DP_SHARD_SIZE=...  (processes / 2)",
    ],
    "ep_tp": [
        '#   args = preset.training_arguments(output_dir="out", tp=2, ep=2, save_strategy="no")',
        "#   model = AutoModelForCausalLM.from_pretrained(..., **preset.from_pretrained_arguments())",
    ],
    "cp": ['#   args = preset.training_arguments(output_dir="out", cp=2)', "#   export FSDP_VERSION=2"],
}


@pytest.mark.parametrize("name", LINES)
def test_what_only_the_environment_or_python_carries_is_told_in_comments(name: str) -> None:
    assert set(LINES[name]) <= set(preset_text(load_preset(name), "trainer").splitlines())


@pytest.mark.parametrize("name", preset_names())
def test_the_variables_beside_the_arguments_equal_those_of_accelerates_launcher(name: str) -> None:
    preset = load_preset(name)
    launched = launcher_environment(preset, world_size=8)
    ours = strategy_variables(preset, precision=launched["ACCELERATE_MIXED_PRECISION"], world_size=8)
    assert {key: launched.get(key) for key in ours} == ours
    for switch in ("DEEPSPEED", "FSDP", "PARALLELISM_CONFIG"):
        assert ours.get(f"ACCELERATE_USE_{switch}") == launched.get(f"ACCELERATE_USE_{switch}")


def test_keys_that_the_environment_carries_are_not_lost(tmp_path: Path) -> None:
    keys = "  fsdp_activation_checkpointing_offload: true\n  fsdp_ignored_modules: lm_head\n"
    preset = read_preset(write(tmp_path / "mine.yaml", FSDP + keys))
    assert trainer_arguments(preset, precision="no")["fsdp_config"] == {"version": 2}
    environment = strategy_variables(preset, precision="no")
    assert [environment[key.upper()] for key in FSDP_ENVIRONMENT_KEYS] == ["true", "lm_head"]


@pytest.mark.parametrize("line", ["enable_cpu_affinity: true", "dynamo_config: {dynamo_backend: INDUCTOR}"])
def test_a_key_that_only_the_launcher_reads_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=f"training arguments cannot carry '{line.split(':')[0]}'"):
        trainer_arguments(read_preset(write(tmp_path / "mine.yaml", f"{FSDP}{line}\n")), precision="no")


def test_a_pair_is_written_side_by_side_and_read_back_the_same(tmp_path: Path) -> None:
    written = export_presets(list_presets(), tmp_path / "mine", force=False)
    assert {path.name for path in written} == {path.name for path in (tmp_path / "mine").iterdir()}
    assert len(written) == len(preset_names()) + len(DEEPSPEED)
    for preset in list_presets():
        copy = read_preset(tmp_path / "mine" / f"{preset.name}.yaml")
        assert copy.deepspeed_config() == preset.deepspeed_config()
        paths = {"accelerate_config": "", "deepspeed_config": ""}
        assert copy.as_row() | paths == preset.as_row() | paths


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    write(tmp_path / "zero2.json", "mine")
    with pytest.raises(ToolkitError, match=r"zero2\.json exists already; nothing was written"):
        export_presets([load_preset("ddp"), load_preset("zero2")], tmp_path, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["zero2.json"]
    with pytest.raises(ToolkitError, match=r"zero2\.json cannot be written"):
        export_presets([load_preset("ddp")], tmp_path / "zero2.json", force=False)
    export_presets([load_preset("zero2")], tmp_path, force=True)
    assert json.loads((tmp_path / "zero2.json").read_text()) == load_preset("zero2").deepspeed_config()


def test_a_relative_folder_gives_an_absolute_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    deepspeed_pair(tmp_path, {"zero_optimization": {"stage": 2}})
    code, shown, _ = run_command(["preset", "export", "here", "mine.yaml", "zero1"], capsys)
    assert (code, shown.split()) == (0, ["here/mine.yaml", "here/mine.json", "here/zero1.yaml", "here/zero1.json"])
    config = yaml.safe_load((tmp_path / "here" / "mine.yaml").read_text())
    assert config["deepspeed_config"]["deepspeed_config_file"] == str(tmp_path / "here" / "mine.json")
    assert (tmp_path / "here" / "zero1.yaml").read_text() == (ROOT / "accelerate_configs" / "zero1.yaml").read_text()


def test_one_file_of_a_pair_that_was_changed_is_not_passed_over(tmp_path: Path) -> None:
    """accelerate reads the YAML alone: a change of the JSON would have no effect there."""
    export_presets([load_preset("zero3")], tmp_path, force=False)
    changed = (tmp_path / "zero3.json").read_text().replace('"stage": 3', '"stage": 2')
    write(tmp_path / "zero3.json", changed)
    with pytest.raises(
        ToolkitError, match=r"zero3\.json differs from the settings in .*zero3\.yaml, which are"
    ) as caught:
        read_preset(tmp_path / "zero3.yaml")
    assert f"`deepspeed_config_file: {tmp_path / 'zero3.json'}`" in str(caught.value.hint)
    write(tmp_path / "zero3.yaml", (tmp_path / "zero3.yaml").read_text().replace('"stage": 3', '"stage": 2'))
    assert read_preset(tmp_path / "zero3.yaml").sharding == "shard_grad_op"

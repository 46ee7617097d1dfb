"""Configurations of other tools that are wrong or meant to harm: two lines, and nothing of theirs in our files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.program import main
from toolkit.convert import convert_file, yaml_text
from toolkit.errors import ToolkitError

AXOLOTL = {"base_model": "m", "micro_batch_size": 2, "datasets": [{"path": "rows.jsonl"}]}
LLAMA_FACTORY = {"model_name_or_path": "m", "dataset": "rows", "template": "x"}
TRL = {"model_name_or_path": "m", "dataset_name": "a/b", "use_peft": True}


def written(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_key_with_a_line_break_cannot_add_an_argument(tmp_path: Path) -> None:
    breaks = ["\n", "\r", "\x85", "\u2028"]
    settings = AXOLOTL | {f"x{mark}trust_remote_code: true #": mark for mark in breaks}
    conversion = convert_file(written(tmp_path, settings), "axolotl")
    text = yaml_text(conversion, source="a\ntrust_remote_code: true", file="b\ntrust_remote_code: true")
    assert "trust_remote_code" in text, "the keys are listed in a comment"
    assert "trust_remote_code" not in yaml.safe_load(text)
    assert len(conversion.not_converted) >= len(breaks)


@pytest.mark.parametrize(
    ("tool", "settings", "words"),
    [
        (
            "llama-factory",
            LLAMA_FACTORY | {"dataset": "five"},
            "dataset_info.json: five is 5, expected keys and values",
        ),
        (
            "llama-factory",
            LLAMA_FACTORY | {"dataset": "file"},
            "dataset_info.json: file: file_name is 5, expected text",
        ),
        ("llama-factory", LLAMA_FACTORY | {"dataset": "columns"}, "prompt is [1], expected text"),
        ("trl", TRL | {"accelerate_config": "accelerate.yaml"}, "fsdp_config is ['a'], expected keys and values"),
        (
            "axolotl",
            AXOLOTL | {"datasets": [{"path": "a.jsonl", "message_property_mappings": True}]},
            "theirs.yaml: datasets[0]: message_property_mappings is True, expected keys and values",
        ),
    ],
)
def test_a_nested_value_of_another_type_is_refused_by_its_name(
    tool: str, settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("accelerate.yaml").write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": ["a"]}))
    Path("data").mkdir()
    columns = {"hf_hub_url": "a/b", "columns": {"prompt": [1]}}
    entries = {"five": 5, "file": {"file_name": 5}, "columns": columns}
    Path("data/dataset_info.json").write_text(json.dumps(entries))
    with pytest.raises(ToolkitError) as refused:
        convert_file(written(tmp_path, settings), tool)
    assert words in refused.value.message


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
@pytest.mark.parametrize("tool", ["axolotl", "llama-factory", "trl"])
def test_a_name_that_no_file_has_is_no_traceback(tool: str, name: str, tmp_path: Path) -> None:
    settings = {
        "axolotl": AXOLOTL | {"deepspeed": name, "datasets": [{"path": name}]},
        "llama-factory": LLAMA_FACTORY | {"dataset_dir": name},
        "trl": TRL | {"accelerate_config": name, "dataset_name": name},
    }[tool]
    with pytest.raises(ToolkitError, match="path") as refused:
        convert_file(written(tmp_path, settings), tool)
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    ("output", "message"),
    [("theirs.yaml", "is the input"), ("link.yaml", "is the input"), ("folder", "error: cannot write ")],
)
def test_the_input_and_a_folder_are_never_overwritten(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = written(tmp_path, AXOLOTL)
    before = theirs.read_text()
    (tmp_path / "link.yaml").symlink_to(theirs)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["convert-config", str(theirs), "--output", str(tmp_path / output), "--force"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert (ended.value.code, len(lines), theirs.read_text()) == (2, 2, before)
    assert message in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link.yaml", "theirs.yaml"]


def test_a_script_of_a_million_lines_is_refused_by_its_size(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl x\n" * 1_000_000)
    with pytest.raises(ToolkitError, match="more than 256 KiB"):
        convert_file(script)

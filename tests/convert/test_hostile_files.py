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


WRONG_ENTRIES: list[Any] = [5, {"file_name": 5}, {"hf_hub_url": "a/b", "columns": {"prompt": [1]}}]


@pytest.mark.parametrize("entry", WRONG_ENTRIES, ids=str)
def test_an_entry_of_dataset_info_with_wrong_types_is_refused_by_its_name(entry: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = tmp_path / "data" / "dataset_info.json"
    info.write_text(json.dumps({"rows": entry}))
    with pytest.raises(ToolkitError, match="expected") as refused:
        convert_file(written(tmp_path, LLAMA_FACTORY), "llama-factory")
    assert str(info) in refused.value.message
    assert "rows" in refused.value.message


@pytest.mark.parametrize(("kind", "key"), [("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")])
def test_a_block_of_an_accelerate_file_with_another_type_is_refused(
    kind: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("accelerate.yaml").write_text(yaml.safe_dump({"distributed_type": kind, key: ["a"]}))
    with pytest.raises(ToolkitError, match=f"{key} is .*, expected keys and values"):
        convert_file(written(tmp_path, TRL | {"accelerate_config": "accelerate.yaml"}), "trl")


def test_a_nested_setting_with_another_type_is_refused_by_file_and_key(tmp_path: Path) -> None:
    path = written(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl", "message_property_mappings": True}]})
    with pytest.raises(ToolkitError, match="message_property_mappings is True, expected keys and values") as refused:
        convert_file(path, "axolotl")
    assert str(path) in refused.value.message


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


@pytest.mark.parametrize("how", ["itself", "a link to it"])
def test_the_input_is_never_overwritten(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = written(tmp_path, AXOLOTL)
    before, output = theirs.read_text(), theirs
    if how != "itself":
        output = tmp_path / "link.yaml"
        output.symlink_to(theirs)
    with pytest.raises(SystemExit) as ended:
        main(["convert-config", str(theirs), "--output", str(output), "--force"])
    assert ended.value.code == 2
    assert "is the input" in capsys.readouterr().err
    assert theirs.read_text() == before


def test_an_output_that_is_a_folder_is_refused_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, output = written(tmp_path, AXOLOTL), tmp_path / "folder"
    output.mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["convert-config", str(theirs), "--output", str(output), "--force"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert (ended.value.code, len(lines)) == (2, 2)
    assert lines[0] == f"error: cannot write {output}: Is a directory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "theirs.yaml"]


def test_a_script_of_a_million_lines_is_refused_by_its_size(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl x\n" * 1_000_000)
    with pytest.raises(ToolkitError, match="more than 256 KiB"):
        convert_file(script)

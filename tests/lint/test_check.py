"""Linting any file: findings, or one clear error."""

import json
import os
from pathlib import Path

import pytest
from command_line import run_command
from launching import ROOT

from toolkit.errors import ToolkitError
from toolkit.lint.check import fixed_text, lint_paths


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: !!python/object/apply:os.system ['touch executed']", "names an object; nothing was"),
        (b"", "contains NoneType, expected keys and values"),
        (b"{a: 1}: 2", "a key that is not a string"),
        (b"rows: 1\ncolumns: 2\n", "is neither an accelerate configuration nor"),
        # keys that many programs have, and one among many others
        (b"name: a\nwandb: true\n", "is neither an accelerate configuration nor"),
        (b"optimizer: {_component_: torch.optim.AdamW}\nepochs: 1\n", "is neither an accelerate configuration nor"),
        (b'{"amp": 1, "a": 2, "b": 3}', "is neither an accelerate configuration nor"),
        (b"a: \xff\n", "is not UTF-8 text: byte 3"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused_with_the_reason(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_bytes(content)
    with pytest.raises(ToolkitError, match=why):
        lint_paths([Path("a.yaml")])
    assert not Path("executed").exists()


def test_a_missing_file_and_a_folder_without_configurations_are_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "b.yaml", "no such file"), (tmp_path, "no configuration in")):
        with pytest.raises(ToolkitError, match=message):
            lint_paths([path])


def test_of_several_named_files_one_that_is_no_configuration_keeps_no_other_from_being_linted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FDSP\n")
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 2} "bf16": 1}\n')
    code, out, err = run_command(["lint", *sorted(map(str, tmp_path.iterdir()))], capsys)
    assert code == 2
    assert "a.yaml:1: error[unknown-word]" in out
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert ["b.json" in errors[0], "train.py" in errors[1], len(errors)] == [True, True, 2]


def test_positions_are_right_after_characters_of_several_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# é 😀\ndistributed_type: FSDP  # 😀\nfsdp_config: {fsdp_versoin: 2}\n")
    assert fixed_text(tmp_path / "a.yaml").splitlines()[2] == "fsdp_config: {fsdp_version: 2}"


# -- folders


def test_a_folder_with_pipes_devices_links_in_circles_and_bombs_is_linted_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "circle.yaml").symlink_to("circle.yaml")
    (folder / "inside" / "above").symlink_to(folder)
    levels = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 15)]
    (folder / "bomb.yaml").write_text("\n".join(["distributed_type: FSDP", "k0: &k0 [x, x]", *levels]))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "data.json").write_text(json.dumps(list(range(50_000))))
    (folder / "inside" / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    linted = lint_paths([folder])
    assert [Path(file).name for file in linted.files] == ["fsdp.yaml"]
    assert [finding.rule for finding in linted.findings] == ["fsdp1-by-omission"]
    assert linted.unreadable == []


def test_a_folder_of_more_files_than_any_repository_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.lint.check.MAX_FILES", 1)
    with pytest.raises(ToolkitError, match="more than 1 YAML, JSON and shell files"):
        lint_paths([ROOT / "examples"])


def test_rows_of_a_dataset_and_records_of_runs_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("toolkit.lint.check.MAX_OF_FOLDER", 2)
    for name in ("a.yaml", "rows/1.yaml", "rows/2.yaml", "rows/3.yaml", "wandb/run-20260101_010101-ab/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("distributed_type: MULTI_GPU\n")
    assert [Path(each).name for each in lint_paths([tmp_path]).files] == ["a.yaml"]


def test_a_key_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "\x1b[2J\nerror: done": 1}))
    code, printed, _ = run_command(["lint", str(path)], capsys)
    assert (code, "\x1b" in printed) == (1, False)
    assert r"\x1b[2J\nerror: done" in printed


# -- DeepSpeed's settings inside of a YAML


INNER = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: |  # in place of a path
    {
      "bf16": {"enabled": true},
      "gradient_clipping": 0.5,
      "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "cpu"}
      }
    }
"""


def test_settings_inside_of_a_yaml_are_linted_on_the_lines_that_they_have_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(INNER)
    linted = lint_paths([path])
    assert [(finding.rule, finding.line) for finding in linted.findings] == [
        ("not-auto", 5),
        ("not-auto", 6),
        ("offload-param-below-stage-3", 9),
    ]
    assert (linted.files, {finding.file for finding in linted.findings}) == ([str(path)], {str(path)})
    assert fixed_text(path) == INNER
    path.write_text(INNER.replace('"stage": 2,', '"stage": 2'))
    with pytest.raises(ToolkitError, match=r"mine\.yaml, line 9: not JSON"):
        lint_paths([path])


def test_our_own_files_have_no_finding_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lint_paths([ROOT / "accelerate_configs", ROOT / "ds_configs"]).findings == []


def test_a_word_is_checked_with_the_library_that_reads_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FDSP\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}\n')
    (tmp_path / "c.yaml").write_text("per_device_train_batch_size: 1\noutput_dir: o\neval_strategy: step\n")
    found = [each.checked_against.split()[0] for each in lint_paths([tmp_path]).findings if "one of" in each.message]
    assert found == ["accelerate", "deepspeed", "transformers"]

"""The command `toolkit lint`: what it prints, its exit codes, and the files that it fixes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_command

FSDP1_FILE = """# kept
distributed_type: FSDP  # kept too
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: SHARD_GRAD_OP  # kept as well
  fsdp_backward_prefetch: BACKWARD_PRE  # goes with its key
  # stays
  fsdp_offload_parms: true
"""
FSDP2_FILE = """# kept
distributed_type: FSDP  # kept too
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false  # kept as well
  # stays
  fsdp_offload_params: true
"""


Lint = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lint:
    """Runs the command in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(["lint", *words], capsys)


def test_findings_as_json_and_the_exit_code(lint: Lint, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_CPU\n")
    code, out, _ = lint("mine.yaml", "--json")
    assert code == 1
    (finding,) = json.loads(out)["findings"]
    assert (finding["file"], finding["line"], finding["key"]) == ("mine.yaml", 1, "distributed_type")
    assert (finding["level"], finding["rule"]) == ("error", "starts-one-process")
    assert finding["message"].startswith("any --num_processes is ignored: distributed_type MULTI_CPU starts one")
    assert finding["fix"] == "`distributed_type: MULTI_GPU`, with `use_cpu: true`"
    assert finding["checked_against"] == "accelerate 1.15.0"
    assert finding["documentation"].endswith("#starts-one-process")
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_GPU\n")
    code, out, _ = lint("mine.yaml", "--json")
    assert (code, json.loads(out)["findings"]) == (0, [])
    assert lint("gone.yaml") == (2, "", "error: no such file: gone.yaml\n")


def test_a_broken_file_in_a_folder_gives_exit_code_2_and_the_other_findings(lint: Lint, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text("distributed_type: MULTI_CPU\n")
    (tmp_path / "broken.yaml").write_text("distributed_type: [")
    (tmp_path / "rows.json").write_text('[{"text": "data, not a configuration"}]')
    code, out, err = lint(".")
    assert code == 2
    assert out.splitlines()[0].startswith("sub/mine.yaml:1: error[starts-one-process] distributed_type: ")
    assert "error: broken.yaml is not YAML" in err
    assert err.splitlines()[-1] == "1 file: 1 error"


def test_fix_in_place_keeps_the_old_text_in_a_backup(lint: Lint, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FSDP1_FILE)
    assert lint("mine.yaml", "--fix")[:2] == (0, FSDP2_FILE)
    assert (tmp_path / "mine.yaml").read_text() == FSDP1_FILE
    assert lint(".", "--fix", "--in-place")[:2] == (0, "")
    assert (tmp_path / "mine.yaml").read_text() == FSDP2_FILE
    assert (tmp_path / "mine.yaml.bak").read_text() == FSDP1_FILE


def test_options_that_exclude_each_other_are_refused(lint: Lint, tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("distributed_type: FSDP\n")
    code, _, err = lint("a.yaml", "--in-place")
    assert (code, "--in-place has no effect without --fix" in err) == (2, True)
    code, _, err = lint("a.yaml", "b.yaml", "--fix")
    assert (code, "--fix writes one file to stdout" in err) == (2, True)

"""Findings for code hosts: SARIF 2.1.0, and workflow commands."""

import json
from pathlib import Path

import pytest
from command_line import run_command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my file.yaml").write_text("distributed_type: MULTI_CPU\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "broken.json").write_text('{"zero_optimization": {"stage": 2,}}')
    return tmp_path


def test_a_log_has_each_finding_with_its_place_and_rule_and_what_could_not_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_command(["lint", str(folder), "--format", "sarif"], capsys)
    log = json.loads(out)
    (run,) = log["runs"]
    (result,), (rule,), (invocation,) = run["results"], run["tool"]["driver"]["rules"], run["invocations"]
    assert (code, log["version"], invocation["executionSuccessful"]) == (2, "2.1.0", False)
    assert "broken.json" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]) == ("my%20file.yaml", {"startLine": 1})
    (folder / "ds.json").write_text('{\n"zero_optimization": {"stage": 3}}')  # the key that is missing has no line
    absent = json.loads(run_command(["lint", "ds.json", "--format", "sarif"], capsys)[1])["runs"][0]["results"]
    lines = {each["ruleId"]: each["locations"][0]["physicalLocation"]["region"] for each in absent}
    assert lines["stage-3-without-gather"] == {"startLine": 1}
    assert (result["ruleId"], result["level"], rule["id"]) == ("starts-one-process", "error", "starts-one-process")
    assert result["ruleIndex"] == 0
    assert rule["defaultConfiguration"]["level"] == "error"
    assert "MULTI_CPU" in result["message"]["text"]


def test_workflow_commands_are_one_line_each_and_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a,b.yaml").write_text("distributed_type: MULTI_CPU\n")
    _, out, _ = run_command(["lint", "a,b.yaml", "--format", "github"], capsys)
    assert out.startswith("::error file=a%2Cb.yaml,line=1,title=toolkit lint starts-one-process::distributed_type: ")
    assert out.count("\n") == 1


def test_files_of_other_programs_are_passed_over_where_a_hook_names_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["lint", "mkdocs.yml"], capsys)[0] == 2
    code, _, err = run_command(["lint", "--skip-others", "mkdocs.yml"], capsys)
    assert (code, err) == (0, "no files: nothing to check\n")
    assert run_command(["lint", "--skip-others", "mkdocs.yml", "my file.yaml"], capsys)[0] == 1
    assert run_command(["lint", "--format", "xml", "mkdocs.yml"], capsys)[0] == 2
    assert folder.exists()


def test_a_named_file_that_is_not_there_is_an_error_beside_the_findings_of_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dangling.yaml").symlink_to("gone.yaml")
    for name in ("missing.yaml", "dangling.yaml"):
        code, out, err = run_command(["lint", "--skip-others", "--format", "sarif", name, "my file.yaml"], capsys)
        (run,) = json.loads(out)["runs"]
        assert (code, len(run["results"])) == (2, 1)
        assert f"no such file: {name}" in err

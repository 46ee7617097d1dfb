"""`toolkit diff` in a repository: what is new, what is gone, what fits no longer, and what is no configuration."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run_command
from launching import ROOT

SFT = """# trl sft
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 1
max_length: 2048
bf16: true
learning_rate: 1.0e-5
output_dir: out
"""
Diff = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diff:
    """A repository with a job, a strategy and a file of another program; and the command in it."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("sft.yaml", SFT), ("acc.yaml", "distributed_type: MULTI_GPU\n"), ("mkdocs.yml", "site: x\n")):
        Path("configs", name).parent.mkdir(exist_ok=True)
        Path("configs", name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    return lambda *words: run_command(["diff", "main", *words], capsys)


def test_nothing_changed_is_no_finding(diff: Diff) -> None:
    code, out, err = diff()
    assert (code, out) == (0, "")
    assert err == "0 changed, 0 new of level error or above, 0 no longer fitting\n"


def test_a_job_that_stops_to_fit_and_a_new_error_fail_and_a_moved_line_is_not_new(diff: Diff) -> None:
    longer = SFT.replace("size: 1", "size: 8").replace("max_length: 2048", "max_length: 16384")
    Path("configs/sft.yaml").write_text("# a line above\n" + longer)
    Path("configs/acc.yaml").write_text("distributed_type: MULTI_CPU\n")
    Path("configs/mkdocs.yml").write_text("site: y\n")
    code, out, err = diff("--gpu", "h100")
    assert code == 1
    assert err == "2 changed, 1 new of level error or above, 1 no longer fitting\n"
    strategy, new, job = out.splitlines()[:3]
    assert strategy == "configs/acc.yaml (changed)"
    assert new.startswith("  new error[starts-one-process]:1 distributed_type: ")
    assert job.startswith("configs/sft.yaml (changed): was ")
    assert ": if its rows are not shorter, does not fit h100-sxm × 8 under `" in job
    assert job.endswith("`; lines 1, 5, 6")  # as they are counted now
    assert diff("--gpu", "h100", "--level", "never")[0] == 0
    Path("configs/acc.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_machins: 1\n")
    Path("job.sh").write_text("accelerate launch --config_file configs/acc.yaml --num_processes 4 train.py\n")
    assert diff("--gpu", "h100")[2] == err.replace("2 changed", "3 changed"), "the strategy's error counts once"


def test_a_job_whose_deepspeed_json_changed_is_planned_again(diff: Diff) -> None:
    Path("configs/job.yaml").write_text(f"{SFT}deepspeed: ds.json\n")
    Path("configs/ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "second"]):
        subprocess.run([*git, *words], check=True)
    Path("configs/ds.json").write_text('{"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto"}')
    _, out, _ = diff("--gpu", "h100", "--level", "never")
    assert "configs/job.yaml (affected): was " in out
    assert "lines" not in out
    Path("configs/ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto" }')
    assert "job.yaml" not in diff("--gpu", "h100")[1]


def test_the_comment_and_the_json_say_the_same(diff: Diff) -> None:
    Path("configs/new.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nfsdp_offload: true\n")
    Path("configs/acc.yaml").unlink()
    code, out, _ = diff("--json")
    removed, added = json.loads(out)["changes"]
    assert (code, removed["status"], added["status"]) == (1, "removed", "added")
    assert [each["rule"] for each in added["new"]] == ["unknown-key"]
    assert (added["new"][0]["file"], added["now"]) == ("configs/new.yaml", None)
    comment = diff("--format", "markdown")[1]
    assert "- **configs/new.yaml** (added)\n  - error `unknown-key`, line 4: " in comment


def test_a_link_out_of_the_repository_is_no_obstacle(diff: Diff) -> None:
    Path("configs/link.yaml").symlink_to("/etc/no-such.yaml")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "second"]):
        subprocess.run([*git, *words], check=True)
    Path("configs/acc.yaml").write_text("distributed_type: MULTI_CPU\n")
    code, out, _ = diff()
    assert (code, out.splitlines()[0]) == (1, "configs/acc.yaml (changed)")


def test_a_commit_that_is_not_there_and_a_wrong_format_are_invalid_input(
    diff: Diff, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(["diff", "nosuch"], capsys)
    assert (code, err.splitlines()[0]) == (2, "error: git merge-base: Not a valid object name nosuch")
    assert diff("nosuch.yaml")[0] == 2
    assert diff("*.yaml")[0] == diff("configs")[0] == 0  # a pattern of git's
    assert diff("--format", "html")[0] == diff("--level", "all")[0] == 2


def test_a_finding_of_both_is_judged_by_the_same_requirements(diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin is in the repository's root, and the command in a folder below it."""
    Path("requirements.txt").write_text("deepspeed==0.14.0\n")
    Path("configs/ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "foo": 1}}')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "second"]):
        subprocess.run([*git, *words], check=True)
    Path("configs/ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true, "foo": 1}}')
    monkeypatch.chdir("configs")
    assert diff()[:2] == (0, "ds.json (changed)\n")


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.usefixtures("diff")
def test_the_gate_writes_a_log_for_code_hosts_also_where_files_were_only_removed(
    tmp_path_factory: pytest.TempPathFactory, removed: bool
) -> None:
    folder = tmp_path_factory.mktemp("gate")
    program = folder / "finetune-toolkit" / "bin" / "toolkit"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m toolkit "$@"\n')
    program.chmod(0o755)
    Path("configs/sft.yaml").unlink()
    if not removed:
        Path("configs/acc.yaml").write_text("distributed_type: MULTI_CPU\n")
    environment = os.environ | {"BASE": "main", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([ROOT / ".ci" / "gate", folder], env=environment, capture_output=True, text=True)
    assert done.returncode == (0 if removed else 1), done.stderr
    (run,) = json.loads((folder / "findings.sarif").read_text())["runs"]
    assert [each["ruleId"] for each in run["results"]] == ([] if removed else ["starts-one-process"])

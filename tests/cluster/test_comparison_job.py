"""An sbatch file that compares presets on the nodes of one job."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from cluster_jobs import check_shell, run_cluster, write_inputs

from toolkit.cluster import slurm
from toolkit.compare.ledger import LEDGER_FILE
from toolkit.compare.specification import SPEC_FILE
from toolkit.lint import lint_paths

PRESETS = ["--preset", "ddp", "--preset", "zero2"]
TWO = ["slurm", *PRESETS, "--nodes", "1:2", "--gpus-per-node", "4"]


def written(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    training = [*write_inputs(tmp_path), "--max_steps", "20"]
    code, text, errors = run_cluster([*TWO, *options, "--", *training], capsys)
    assert code == 0, errors
    check_shell(text)
    return text


def test_each_number_of_nodes_is_a_world_size_of_one_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(tmp_path, capsys, "--repeats", "5")
    assert "#SBATCH --nodes=2\n" in text
    assert "    --repeats 5 \\\n" in text
    assert "--preset ddp --preset zero2 \\\n    --nproc-per-node 4 --num-processes 4,8 \\\n" in text
    assert f"output_dir={tmp_path}/out\n" in text
    assert "--output_dir" not in text.partition("toolkit compare")[2]
    assert '[[ -e "$output_dir/comparison.json" ]] && resume=(--resume)' in text


def test_the_files_that_it_looks_for_are_those_of_a_comparison() -> None:
    assert (slurm.COMPARISON_FILE, slurm.LEDGER_FILE) == (SPEC_FILE, LEDGER_FILE)


@pytest.mark.parametrize(
    ("state", "ledger", "requeued"), [("RUNNING", True, True), ("RUNNING", False, False), ("COMPLETING", True, False)]
)
def test_the_signal_requeues_a_running_job_that_has_finished_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, ledger: bool, requeued: bool
) -> None:
    text = written(tmp_path, capsys)
    assert re.findall(r"^#SBATCH (--signal.*|--.*requeue)", text, re.MULTILINE) == ["--signal=B:TERM@60", "--requeue"]
    function = re.search(r"^requeue\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "1-0.started").touch()
    os.utime(tmp_path / "1-0.started", (0, 0))
    if ledger:
        (tmp_path / "ledger.jsonl").touch()
    commands = f'squeue() {{ echo {state}; }}; scontrol() {{ echo called "$@"; }}; SLURM_JOB_ID=1 ATTEMPT=1-0'
    folders = f"output_dir={tmp_path}; logs={tmp_path}"
    script = f"{commands}; {folders}\n{function[0]}\nrequeue"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert ("called requeue 1" in ended.stdout) is requeued


def test_the_file_has_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.sbatch").write_text(written(tmp_path, capsys, "--preflight"))
    assert lint_paths([tmp_path / "job.sbatch"]).findings == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["slurm", *PRESETS, "--nodes", "2", "--container", "i"], "a comparison starts srun itself"),
        (["slurm", "--preset", "ddp", "--preset", "single", "--nodes", "2"], "preset 'single' trains in one process"),
        (["slurm", "--preset", "ddp", "--preset", "zero3_nvme_offload", "--nodes", "2"], "checks on one node only"),
        (["ssh", *PRESETS, "--nodes", "1", "--host", "a"], "several presets (ddp, zero2) are a comparison"),
        (["slurm", "--nodes", "2"], "missing option '--preset'"),
    ],
)
def test_what_is_no_comparison_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    training = [*write_inputs(tmp_path), "--max_steps", "20"]
    code, text, errors = run_cluster([*options, "--gpus-per-node", "4", "--", *training], capsys)
    assert (code, text) == (2, "")
    assert message in errors


def test_a_training_argument_that_the_comparison_sets_is_refused_before_the_job_waits_for_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = [*write_inputs(tmp_path), "--max_steps", "20", "--save_strategy", "no"]
    code, text, errors = run_cluster([*TWO, "--", *training], capsys)
    assert (code, text) == (2, "")
    assert errors == "error: --save_strategy is set by the comparison itself\n  hint: remove it\n"

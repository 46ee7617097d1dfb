"""The job that all engines write: what is refused before a file is written."""

import json
import shlex
from pathlib import Path

import pytest
from cluster_jobs import run_cluster, write_inputs

Capsys = pytest.CaptureFixture[str]

SLURM = ["slurm", "--gpus-per-node", "4", "--nodes", "2"]
TWO, SSH = "slurm --preset ddp --preset zero2", "ssh --preset zero2 --nodes 2"
PODS, SKY = "kubernetes --preset zero2 --nodes 2", "skypilot --preset zero2 --nodes 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slurm --nodes 2", "missing option '--preset'"),
        ("slurm --preset single --nodes 2", "'single' trains in one process, --nodes x --gpus-per-node is 8"),
        ("slurm --preset fsdp2_hybrid --nodes 3 --gpus-per-node 1", "preset 'fsdp2_hybrid' needs"),
        ("slurm --preset zero2 --nodes 2:1", "--nodes is '2:1', expected a number, or MIN:MAX"),
        ("slurm --preset zero2 --nodes 2 --env HF_TOKEN=abc", "would write a secret into the job file"),
        ("slurm --preset zero2 --nodes 2 --env 1X=2", "--env is '1X=2', expected NAME=VALUE or NAME"),
        ("slurm --preset zero2 --nodes 2 --name 'My Job'", "--name is 'My Job', expected at most 40"),
        ("slurm --preset zero2 --nodes 2 --setup 'a\nb'", "--setup has a line break"),
        ("slurm --preset zero2 --nodes 2 --saves-of /nowhere", "--saves-of /nowhere has no measured save"),
        ("slurm --preset zero3_nvme_offload --nodes 2", "offloads to a disk of each node, and none is named"),
        ("slurm --preset zero2 --nodes 2 -- --hub_token hf_ABCDEFGHIJKLMNOP", "a training argument is a secret"),
        ("slurm --preset zero2 --nodes 2 -- --resume_from_checkpoint out/checkpoint-5", "would begin there again"),
        ("slurm --preset zero2 --nodes 2 --time-limit 5", "too short: the run is stopped 300 s before its end to save"),
        ("slurm --preset zero2 --nodes 2 --json --submit", "--json does not work with --submit"),
        ("slurm --preset zero2 --nodes 2 --submit", "`sbatch` is not on the PATH: the job was not submitted"),
        # the last --model_name_or_path counts
        ("slurm --preset zero2 --nodes 2 -- --model_name_or_path demo", "demo: prepared on one node"),
        # an elastic job names the numbers of ranks that keep its batch
        ("slurm --preset zero2 --nodes 1:3", "numbers of processes that keep it: 1, 2, 3, 4, 6, 12"),
        # comparisons
        (f"{TWO} --nodes 2 --container i -- --max_steps 8", "a comparison starts srun"),
        ("slurm --preset ddp --preset zero3_nvme_offload --nodes 2 -- --max_steps 8", "checks on one node only"),
        (f"{TWO} --nodes 2 -- --max_steps 8 --save_strategy=no", "--save_strategy is set by"),
        ("ssh --preset ddp --preset zero2 --nodes 1 --host a", "several presets (ddp, zero2) are a comparison"),
        # hosts: ssh would read some as an option, and a shell as two words
        (f"{SSH} --host node1", "--nodes 2 needs 2 --host, got 1\n  hint: --host node1 --host node2"),
        ("ssh --preset ddp --nodes 1 --host=-oProxyCommand=x", "expected a host name or an address"),
        (f"{PODS} --mount r=/", "--mount is 'r=/', expected SOURCE=/PATH"),
        (f"{PODS} --mount runs=/runs", "--container is missing: a pod runs an image"),
        (f"{PODS} --container i --mount a=/data", "in no folder that all nodes mount (/data)"),
        (f"{PODS} --mount 'A Claim=/runs'", "'A Claim' is no name of a claim"),
        ("kubernetes --preset zero2 --nodes 1:2 --kind trainjob --container i", "Trainer v2 has a fixed number"),
        (f"{PODS} --resource memory", "--resource is 'memory', expected NAME=AMOUNT"),
        (f"{PODS} --namespace 'My Space'", "--namespace is 'My Space', expected lower-case"),
        (f"{SKY} --mount s3://b=/runs", "--gpu is missing: SkyPilot chooses the instance"),
        (f"{SKY} --gpu H100", "is in no folder that all nodes mount (none)"),
        (
            "skypilot --preset zero2 --nodes 1:2 --gpu H100",
            "--nodes 1:2 on SkyPilot: a task has a fixed number of nodes",
        ),
    ],
)
def test_what_is_no_job_is_refused(
    words: str, message: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given, _, training = words.partition(" -- ")
    engine, *options = shlex.split(given)
    all_words = [engine, "--gpus-per-node", "4", *options, "--", *write_inputs(tmp_path), *shlex.split(training)]
    code, text, errors = run_cluster(all_words, capsys)
    assert (code, text == "") == (2, "--json" not in options)  # with it, the refusal is a document
    assert message in errors


def test_files_that_only_the_nodes_have_are_not_read_here(capsys: Capsys) -> None:
    there = ["--model_name_or_path", "/nodes/model", "--dataset", "/nodes/rows.jsonl", "--output_dir", "/nodes/out"]
    words = [*SLURM, "--preset", "zero2"]
    code, _, errors = run_cluster([*words, "--", *there], capsys)
    assert (code, "`--no-check-files` if only the nodes have it" in errors) == (2, True)
    code, text, _ = run_cluster([*words, "--no-check-files", "--", *there], capsys)
    assert code == 0
    assert "--model_name_or_path /nodes/model" in text


def test_the_users_preset_is_an_absolute_path(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Mine.yaml").write_text("# mine\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    training = write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [*SLURM, "--preset", "Mine.yaml", "--output", "job.sbatch", "--", *training]
    assert run_cluster(words, capsys)[:2] == (0, "")
    text = (tmp_path / "job.sbatch").read_text()
    assert f"export TOOLKIT_PRESET={tmp_path}/Mine.yaml\n" in text
    assert "--job-name=mine\n" in text


def test_json_has_the_file_and_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sh"
    words = ["ssh", "--preset", "zero2", "--nodes", "2", "--gpus-per-node", "4", "--save-seconds", "100"]
    words += ["--json", "--output", str(file), "--host", "node0", "--host", "node1"]
    code, out, err = run_cluster([*words, "--", *write_inputs(tmp_path), "--save_strategy", "no"], capsys)
    assert code == 0, err
    answer = json.loads(out)
    assert answer["file"] == str(file)
    assert answer["text"] == file.read_text()
    assert answer["warnings"][-1].startswith("--save_strategy no: ")
    assert answer["grace_seconds"] >= 100
    file.write_text("# Written by: toolkit cluster ssh\n# by hand\n")
    code, _, err = run_cluster([*words, "--", *write_inputs(tmp_path)], capsys)
    assert code == 0, err
    assert "by hand" not in file.read_text()
    assert (tmp_path / "job.sh.before").read_text().endswith("# by hand\n")
    file.write_text("# mine\n")
    code, _, err = run_cluster([*words, "--", *write_inputs(tmp_path)], capsys)
    assert (code, file.read_text()) == (2, "# mine\n")

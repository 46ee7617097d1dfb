"""The script for nodes without a scheduler; two launchers on this host stand for two nodes."""

import os
import subprocess
from pathlib import Path

import pytest
from cluster_jobs import check_shell, run_cluster, write_inputs
from launching import ROOT, read

HOSTS = ["--host", "127.0.0.1", "--host", "127.0.0.2"]


def test_one_line_starts_the_script_on_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "4", "--host", "node1", "--host", "me@node2"]
    words = ["ssh", "--preset", "zero2", *options, "--output", str(tmp_path / "job.sh"), "--", *write_inputs(tmp_path)]
    code, _, messages = run_cluster(words, capsys)
    assert code == 0, messages
    text = (tmp_path / "job.sh").read_text()
    check_shell(text)
    line = messages.rpartition("start it on all nodes: ")[2].strip()
    check_shell(line)
    assert line.startswith("attempt=$(date +%s); for host in node1 me@node2; do ssh -n $host ")
    assert f"#   {line}\n" in text
    assert '--rdzv-endpoint "node1:29500"' in text
    assert '--peer "node2"' in text


@pytest.mark.launch
@pytest.mark.nightly
@pytest.mark.cold_start
def test_two_nodes_train_one_run(tmp_path: Path, tiny_job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    training = [*tiny_job, "--max_steps", "2", "--per_device_train_batch_size", "1", "--save_strategy", "no"]
    training += ["--output_dir", str(tmp_path / "out")]
    options = ["--nodes", "2", "--gpus-per-node", "1", "--cpu", *HOSTS, "--output", str(tmp_path / "job.sh")]
    options += ["--setup", f"cd {ROOT}"]
    code, _, errors = run_cluster(["ssh", "--preset", "ddp", *options, "--", *training], capsys)
    assert code == 0, errors
    command, names = ["bash", str(tmp_path / "job.sh"), "7"], ("one", "two")
    nodes = [subprocess.Popen(command, env=os.environ | {"HOSTNAME": name}) for name in names]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    run = read(tmp_path / "out" / "run.json")
    assert (run["status"], run["preset"], run["world_size"]) == ("completed", "ddp", 2)
    assert sorted(path.name for path in (tmp_path / "out" / "logs").iterdir()) == ["7-one.log", "7-two.log"]
    assert "NCCL_SOCKET_IFNAME=unset" in (tmp_path / "out" / "logs" / "7-two.log").read_text()

"""What is wrong with the nodes is said before any rank loads a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cluster.jobs import ClusterJobs
from cluster.machines import Machines, wait_until
from launching import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.launch]

LISTENER = (
    "import socket, time; s = socket.create_server(('0.0.0.0', 29411)); print('ready', flush=True); time.sleep(60)"
)


@pytest.mark.nightly
def test_a_run_folder_that_is_not_shared_is_refused_by_the_name_of_the_node(jobs: ClusterJobs) -> None:
    """/mnt is a disk of each machine's own."""
    codes, printed = jobs.torchrun("ddp", "impatient_of_folders.py", Path("/mnt/out"), "--max_steps", "1")
    assert codes == [1, 1], printed
    assert printed.count("error: /mnt/out is not shared: node2 does not see what node1 has written there") == 1
    assert "hint: name a folder on a file system that all nodes mount" in printed
    assert "exitcode  : 2" in printed
    assert "data:" not in printed  # nothing was read or loaded


def check_rendezvous(machines: Machines, node: str, head: str, port: str) -> tuple[int, str]:
    words = ["--head", head, "--port", port, "--attempt", "job-1", "--wait-seconds", "0"]
    command = [sys.executable, "-m", "toolkit.cluster.node_setup", *words]
    ended = machines.run(node, *command, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return ended.returncode, ended.stderr


def test_a_head_that_does_not_resolve_and_a_port_in_use_on_the_head_are_refused(machines: Machines) -> None:
    code, said = check_rendezvous(machines, "node2", "node9", "29400")
    assert code == 2
    assert "error: the head 'node9' does not resolve from node2" in said
    assert check_rendezvous(machines, "node2", "node1", "29400")[0] == 0
    listener = machines.start("node1", sys.executable, "-c", LISTENER)
    try:
        assert listener.stdout is not None
        wait_until(lambda: listener.stdout.readline() == "ready\n", "something listens", 20)
        code, said = check_rendezvous(machines, "node1", "node1", "29411")
        assert code == 2
        assert "error: port 29411 of the head node1 is in use by process " in said
        assert check_rendezvous(machines, "node2", "node1", "29411")[0] == 0  # it may be the head's own rendezvous
    finally:
        machines.stop(listener)

"""Runs of a comparison on the nodes of a SLURM job: which nodes, and the command that starts them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cluster_jobs import check_shell

from toolkit.cluster.slurm import Allocation
from toolkit.compare.options import CompareOptions
from toolkit.errors import ToolkitError
from toolkit.launch.command import LaunchCommand, launch_command
from toolkit.presets import load_preset

needs_scontrol = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol: apt install slurm-client")
TWO_NODES = Allocation(nodes=("node1", "node2"), processes_per_node=4)


def zero2(num_processes: int) -> LaunchCommand:
    argv = ["--dataset", "rows of mine.jsonl", "--token", "secret"]
    return launch_command(load_preset("zero2"), num_processes=num_processes, training_argv=argv, cpu=True)


@needs_scontrol
def test_the_nodes_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3],gpu7")
    allocation = Allocation.current(processes_per_node=8)
    assert allocation.nodes == ("node1", "node2", "node3", "gpu7")
    assert allocation.max_processes == 32


def test_outside_a_job_there_is_no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ToolkitError, match="runs in no SLURM job"):
        Allocation.current(processes_per_node=8)


def test_a_run_takes_as_many_nodes_as_its_ranks_fill() -> None:
    assert [len(TWO_NODES.nodes_of(size)) for size in (1, 4, 8)] == [1, 1, 2]


@pytest.mark.parametrize(("size", "message"), [(6, "does not fill nodes of 4 ranks"), (12, "has 2 nodes with 4 each")])
def test_a_number_of_ranks_that_does_not_fit_the_nodes_is_refused(size: int, message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        TWO_NODES.check(size)


def test_each_node_starts_one_torchrun_with_the_run_id_as_its_rendezvous() -> None:
    plain = zero2(8)
    spread = TWO_NODES.spread(plain)
    assert {"srun", "--nodes=2", "--ntasks=2", "--nodelist=node1,node2", "--kill-on-bad-exit=1"} <= set(spread.argv)
    check_shell(spread.argv[-1])
    assert f'--nnodes 2 --nproc-per-node 4 --rdzv-id "{plain.run_id}"' in spread.argv[-1]
    assert re.search(r"--head node1 --port (2[0-9]{4}) --peer node2.* --rdzv-endpoint .node1:\1.", spread.argv[-1])
    assert "'rows of mine.jsonl'" in spread.argv[-1]


def test_a_secret_is_in_the_environment_alone() -> None:
    spread = TWO_NODES.spread(zero2(8))
    assert not any("secret" in word for word in spread.argv)
    assert any(value.find("secret") >= 0 for value in spread.environment.values())


def test_a_run_on_one_node_of_the_job_names_that_node() -> None:
    spread = TWO_NODES.spread(zero2(2))
    assert "--nodelist=node1" in spread.argv
    assert "--nnodes 1 --nproc-per-node 2 " in spread.argv[-1]


def test_nodes_need_a_number_of_processes() -> None:
    with pytest.raises(ToolkitError, match="--nproc-per-node needs --num-processes") as refused:
        CompareOptions(preset=("ddp",), output_dir=Path("out"), nproc_per_node=4)
    assert refused.value.hint is not None
    assert "--num-processes 4,8" in refused.value.hint


def test_a_fork_server_on_this_node_cannot_start_ranks_on_others() -> None:
    with pytest.raises(ToolkitError, match="--warm-start forks ranks on this node"):
        CompareOptions(preset=("ddp",), output_dir=Path("out"), nproc_per_node=4, warm_start=True)

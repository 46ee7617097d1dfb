"""A cluster for all tests of this folder: SLURM on three nodes, made of namespaces on this host."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.machines import Machines
from cluster.slurm import CONTROLLER, ClusterJobs, Slurm, missing_programs

NODES = ("node1", "node2", "node3")


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (slurmctld slurmd slurm-client munge iproute2)")
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))  # short: the paths of sockets are limited
    folder.chmod(0o755)  # munge refuses a folder that others may write, and needs to enter it
    with Machines(folder, [CONTROLLER, *NODES]) as machines:
        yield machines


@pytest.fixture(scope="session")
def slurm(machines: Machines) -> Slurm:
    slurm = Slurm(machines)
    slurm.start()
    return slurm


@pytest.fixture
def jobs(slurm: Slurm, tiny_model: Path, faq_alpaca: Path, tmp_path: Path) -> Iterator[ClusterJobs]:
    """Start training on the cluster; what a test leaves in the queue is cancelled, and its nodes are idle again."""
    jobs = ClusterJobs(slurm, model=tiny_model, dataset=faq_alpaca, folder=tmp_path)
    yield jobs
    jobs.end()

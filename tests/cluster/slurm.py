"""SLURM on machines made of namespaces: munge and the controller on `ctl`, a daemon on every node.

with Machines(folder, ["ctl", "node1", "node2"]) as machines:
    slurm = Slurm(machines)
    slurm.start()
    job = slurm.submit(script, log=log)
    slurm.wait_for_end(job)
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from cluster.machines import Machines, wait_until
from launching import ROOT

CONTROLLER = "ctl"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
# cred_expire: by default a requeued job waits 120 s for the old credential. A node that is silent for SlurmdTimeout is
# down; a ping that nobody answers takes MessageTimeout. KillWait: seconds between SIGTERM and SIGKILL: ranks wait 10 s
# for the lost one.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir={folder}/%n/slurmd
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldPidFile={folder}/slurmctld/pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=15
MinJobAge=3600
SchedulerParameters=bf_interval=2,sched_interval=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


class Slurm:
    """SLURM on the machines other than `ctl`."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self.nodes = [name for name in machines.names if name != CONTROLLER]
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Write the configuration, start all daemons, and wait until every node is idle."""
        self._write_configuration()
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self.machines.run(CONTROLLER, "munged", *files, f"--socket={munge / 'socket'}")
        self._ctl("slurmctld", "-c", "-L", str(self.folder / "slurmctld" / "log"))
        for name in self.nodes:
            self._start_node(name)
        self.machines.at_boot.append(self._start_node)
        wait_until(lambda: set(self.node_states().values()) == {"idle"}, "every node is idle", 60)

    def submit(self, script: Path, *, log: Path) -> str:
        """Submit a job file and return the job's number."""
        environment = self.environment | {"PYTHONPATH": str(ROOT)}
        words = ["sbatch", "--parsable", f"--output={log}", str(script)]
        return self.machines.run(CONTROLLER, *words, env=environment).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        words = self._ctl("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes_of(self, job: str) -> list[str]:
        """Return the nodes that a running job has; the first one runs its batch script."""
        return self._ctl("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def wait_for_end(self, job: str, seconds: float = 240) -> None:
        wait_until(lambda: self.job(job)["JobState"] in ENDED, f"job {job} ends", seconds)

    def wait_for_restart(self, job: str, number: int, seconds: float) -> None:
        """Wait until a job runs again, after SLURM has put it back into its queue."""

        def runs_again() -> bool:
            found = self.job(job)
            assert found["JobState"] not in ENDED, f"job {job} is {found['JobState']}"
            return found["JobState"] == "RUNNING" and int(found["Restarts"]) >= number

        wait_until(runs_again, f"job {job} runs for the {number + 1}. time", seconds, lambda: self.state(job))

    def state(self, job: str) -> str:
        """Return what the controller knows of a job and of every node."""
        return self._ctl("scontrol", "show", "job", job) + self._ctl("scontrol", "show", "nodes")

    def end_soon(self, job: str) -> None:
        """Shorten a job's time limit, in whole minutes, so that SLURM's own warning (`--signal`) is soon due.

        SLURM looks at limits every 30 s: it must find the job before its end.
        """
        hours, minutes, seconds = map(int, self.job(job)["RunTime"].split(":"))
        more = 1 if seconds < 20 else 2
        self._ctl("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + more}")

    def extend(self, job: str) -> None:
        self._ctl("scontrol", "update", f"JobId={job}", "TimeLimit=30")

    def cancel(self, job: str) -> None:
        self._ctl("scancel", job)

    def node_states(self) -> dict[str, str]:
        lines = self._ctl("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split()[:2] for line in lines)  # type: ignore[misc]

    def _start_node(self, name: str) -> None:
        self.machines.run(name, "slurmd", "-N", name, "-L", f"{self.folder}/{name}/slurmd.log", env=self.environment)

    def _ctl(self, *words: str) -> str:
        return self.machines.run(CONTROLLER, *words, env=self.environment).stdout

    def _write_configuration(self) -> None:
        for name in ("munge", "slurmctld", *(f"{node}/slurmd" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        address = self.machines.address
        text = CONFIGURATION.format(controller=CONTROLLER, address=address(CONTROLLER), folder=self.folder)
        nodes = [f"NodeName={name} NodeAddr={address(name)} CPUs=2 RealMemory=4000\n" for name in self.nodes]
        (self.folder / "slurm.conf").write_text(text.lstrip() + "".join(nodes))
        version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\nCgroupAutomount=no\n")

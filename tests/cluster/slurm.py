"""SLURM on machines made of namespaces (munge and the controller on `ctl`, a daemon on every node), and jobs on it."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.machines import Machines, wait_until
from launching import ROOT, accelerate_launch, read, toolkit

SAVE_SECONDS = 20
"""SLURM's warning then comes 100 s before the limit: early enough that the test need not wait for it."""
LAUNCH_SECONDS = 150.0
"""For a job to train its first step on a busy host: two launchers and two ranks import their libraries."""
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
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


class Slurm:
    """SLURM on the machines other than `ctl`."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self.nodes = [name for name in machines.names if name != CONTROLLER]
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("munge", "slurmctld", *(f"{node}/slurmd" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        munge = self.folder / "munge"
        munge.chmod(0o711)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        address = self.machines.address
        text = CONFIGURATION.format(controller=CONTROLLER, address=address(CONTROLLER), folder=self.folder)
        nodes = [f"NodeName={name} NodeAddr={address(name)} CPUs=2 RealMemory=4000\n" for name in self.nodes]
        (self.folder / "slurm.conf").write_text(text.lstrip() + "".join(nodes))
        version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v{version}\nCgroupAutomount=no\n")
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self.machines.run(CONTROLLER, "munged", *files, f"--socket={munge / 'socket'}")
        self.ctl("slurmctld", "-c", "-L", str(self.folder / "slurmctld" / "log"))
        for name in self.nodes:
            self.start_daemon(name)
        self.machines.at_boot.append(self.start_daemon)
        wait_until(lambda: set(self.node_states().values()) == {"idle"}, "every node is idle", 60)

    def submit(self, script: Path, *, log: Path) -> str:
        """Submit a job file and return the job's number."""
        environment = self.environment | {"PYTHONPATH": str(ROOT)}
        words = ["sbatch", "--parsable", f"--output={log}", str(script)]
        return self.machines.run(CONTROLLER, *words, env=environment).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        words = self.ctl("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes_of(self, job: str) -> list[str]:
        """Return the nodes that a running job has; the first one runs its batch script."""
        return self.ctl("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def wait_for_end(self, job: str, seconds: float = 240) -> None:
        wait_until(lambda: self.job(job)["JobState"] in ENDED, f"job {job} ends", seconds)

    def state(self, job: str) -> str:
        return self.ctl("scontrol", "show", "job", job) + self.ctl("scontrol", "show", "nodes")

    def end_soon(self, job: str) -> None:
        """Shorten a job's time limit, in whole minutes, so that SLURM's own warning (`--signal`) is soon due.

        SLURM looks at limits every 30 s: it must find the job before its end.
        """
        hours, minutes, seconds = map(int, self.job(job)["RunTime"].split(":"))
        more = 1 if seconds < 20 else 2
        self.ctl("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + more}")

    def node_states(self) -> dict[str, str]:
        lines = self.ctl("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split()[:2] for line in lines)  # type: ignore[misc]

    def stop_daemon(self, name: str) -> None:
        """Kill a node's daemon; for `SlurmdTimeout`, SLURM still believes that the node is there."""
        self.machines.run(name, "kill", "-KILL", (self.folder / name / "slurmd.pid").read_text().strip())

    def start_daemon(self, name: str) -> None:
        self.machines.run(name, "slurmd", "-N", name, "-L", f"{self.folder}/{name}/slurmd.log", env=self.environment)

    def ctl(self, *words: str) -> str:
        return self.machines.run(CONTROLLER, *words, env=self.environment).stdout


class ClusterJobs:
    """Jobs of the tiny model on two nodes, one CPU rank on each."""

    def __init__(self, slurm: Slurm, *, model: Path, dataset: Path, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.words = ["--model_name_or_path", str(model), "--dataset", str(dataset), "--max_seq_length", "64"]
        self.words += ["--lr_scheduler_type", "constant", "--learning_rate", "1e-3"]
        self.submitted = list[str]()

    def submit(self, options: Sequence[str], out: Path, *training: str, nodes: str = "2") -> str:
        path = self.folder / f"{out.name}.sbatch"
        place = ["--nodes", nodes, "--gpus-per-node", "1", "--cpu", "--time-limit", "10", "--output", str(path)]
        words = [*options, *place, "--", *self.words, *training, "--output_dir", str(out)]
        ended = toolkit("cluster", "slurm", *words)
        assert ended.returncode == 0, ended.stderr
        self.submitted.append(self.slurm.submit(path, log=self.folder / f"{out.name}.log"))
        return self.submitted[-1]

    def logs(self) -> str:
        found = sorted([*self.folder.glob("**/*.log"), *self.folder.glob("**/*.err")])
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in found)

    def until(self, job: str, condition: Callable[[], bool], seconds: float = LAUNCH_SECONDS) -> None:
        def reached() -> bool:
            assert self.slurm.job(job)["JobState"] not in ENDED, self.logs()
            return condition()

        wait_until(reached, f"job {job} makes progress", seconds, lambda: self.slurm.state(job) + self.logs())

    def until_restart(self, job: str, number: int) -> None:
        def runs_again() -> bool:
            found = self.slurm.job(job)
            return found["JobState"] == "RUNNING" and int(found["Restarts"]) >= number

        self.until(job, runs_again)

    def until_step(self, job: str, out: Path, step: int) -> None:
        self.until(job, lambda: min(steps(out)) >= step)

    def on_one_node(self, preset: str, out: Path, *words: str) -> Path:
        """Train the same with two ranks on one node."""
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        ended = accelerate_launch(config, *self.words, "--save_model", "false", "--output_dir", str(out), *words)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return out

    def end(self) -> None:
        for job in self.submitted:
            self.slurm.ctl("scancel", job)
        for node in self.slurm.nodes:
            if node not in self.slurm.machines.on:
                self.slurm.machines.power_on(node)
        wait_until(lambda: set(self.slurm.node_states().values()) == {"idle"}, "all nodes are idle again", 60)


def steps(out: Path) -> list[int]:
    files = [out / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def hosts(out: Path) -> list[str]:
    return [str(read(out / "ranks" / f"rank{rank}.heartbeat")["host"]) for rank in (0, 1)]


def rows(out: Path, rank: int) -> list[tuple[float, float]]:
    lines = (out / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(row["loss"], row["grad_norm"]) for row in found]

"""Elastic agents that stand for nodes: started, lost without warning, and waited for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from fork_server import ForkedProcess, fork_process
from launching import ROOT, cpu_environment, fork_server, read, torchrun_preset

from toolkit.record.folder import RunFolder
from toolkit.record.measurements import last_step, measure, read_steps

WAIT_SECONDS = 180.0
MANY_STEPS = 2000
# A node counts as lost after six missed seconds, and nobody else is waited for: the defaults are 15 s and 30 s. A busy
# node misses three.
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"


class Nodes:
    """Elastic agents with one rank each, started and killed like nodes, and forked from the session's server."""

    def __init__(self, preset: str, folder: Path, job: list[str], endpoint: str) -> None:
        self.folder, self.out, self.agents = folder.resolve(), folder / "out", dict[str, ForkedProcess]()
        self.elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"]
        self.elastic += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
        self.script = ["-m", "toolkit.train", *job, "--output_dir", str(self.out), "--resume_from_checkpoint", "latest"]
        self.script += ["--save_steps", "2", "--max_steps", str(MANY_STEPS), "--save_total_limit", "2"]
        self.environment = cpu_environment() | {"TOOLKIT_PRESET": preset, "OMP_NUM_THREADS": "1"}
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.agents):
            self.lose(name)

    def start(self, name: str) -> None:
        """Start an agent; the one that is started when there is none holds the rendezvous."""
        holds = ["--rdzv-conf", f"{RENDEZVOUS},is_host={not self.agents}"]
        command = [sys.executable, "-m", "torch.distributed.run", *self.elastic, *holds, *self.script]
        with self.log(name).open("a") as log, contextlib.chdir(ROOT):
            files = {"stdout": log.fileno(), "stderr": log.fileno()}
            self.agents[name] = fork_process(fork_server(), command, environment=self.environment, **files)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def processes(self, name: str) -> list[psutil.Process]:
        """Return a node's agent and rank: their stdout is the node's log."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process.pid}/fd/1").readlink() == self.log(name):
                    found.append(process)
        return found

    def lose(self, name: str) -> None:
        """End a node's agent and rank without warning."""
        processes = self.processes(name)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                process.kill()
        psutil.wait_procs(processes, timeout=WAIT_SECONDS)
        self.agents.pop(name).wait(WAIT_SECONDS)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not reached():
            assert time.monotonic() < deadline, f"{what}\n{self.text()}"
            time.sleep(0.05)

    def train_on(self, world_size: int, *, attempt: int, steps: int = 3) -> None:
        def reached() -> bool:
            run = RunFolder(self.out).read_run() or {}
            start = (run.get("resumed_from") or {"step": 0})["step"]
            trained = min((last_step(RunFolder(self.out).rank_rows(rank)) for rank in range(world_size)), default=0)
            own = run.get("attempt", 0) >= attempt and run.get("world_size") == world_size
            return own and trained >= start + steps

        self.wait(f"no {steps} steps of attempt {attempt} on {world_size} ranks", reached)

    def stop(self) -> None:
        """Send SIGTERM to every agent, as a cluster does, and wait for them."""
        for agent in self.agents.values():
            agent.terminate()
        for agent in self.agents.values():
            agent.wait(WAIT_SECONDS)

    def text(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in self.folder.glob("*.log"))


def elastic_job(model: Path, dataset: Path) -> list[str]:
    """Four sequences per step on any number of ranks, in fp32 and with a constant learning rate."""
    words = ["--model_name_or_path", str(model), "--dataset", str(dataset), "--max_seq_length", "64"]
    words += ["--per_device_train_batch_size", "1", "--global_batch_size", "4", "--lr_scheduler_type", "constant"]
    return [*words, "--learning_rate", "1e-3", "--bf16", "false", "--save_model", "false"]


def losses_of_steps(folder: Path) -> list[float]:
    return [loss or 0.0 for loss in measure(read_steps(RunFolder(folder)), untimed_steps=0).losses]


def losses_without_interruption(preset: str, job: list[str], folder: Path, *, steps: int) -> list[float]:
    """Train so many steps on two ranks of this host, and return the loss of each."""
    words = ["--output_dir", str(folder), "--max_steps", str(steps), "--save_strategy", "no"]
    ended = torchrun_preset(preset, *job, *words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return losses_of_steps(folder)


def check_restarts(nodes: Nodes, *, world_sizes: list[int]) -> None:
    """Assert that the last attempts of the run had so many ranks, and that there is one row per step and rank."""
    run, steps = read(nodes.out / "run.json"), read_steps(RunFolder(nodes.out))
    assert run["status"] == "interrupted", nodes.text()
    sizes = [*(restart["world_size"] for restart in run["restarts"]), run["world_size"]]
    assert sizes[-len(world_sizes) :] == world_sizes  # before, the first node may have trained alone
    assert {len(step) for step in steps} == {1, 2}
    assert [step[0].step for step in steps] == list(range(1, len(steps) + 1))

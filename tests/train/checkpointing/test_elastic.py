"""`torchrun --nnodes 1:2` loses a node and gets it back: the same rows and losses as an uninterrupted run.

Two elastic agents on this host stand for the nodes; tests/cluster has nodes of their own.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launching import ROOT, cpu_environment, read, torchrun_preset

from toolkit.run.folder import RunFolder
from toolkit.run.measurements import last_step, measure, read_steps

pytestmark = pytest.mark.launch

WAIT_SECONDS = 180.0
MANY_STEPS = 2000
LOSS_TOLERANCE = 1e-6  # observed: 7e-8
# A node counts as lost after three missed seconds, and nobody else is waited for: the defaults are 15 s and 30 s.
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.fixture
def job(tiny_model: Path, faq_alpaca: Path) -> list[str]:
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(faq_alpaca), "--max_seq_length", "64"]
    words += ["--per_device_train_batch_size", "1", "--global_batch_size", "4", "--lr_scheduler_type", "constant"]
    return [*words, "--learning_rate", "1e-3", "--bf16", "false", "--save_model", "false"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Nodes:
    """Elastic agents with one rank each, started and killed like nodes."""

    def __init__(self, preset: str, folder: Path, job: list[str], port: int) -> None:
        self.folder, self.out, self.agents = folder, folder / "out", dict[str, psutil.Popen]()
        rendezvous = ["--rdzv-id", "elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        self.elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", *rendezvous]
        words = [*job, "--output_dir", str(self.out), "--resume_from_checkpoint", "latest", "--save_steps", "2"]
        words += ["--max_steps", str(MANY_STEPS), "--save_total_limit", "2"]
        self.script = ["-m", "toolkit.train", *words]
        self.environment = cpu_environment() | {"TOOLKIT_PRESET": preset, "OMP_NUM_THREADS": "1"}
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self, name: str) -> None:
        """Start an agent; the first holds the rendezvous."""
        holds = ["--rdzv-conf", f"{RENDEZVOUS},is_host={name == 'first'}", "--local-addr", "127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *self.elastic, *holds, *self.script]
        with self.log(name).open("a") as log:
            self.agents[name] = psutil.Popen(command, env=self.environment, cwd=ROOT, stdout=log, stderr=log)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lose(self, name: str) -> None:
        """End a node's agent and rank without warning."""
        agent = self.agents.pop(name)
        processes = [agent, *agent.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=WAIT_SECONDS)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not reached():
            assert time.monotonic() < deadline, f"{what}\n{self.text()}"
            time.sleep(0.05)

    def train_on(self, world_size: int, *, attempt: int, steps: int = 3) -> None:
        """Wait until an attempt of so many ranks has trained some steps."""

        def reached() -> bool:
            run = RunFolder(self.out).read_run() or {}
            start = (run.get("resumed_from") or {"step": 0})["step"]
            trained = min((last_step(RunFolder(self.out).rank_rows(rank)) for rank in range(world_size)), default=0)
            own = run.get("attempt", 0) >= attempt and run.get("world_size") == world_size
            return own and trained >= start + steps

        self.wait(f"no {steps} steps of attempt {attempt} on {world_size} ranks", reached)

    def stop(self) -> None:
        for agent in self.agents.values():
            agent.terminate()
        psutil.wait_procs(list(self.agents.values()), timeout=WAIT_SECONDS)

    def text(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in self.folder.glob("*.log"))


@pytest.fixture
def started() -> Iterator[list[Nodes]]:
    """The nodes of a test, whose processes end with it."""
    started: list[Nodes] = []
    yield started
    for nodes in started:
        for name in list(nodes.agents):
            nodes.lose(name)


@pytest.mark.cold_start  # the agents, and with them their ranks, are processes that can be killed one by one
def test_a_run_that_loses_and_regains_a_node_trains_on_the_same_rows(
    job: list[str], started: list[Nodes], tmp_path: Path
) -> None:
    nodes = Nodes("zero2", tmp_path, job, port=free_port())
    started.append(nodes)
    nodes.start("first")
    nodes.start("second")
    nodes.train_on(2, attempt=1, steps=5)
    nodes.lose("second")
    nodes.train_on(1, attempt=2)
    nodes.start("second")
    nodes.train_on(2, attempt=3)
    nodes.stop()

    run = read(nodes.out / "run.json")
    steps = read_steps(RunFolder(nodes.out))
    assert (run["status"], run["world_size"]) == ("interrupted", 2), nodes.text()
    sizes = [restart["world_size"] for restart in run["restarts"]]
    assert sizes[-2:] == [2, 1]  # before, the first node may have trained alone
    assert {len(step) for step in steps} == {1, 2}
    assert [step[0]["step"] for step in steps] == list(range(1, len(steps) + 1))
    whole = ["--output_dir", str(tmp_path / "whole"), "--max_steps", str(len(steps)), "--save_strategy", "no"]
    ended = torchrun_preset("zero2", *job, *whole)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = measure(read_steps(RunFolder(tmp_path / "whole")), untimed_steps=0).losses
    assert measure(steps, untimed_steps=0).losses == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_a_number_of_ranks_that_cannot_keep_the_batch_ends_the_run_after_its_restarts(
    job: list[str], tmp_path: Path
) -> None:
    words = [*job, "--global_batch_size", "3", "--output_dir", str(tmp_path / "out")]
    ended = torchrun_preset("ddp", *words, options=["--max-restarts", "1"])
    assert ended.returncode == 1
    refused = "3 is no multiple of 2 data-parallel ranks × 1 sequences"
    assert ended.stderr.count(refused) == 2  # attempts; only rank 0 prints it
    assert "numbers of processes that keep it: 1, 3" in ended.stderr
    assert not (tmp_path / "out").exists()

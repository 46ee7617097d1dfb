"""Training jobs on the cluster of the tests: written by `toolkit cluster slurm`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.machines import wait_until
from cluster.slurm import ENDED, Slurm
from launching import ROOT, accelerate_launch, read, toolkit

SAVE_SECONDS = 20
"""SLURM's warning then comes 100 s before the limit: early enough that the test need not wait for it."""
LAUNCH_SECONDS = 150.0
"""For a job to train its first step on a busy host: two launchers and two ranks import their libraries."""


class ClusterJobs:
    """Jobs of the tiny model on two nodes, one CPU rank on each."""

    def __init__(self, slurm: Slurm, *, model: Path, dataset: Path, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.words = ["--model_name_or_path", str(model), "--dataset", str(dataset), "--max_seq_length", "64"]
        self.words += ["--lr_scheduler_type", "constant", "--learning_rate", "1e-3"]
        self.submitted = list[str]()

    def submit(self, options: Sequence[str], out: Path, *training: str) -> str:
        """Write the job file as a user does, submit it, and return the job's number."""
        path = self.folder / f"{out.name}.sbatch"
        nodes = ["--nodes", "2", "--gpus-per-node", "1", "--cpu", "--time-limit", "10", "--output", str(path)]
        words = [*options, *nodes, "--", *self.words, *training, "--output_dir", str(out)]
        ended = toolkit("cluster", "slurm", *words)
        assert ended.returncode == 0, ended.stderr
        self.submitted.append(self.slurm.submit(path, log=self.folder / f"{out.name}.log"))
        return self.submitted[-1]

    def logs(self) -> str:
        """Return what the jobs of the test and their nodes have printed."""
        found = sorted([*self.folder.glob("**/*.log"), *self.folder.glob("**/*.err")])
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in found)

    def until(self, job: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition of a job in progress is true."""

        def reached() -> bool:
            assert self.slurm.job(job)["JobState"] not in ENDED, self.logs()
            return condition()

        wait_until(reached, f"job {job} trains", LAUNCH_SECONDS, lambda: self.slurm.state(job))

    def until_step(self, job: str, out: Path, step: int) -> None:
        """Wait until both ranks have trained a step in the job's current attempt."""
        self.until(job, lambda: min(steps(out)) >= step)

    def on_one_node(self, preset: str, out: Path, *words: str) -> Path:
        """Train the same with two ranks on one node."""
        config = ROOT / "accelerate_configs" / f"{preset}.yaml"
        ended = accelerate_launch(config, *self.words, "--save_model", "false", "--output_dir", str(out), *words)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return out

    def end(self) -> None:
        for job in self.submitted:
            self.slurm.cancel(job)
        for node in self.slurm.nodes:
            if node not in self.slurm.machines.on:
                self.slurm.machines.power_on(node)
        wait_until(lambda: set(self.slurm.node_states().values()) == {"idle"}, "all nodes are idle again", 60)


def steps(out: Path) -> list[int]:
    """Return the steps that each rank has written."""
    files = [out / "ranks" / f"rank{rank}.jsonl" for rank in (0, 1)]
    return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def hosts(out: Path) -> list[str]:
    """Return the node of each rank."""
    return [str(read(out / "ranks" / f"rank{rank}.heartbeat")["host"]) for rank in (0, 1)]


def rows(out: Path, rank: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step."""
    lines = (out / "ranks" / f"rank{rank}.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(row["loss"], row["grad_norm"]) for row in found]

"""Runs inside of a SLURM job: one `srun` per run, over as many of the job's nodes as its ranks fill."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Self

from toolkit.cluster.node_setup import ADDRESS_VARIABLE
from toolkit.errors import ToolkitError
from toolkit.launch.command import LaunchCommand, threads_per_rank, torchrun_words

SCONTROL_SECONDS = 30.0
# Below Linux's ephemeral ports, from which a connection of another program may have taken one.
FIRST_PORT, PORTS = 20_000, 10_000
# slurm.conf's KillWait is 30 s by default: ranks on other nodes end within it, or are killed.
SRUN_OPTIONS = ("--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--cpu-bind=none", "--export=ALL")


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The nodes of the SLURM job around this process, where the launcher stays, and how many ranks each has."""

    nodes: tuple[str, ...]  # host names; the first is the head of every run
    processes_per_node: int

    @classmethod
    def current(cls, *, processes_per_node: int) -> Self:
        """Read the job that this process runs in. Raises ToolkitError outside a SLURM job."""
        listed = os.environ.get("SLURM_JOB_NODELIST")  # compressed, such as `node[1-4]`
        if not listed:
            raise ToolkitError(
                "--nproc-per-node starts the ranks with srun, and this process runs in no SLURM job",
                hint="submit the command with `sbatch --nodes=2 --wrap '...'`; on one node leave the option out",
            )
        command = ["scontrol", "show", "hostnames", listed]
        try:
            names = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=SCONTROL_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolkitError(
                f"the nodes of the SLURM job, {listed[:80]}, cannot be listed: {error}",
                hint="`scontrol show hostnames` must work on this node",
            ) from None
        return cls(nodes=tuple(names.stdout.split()), processes_per_node=processes_per_node)

    @property
    def max_processes(self) -> int:
        """Ranks of a run on all nodes."""
        return len(self.nodes) * self.processes_per_node

    def check(self, num_processes: int) -> None:
        """Raise ToolkitError for a number of ranks that does not fill its nodes, or exceeds the allocation."""
        per_node = self.processes_per_node
        if num_processes > self.max_processes:
            raise ToolkitError(
                f"--num-processes is {num_processes}, the SLURM job has {len(self.nodes)} nodes with {per_node} each",
                hint=f"`--num-processes {self.max_processes}`, or a job with more nodes",
            )
        if num_processes > per_node and num_processes % per_node:
            hint = f"a multiple of {per_node}, or another `--nproc-per-node`"
            raise ToolkitError(f"--num-processes {num_processes} does not fill nodes of {per_node} ranks", hint=hint)

    def nodes_of(self, num_processes: int) -> tuple[str, ...]:
        """Return the nodes that a run with this many ranks takes."""
        return self.nodes[: -(-num_processes // self.processes_per_node)]

    def spread(self, command: LaunchCommand) -> LaunchCommand:
        """Return the run as one `srun` over its nodes, with the same preset, arguments and environment."""
        nodes, cores = self.nodes_of(command.num_processes), os.environ.get("SLURM_CPUS_PER_TASK")
        local = min(command.num_processes, self.processes_per_node)
        environment = dict(command.environment)
        if "OMP_NUM_THREADS" in environment and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(threads_per_rank(local))
        # Each node finds its address and interface, and runs torchrun in the place of the shell.
        head, port = nodes[0], FIRST_PORT + int(command.run_id[:8], 16) % PORTS
        setup = [sys.executable, "-m", "toolkit.cluster.node_setup", "--head", head, "--port", str(port)]
        setup += ["--peer", nodes[1]] if len(nodes) > 1 else []
        words = torchrun_words(
            nnodes=str(len(nodes)), processes_per_node=local, attempt=command.run_id, endpoint=f"{head}:{port}"
        )
        torchrun = f'{shlex.quote(sys.executable)} {" ".join(words)} --local-addr "${ADDRESS_VARIABLE}"'
        torchrun += f" -m toolkit.train {shlex.join(command.training_argv)}"
        argv = [
            *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}"),
            *SRUN_OPTIONS,
            *([] if cores is None else [f"--cpus-per-task={cores}"]),  # srun does not take it over from sbatch
            *("bash", "-c", f'settings=$({shlex.join(setup)}) || exit; eval "$settings"; exec {torchrun}'),
        ]
        return replace(command, argv=argv, shown=shlex.join(argv), environment=environment)

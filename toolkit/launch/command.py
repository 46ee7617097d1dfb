"""The command that starts a run: built once, then printed, executed and recorded as the same object.

>>> from toolkit.presets import load_preset
>>> command = launch_command(load_preset("ddp"), num_processes=2, training_argv=["--max_steps", "8"], cpu=True)
>>> command.argv[-4:]
['-m', 'toolkit.train', '--max_steps', '8']
"""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.files.secrets import separate_secrets
from toolkit.launch.environment import NVME_PATH_VARIABLE, RUN_ID_VARIABLE, accelerate_options, run_environment
from toolkit.presets import Preset
from toolkit.record.heartbeat import HANG_TIMEOUT_VARIABLE

RESUME_LATEST = ("--resume_from_checkpoint", "latest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCommand:
    """One process to start, and how a user would start it from a shell."""

    argv: list[str]
    environment: dict[str, str]
    """Variables added to those of this process."""
    shown: str
    """The same run as a shell line."""
    run_id: str
    """The value of `TOOLKIT_RUN_ID` in every process of the run, by which all of them are found and ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand(ProcessCommand):
    """The launch of all ranks of a run: `argv` is accelerate's launcher."""

    preset: Preset
    num_processes: int
    training_argv: list[str]
    """Arguments of the training script, the same for every rank; `***` for each secret, which `environment` has."""
    nvme_path: Path | None = None
    """The disk that the run offloads to."""

    def resumed(self) -> LaunchCommand:
        """Return the command that resumes the run from its newest checkpoint, under a new run id."""
        return replace(
            self.repeated(),
            training_argv=[*self.training_argv, *RESUME_LATEST],  # the last of two equal flags counts
            argv=[*self.argv, *RESUME_LATEST],
            shown=f"{self.shown} {shlex.join(RESUME_LATEST)}",
        )

    def repeated(self) -> LaunchCommand:
        """Return the same command under a new run id."""
        new = new_run_id()
        return replace(self, environment=self.environment | {RUN_ID_VARIABLE: new}, run_id=new)


def launch_command(
    preset: Preset,
    *,
    num_processes: int,
    training_argv: Sequence[str],
    cpu: bool,
    nvme_path: Path | None = None,
    hang_timeout_minutes: float | None = None,
) -> LaunchCommand:
    """Build the command that starts `num_processes` ranks on this node.

    Its arguments are what everybody may read: secrets are in its environment.
    """
    shown_argv, secrets = separate_secrets(training_argv)
    options = accelerate_options(preset, world_size=num_processes)
    script = ["-m", "toolkit.train", *shown_argv]
    port = ["--num_machines", "1", "--main_process_port", "0"]  # 0: any free port
    run_id = new_run_id()
    variables = {NVME_PATH_VARIABLE: nvme_path, HANG_TIMEOUT_VARIABLE: hang_timeout_minutes}
    added = {name: str(value) for name, value in variables.items() if value is not None}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    return LaunchCommand(
        preset=preset,
        num_processes=num_processes,
        training_argv=shown_argv,
        argv=[sys.executable, "-m", "accelerate.commands.launch", *options, *port, *script],
        environment=run_environment(preset, world_size=num_processes, cpu=cpu, run_id=run_id) | added | secrets,
        shown=" ".join([*assignments, shlex.join(["accelerate", "launch", *options, *script])]),
        run_id=run_id,
        nvme_path=nvme_path,
    )


def torchrun_words(*, nnodes: str, processes_per_node: int, attempt: str, endpoint: str) -> list[str]:
    """Return torchrun and its rendezvous for the shell, which expands the variables in `attempt` and `endpoint`."""
    return [
        "-m torch.distributed.run",
        f"--nnodes {nnodes} --nproc-per-node {processes_per_node}",
        f'--rdzv-id "{attempt}" --rdzv-backend c10d --rdzv-endpoint "{endpoint}"',
    ]


def new_run_id() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex

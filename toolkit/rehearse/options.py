"""The options of `toolkit rehearse`, in one dataclass from the command line to the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit.flags import CpuFlag, PresetName, TrainingArguments
from toolkit.hardware.gpus import trains_on_cpu, visible_world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearseOptions:
    """One rank to rehearse, and its training arguments."""

    preset: PresetName
    num_processes: Annotated[
        int | None,
        typer.Option(help="ranks to rehearse, whose GPUs are not needed; by default as many as GPUs are visible"),
    ] = None
    training_arguments: TrainingArguments = ()
    rank: Annotated[int, typer.Option(help="the rank to run")] = 0
    cpu: CpuFlag = None
    fake_tensors: Annotated[
        bool,
        typer.Option("--fake-tensors", help="memory by part for a model that does not fit here (FSDP2 and DDP only)"),
    ] = False

    @property
    def world_size(self) -> int:
        """Number of ranks: as given, or one per visible GPU. Raises ToolkitError without a GPU."""
        return visible_world_size() if self.num_processes is None else self.num_processes

    @property
    def on_cpu(self) -> bool:
        """True if the rank runs on the CPU: as the option says, or because no GPU is visible."""
        return trains_on_cpu(self.cpu)

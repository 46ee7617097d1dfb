"""The options of `toolkit rehearse`, in one dataclass from the command line to the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit.flags import CpuFlag, PresetName, TrainingArguments
from toolkit.hardware.gpus import trains_on_cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearseOptions:
    """One rank to rehearse, and its training arguments."""

    preset: PresetName
    world_size: Annotated[
        int, typer.Option("--num-processes", help="number of ranks to rehearse; their GPUs are not needed")
    ]
    training_arguments: TrainingArguments = ()
    rank: Annotated[int, typer.Option(help="the rank to run")] = 0
    cpu: CpuFlag = None
    fake_tensors: Annotated[
        bool,
        typer.Option("--fake-tensors", help="memory by part for a model that does not fit here (FSDP2 and DDP only)"),
    ] = False

    @property
    def on_cpu(self) -> bool:
        """True if the rank runs on the CPU: as the option says, or because no GPU is visible."""
        return trains_on_cpu(self.cpu)

"""A rehearsal: one rank of a world that is not there. What its two processes and its readers agree on.

    refuse_rehearsals([Path("out")])    # ToolkitError: out is a rehearsal, ...

Nothing of a rehearsal is a result of training: its collectives move nothing, so losses mean nothing and no speed
counts them. Its run.json says `rehearsal`, by which every reader of runs knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import ToolkitError
from toolkit.runs.folder import RunFolder

RANK_VARIABLE = "TOOLKIT_REHEARSAL_RANK"
# As `--dataset`: rows of exactly `max_seq_length` tokens, the most that a batch can hold.
SYNTHETIC = "synthetic"
DEFAULT_STEPS = 3
# What a rehearsal would only lose time with; weights are not worth saving.
FORCED_ARGUMENTS = {"save_model": "false", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
FAKE_TENSORS_VARIABLE = "TOOLKIT_REHEARSAL_FAKE_TENSORS"
TRACE_CANNOT_TELL = (
    "what an allocator adds: rounding, fragmentation, cached blocks",
    "workspaces of kernels and libraries, the CUDA context, the communication library's buffers",
    "the peak while the model is loaded",
    "time, losses and gradient norms",
)
CANNOT_TELL = (
    "losses, gradient norms and accuracies (what other ranks would have sent is not there)",
    "the speed of collectives, and of a step that waits for them",
    "whether all ranks hold the same weights and different batches",
)


class PresetFacts(Protocol):
    """What is asked of a preset here."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def offload_optimizer(self) -> str | None: ...
    @property
    def offload_param(self) -> str | None: ...
    @property
    def min_world_size(self) -> int: ...
    @property
    def max_world_size(self) -> int | None: ...
    @property
    def world_size_multiple(self) -> int: ...
    @property
    def needs_gpu(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """Which rank of which world."""

    world_size: int
    rank: int
    fake_tensors: bool = False
    """Shapes without memory: peaks by part instead of readings of real tensors."""


def check_rehearsal(preset: PresetFacts, *, world_size: int, rank: int) -> None:
    """Refuse a world that the preset does not train in, a rank that is not in it, and what no rehearsal can tell."""
    if world_size < 1:
        raise ToolkitError(f"--world-size is {world_size}, expected 1 or more")
    if world_size < preset.min_world_size:
        raise ToolkitError(
            f"preset {preset.name!r} needs at least {preset.min_world_size} processes, --world-size is {world_size}",
            hint=f"`--world-size {preset.min_world_size}`",
        )
    if preset.max_world_size is not None and world_size > preset.max_world_size:
        raise ToolkitError(
            f"preset {preset.name!r} trains in one process, --world-size is {world_size}",
            hint="`--world-size 1`, or `--preset ddp` for several",
        )
    if world_size % preset.world_size_multiple:
        raise ToolkitError(
            f"preset {preset.name!r} needs a multiple of {preset.world_size_multiple} processes,"
            f" --world-size is {world_size}",
            hint=f"`--world-size {world_size + -world_size % preset.world_size_multiple}`",
        )
    if not 0 <= rank < world_size:
        raise ToolkitError(
            f"--rank is {rank}, and a world of {world_size} has ranks 0 to {world_size - 1}", hint="`--rank 0`"
        )
    why = cannot_rehearse(preset)
    if why is not None:
        raise ToolkitError(
            f"preset {preset.name!r} cannot be rehearsed: {why}", hint="`toolkit plan` has its arithmetic"
        )


def check_traced(preset: PresetFacts) -> None:
    """Refuse the engines that do not run on fake tensors, and what one memory cannot tell apart."""
    why = None
    if preset.engine == "deepspeed":
        why = "DeepSpeed looks into its tensors' values and addresses"
    elif preset.offload_optimizer or preset.offload_param:
        why = "what is offloaded and what is not would lie in one memory"
    if why is not None:
        raise ToolkitError(
            f"--fake-tensors does not work with preset {preset.name!r}: {why}",
            hint="leave --fake-tensors out, for exact bytes of the model states; or `--preset fsdp2`",
        )


def cannot_rehearse(preset: PresetFacts) -> str | None:
    """Why the preset's engine does not run with collectives that move nothing, or None where it does."""
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        return "its swap files belong to a real run on a real disk"
    if preset.needs_gpu is not None:
        return f"{preset.needs_gpu}, and its quantised collectives need other ranks"
    return None


def rehearsal_of(run: dict[str, Any] | None) -> Rehearsed | None:
    """What run.json says of a rehearsal; None for a run."""
    said = (run or {}).get("rehearsal")
    return None if not said else Rehearsed(**{name: said[name] for name in ("world_size", "rank")})


def refuse_rehearsals(folders: Sequence[Path]) -> None:
    """Where results of training are wanted."""
    for folder in folders:
        said = rehearsal_of(RunFolder(folder).read_run())
        if said is not None:
            raise ToolkitError(
                f"{folder} is a rehearsal (rank {said.rank} of {said.world_size}): it has no speed and no loss",
                hint="`toolkit train` or `toolkit compare` make runs",
            )

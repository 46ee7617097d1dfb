"""Inspect one checkpoint, or all checkpoints of a run folder, without loading a tensor. No torch.

`inspect_checkpoint(Path("out/checkpoint-8")).engine` is `deepspeed`, for example.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.detection import FSDP_MODEL, FSDP_OPTIMIZER, Layout, detect, is_checkpoint
from toolkit.errors import ToolkitError
from toolkit.parallel.layout import ParallelLayout
from toolkit.record.checkpoints import (
    AT_LOAD_OPTIMIZER,
    MANIFEST,
    Manifest,
    list_checkpoints,
    read_checkpoint,
    read_step,
)
from toolkit.units import gib

# Parts of file names. DeepSpeed's fp32 master weights are in the optimizer's files, and count as such.
_MODEL_FILES = (
    *(FSDP_MODEL, "model.safetensors", "model-", "adapter_model", "pytorch_model", "model_states.pt", "fp32.pt"),
)
_OPTIMIZER_FILES = (
    FSDP_OPTIMIZER,
    AT_LOAD_OPTIMIZER,
    "optimizer.pt",
    "optimizer_stage",
    "optim_states.pt",
    "exp_avg",
    "optimizer_state.pt",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """One checkpoint; fields are the keys of `inspect --json`, None where neither manifest nor files tell."""

    path: str
    state: str
    """`complete`, `damaged` or `no manifest: completeness unknown`."""
    problem: str | None
    step: int | None
    preset: str | None
    engine: str | None
    sharding: str | None
    world_size: int | None
    layout: dict[str, int] | None
    """Degrees of parallelism; None for data parallelism alone."""
    sharded_at_load: bool
    """transformers sharded the model while it loaded it."""
    num_params: int | None
    num_trainable_params: int | None
    adapter: bool | None
    converted_from: dict[str, Any] | None
    model_bytes: int
    optimizer_bytes: int
    other_bytes: int

    def lines(self) -> list[str]:
        """Return the summary for a terminal."""

        def shown(value: Any) -> str:
            return "n/a" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

        kind = {True: "adapter", False: "full model", None: "n/a"}[self.adapter]
        lines = [
            self.path,
            f"  {self.state}{': ' + self.problem if self.problem else ''}",
            f"  step {shown(self.step)}, preset {shown(self.preset)}, engine {shown(self.engine)}"
            f" ({shown(self.sharding)}), {shown(self.world_size)} ranks{self._division}",
            f"  {kind}, {shown(self.num_trainable_params)} of {shown(self.num_params)} parameters trained",
            f"  model {gib(self.model_bytes)}, optimizer {gib(self.optimizer_bytes)}, other {gib(self.other_bytes)}",
        ]
        return lines + ([f"  converted from {self.converted_from['path']}"] if self.converted_from else [])

    @property
    def _division(self) -> str:
        degrees = f": {ParallelLayout(**self.layout)}" if self.layout else ""
        return degrees + (", sharded at load" if self.sharded_at_load else "")


def inspect_all(path: Path) -> list[CheckpointSummary]:
    """Inspect a checkpoint, or all checkpoints of a run folder, newest first. Raises ToolkitError if there is none."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint or a run folder")
    inside = [checkpoint.path for checkpoint in list_checkpoints(path)]
    if not is_checkpoint(path) and inside:
        return [inspect_checkpoint(each) for each in inside]
    return [inspect_checkpoint(path)]


def inspect_checkpoint(path: Path) -> CheckpointSummary:
    """Inspect one checkpoint; with a manifest every byte is read. Raises ToolkitError if the folder holds none."""
    checkpoint = read_checkpoint(path)
    manifest, has_manifest = checkpoint.manifest, os.path.lexists(path / MANIFEST)
    layout, problem = None, None
    try:
        layout = detect(path)
    except ToolkitError as error:
        problem = error.message
        if not has_manifest:
            raise
    if has_manifest:
        problem = checkpoint.problem(deep=True) or problem
        state = "complete" if problem is None else "damaged"
    else:
        state = "no manifest: completeness unknown"
    converted_from = manifest.converted_from if manifest else None
    return CheckpointSummary(
        path=str(path),
        state=state,
        problem=problem,
        step=manifest.step if manifest else _recorded_step(path),
        preset=manifest.preset if manifest else None,
        engine=_known(manifest, "engine", _engine(layout)),
        sharding=manifest.sharding if manifest else None,
        world_size=_known(manifest, "world_size", layout.world_size if layout else None),
        layout=manifest.layout if manifest else None,
        sharded_at_load=manifest.sharded_at_load if manifest else layout is not None and layout.engine == "at_load",
        num_params=manifest.num_params if manifest else None,
        num_trainable_params=manifest.num_trainable_params if manifest else None,
        adapter=_known(manifest, "adapter", layout.adapter if layout else None),
        converted_from=converted_from.model_dump() if converted_from else None,
        **_bytes_by_role(path),
    )


def _known(manifest: Manifest | None, name: str, otherwise: Any) -> Any:
    recorded = getattr(manifest, name, None)
    return otherwise if recorded is None else recorded


def _recorded_step(path: Path) -> int | None:
    """The step in the Trainer's own state; None without one that can be read."""
    try:
        return read_step(path / "trainer_state.json")
    except ToolkitError:
        return None


def _bytes_by_role(path: Path) -> dict[str, int]:
    found = {"model_bytes": 0, "optimizer_bytes": 0, "other_bytes": 0}
    for file in path.rglob("*"):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            optimizer = any(part in name for part in _OPTIMIZER_FILES)
            model = not optimizer and any(part in name for part in _MODEL_FILES)
            found["optimizer_bytes" if optimizer else "model_bytes" if model else "other_bytes"] += file.stat().st_size
    return found


def _engine(layout: Layout | None) -> str | None:
    if layout is None:
        return None
    if layout.engine == "plain":
        return "ddp" if (layout.world_size or 1) > 1 else "none"
    return {"universal": "deepspeed", "at_load": "fsdp2"}.get(layout.engine, layout.engine)

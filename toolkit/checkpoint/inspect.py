"""Detect which engine wrote a checkpoint, and inspect checkpoints without loading a tensor. No torch.

`detect(Path("out/checkpoint-8")).engine` is `deepspeed`, for example; `inspect_all(Path("out"))` has a summary of each.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.engines.ddp import Ddp
from toolkit.engines.fsdp2 import Fsdp2
from toolkit.engines.zero import Zero
from toolkit.errors import ToolkitError
from toolkit.files.documents import read_folder_name
from toolkit.parallel.layout import ParallelLayout
from toolkit.record.checkpoints import (
    AT_LOAD_OPTIMIZER,
    MANIFEST,
    STAGE_OPTIMIZER,
    Manifest,
    list_checkpoints,
    read_checkpoint,
    read_step,
)
from toolkit.record.folder import RunFolder
from toolkit.units import gib

FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FULL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LATEST_UNIVERSAL = "latest_universal"
_LATEST = {LATEST_UNIVERSAL: "universal", "latest": Zero.name}
# Written by other training programs, or with options that no preset uses.
_UNSUPPORTED = {
    "pytorch_model_fsdp.bin": "FSDP's FULL_STATE_DICT; presets write SHARDED_STATE_DICT",
    "pytorch_model.bin": "weights in pickle format instead of safetensors",
}
BY_SIZE = "complete by the sizes of its files; it has no checksums"  # of a run that ended before they were there
# Parts of file names. DeepSpeed's fp32 master weights are in the optimizer's files, and count as such.
_OPTIMIZER_FILES = ("optimizer", "optim_states.pt", "exp_avg")
_MODEL_FILES = ("model.safetensors", "model-", "adapter_model", "pytorch_model", "model_states.pt", "fp32.pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A checkpoint's engine, and where its files are."""

    path: Path
    engine: str
    """`deepspeed`, `fsdp2`, `at_load` (transformers sharded the model while it loaded it), `pipeline`, `plain` (DDP and
    a single process write the same files) or `universal`."""
    state_folder: Path  # folder of the sharded states: `global_stepN/` for DeepSpeed, otherwise the checkpoint itself
    adapter: bool | None  # true if only an adapter was saved; None if the files do not tell
    world_size: int | None  # number of ranks that wrote it; None if the files do not tell


def detect(path: Path) -> Layout:
    """Return the layout of a checkpoint. Raises ToolkitError if the folder holds none that is supported."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint: `OUTPUT_DIR/checkpoint-STEP`")
    state_folder, adapter = path, True if (path / "adapter_config.json").exists() else None
    latest = next((name for name in _LATEST if (path / name).is_file()), None)
    if latest is not None:
        engine, state_folder = _LATEST[latest], path / read_folder_name(path / latest)
        adapter, ranks = adapter or False, len(list(state_folder.glob("*_optim_states.pt")))
    elif (path / FSDP_MODEL).is_dir():
        engine, ranks = "fsdp2", len({rank_of(file) for file in (path / FSDP_MODEL).glob("__*.distcp")})
    elif any((path / name).exists() for name in (ADAPTER_WEIGHTS, *FULL_WEIGHTS)):
        adapter, ranks = (path / ADAPTER_WEIGHTS).exists(), len(list(path.glob("rng_state*.pth")))
        pipeline, at_load = (path / STAGE_OPTIMIZER.format(rank=0)).is_file(), (path / AT_LOAD_OPTIMIZER).is_dir()
        engine = "pipeline" if pipeline else "at_load" if at_load else "plain"
    else:
        why = next((f" ({name}: {why})" for name, why in _UNSUPPORTED.items() if (path / name).exists()), "")
        inside = list_checkpoints(path)
        hint = f"name one of its checkpoints: `{inside[0].path}`" if inside else "name a folder `checkpoint-STEP`"
        raise ToolkitError(f"{path} holds no supported checkpoint{why}", hint=hint)
    return Layout(path=path, engine=engine, state_folder=state_folder, adapter=adapter, world_size=ranks or None)


def check_readable(path: Path) -> None:
    """Raise ToolkitError for a checkpoint in DeepSpeed's universal layout, which only DeepSpeed reads."""
    if (path / LATEST_UNIVERSAL).is_file():
        hint = "use the checkpoint that it was converted from (`converted_from` in its manifest.json)"
        raise ToolkitError(f"{path} was converted for a preset of ZeRO, and cannot be read again", hint=hint)


def newest_of_script(path: Path) -> Path:
    """Return the newest checkpoint of a script's run, any other path as it is. Raises ToolkitError for none."""
    folder = RunFolder(path).checkpoints
    if folder == path:
        return path
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ToolkitError(f"{path}: its script saved no checkpoint in {folder}", hint="its argument: `--save_steps N`")
    return checkpoints[0].path


def is_checkpoint(path: Path) -> bool:
    """Return True if the folder holds training state and not only a model."""
    names = ("optimizer.pt", "trainer_state.json", "latest", MANIFEST, LATEST_UNIVERSAL, FSDP_MODEL, AT_LOAD_OPTIMIZER)
    return any((path / name).exists() for name in names)


def rank_of(path: Path) -> int:
    """Return the rank that wrote a file.

    >>> rank_of(Path("__1_0.distcp")), rank_of(Path("zero_pp_rank_3_mp_rank_00_optim_states.pt"))
    (1, 3)
    """
    found = re.search(r"(?:pp_rank_|^__|dp_rank_)(\d+)", path.name)
    return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """One checkpoint; fields are the keys of `inspect --json`, None where neither manifest nor files tell."""

    path: str
    state: str  # `complete`, `BY_SIZE`, `damaged` or `no manifest: completeness unknown`
    problem: str | None
    step: int | None
    preset: str | None
    engine: str | None
    sharding: str | None
    world_size: int | None
    layout: dict[str, int] | None  # degrees of parallelism; None for data parallelism alone
    sharded_at_load: bool  # transformers sharded the model while it loaded it
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
        division = f": {ParallelLayout(**self.layout)}" if self.layout else ""
        division += ", sharded at load" if self.sharded_at_load else ""
        lines = [
            self.path,
            f"  {self.state}{': ' + self.problem if self.problem else ''}",
            f"  step {shown(self.step)}, preset {shown(self.preset)}, engine {shown(self.engine)}"
            f" ({shown(self.sharding)}), {shown(self.world_size)} ranks{division}",
            f"  {kind}, {shown(self.num_trainable_params)} of {shown(self.num_params)} parameters trained",
            f"  model {gib(self.model_bytes)}, optimizer {gib(self.optimizer_bytes)}, other {gib(self.other_bytes)}",
        ]
        return lines + ([f"  converted from {self.converted_from['path']}"] if self.converted_from else [])


def inspect_all(path: Path) -> list[CheckpointSummary]:
    """Inspect a checkpoint, or all checkpoints of a run folder, newest first. Raises ToolkitError if there is none."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint or a run folder")
    folder = RunFolder(path).checkpoints
    inside = [] if is_checkpoint(path) else [checkpoint.path for checkpoint in list_checkpoints(folder)]
    return [inspect_checkpoint(each) for each in inside or [path]]


def inspect_checkpoint(path: Path) -> CheckpointSummary:
    """Inspect one checkpoint; with a manifest every byte is read. Raises ToolkitError if the folder holds none."""
    checkpoint = read_checkpoint(path)
    recorded = checkpoint.manifest or Manifest(step=0, files=())
    layout, engine, problem, state = None, None, None, "no manifest: completeness unknown"
    try:
        layout = detect(path)
        plain = Ddp().in_effect(layout.world_size or 1)
        engine = {"universal": Zero.name, "at_load": Fsdp2.name, "plain": plain}.get(layout.engine, layout.engine)
    except ToolkitError as error:
        problem = error.message
        if not os.path.lexists(path / MANIFEST):
            raise
    if os.path.lexists(path / MANIFEST):
        problem = checkpoint.problem(deep=True) or problem
        whole = "complete" if all(entry.sha256 for entry in recorded.files) else BY_SIZE
        state = "damaged" if problem else whole
    step = None if checkpoint.manifest is None else recorded.step
    if checkpoint.manifest is None:
        with contextlib.suppress(ToolkitError):
            step = read_step(path / "trainer_state.json")  # the Trainer's own
    num_bytes = {"model": 0, "optimizer": 0, "other": 0}
    for file in path.rglob("*"):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            is_optimizer = any(part in name for part in _OPTIMIZER_FILES)
            role = "optimizer" if is_optimizer else "model" if any(part in name for part in _MODEL_FILES) else "other"
            num_bytes[role] += file.stat().st_size
    return CheckpointSummary(
        path=str(path),
        state=state,
        problem=problem,
        step=step,
        preset=recorded.preset,
        engine=recorded.engine or engine,
        sharding=recorded.sharding,
        world_size=recorded.world_size or (layout.world_size if layout else None),
        layout=recorded.layout,
        sharded_at_load=recorded.sharded_at_load or (layout is not None and layout.engine == "at_load"),
        num_params=recorded.num_params,
        num_trainable_params=recorded.num_trainable_params,
        adapter=recorded.adapter if recorded.adapter is not None or layout is None else layout.adapter,
        converted_from=recorded.converted_from.model_dump() if recorded.converted_from else None,
        **{f"{role}_bytes": size for role, size in num_bytes.items()},
    )

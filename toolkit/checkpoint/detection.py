"""The engine that wrote a checkpoint folder, detected from its files. No torch.

`detect(Path("out/checkpoint-8")).engine` is `deepspeed`, for example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files.reading import read_folder_name
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER, STAGE_OPTIMIZER

FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FULL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LATEST_UNIVERSAL = "latest_universal"
# Written by other training programs, or with options that no preset uses.
_UNSUPPORTED = {
    "pytorch_model_fsdp.bin": "FSDP's FULL_STATE_DICT; presets write SHARDED_STATE_DICT",
    "pytorch_model.bin": "weights in pickle format instead of safetensors",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A checkpoint's engine, and where its files are."""

    path: Path
    engine: str
    """`deepspeed`, `fsdp2`, `at_load` (transformers sharded the model while it loaded it), `pipeline`, `plain` (DDP and
    a single process write the same files) or `universal`."""
    state_folder: Path
    """Folder of the sharded states: `global_stepN/` for DeepSpeed, otherwise the checkpoint itself."""
    adapter: bool | None
    """True if only an adapter was saved; None if the files do not tell."""
    world_size: int | None
    """Number of ranks that wrote it; None if the files do not tell."""


def detect(path: Path) -> Layout:
    """Return the layout of a checkpoint. Raises ToolkitError if the folder holds none that is supported."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint: `OUTPUT_DIR/checkpoint-STEP`")
    adapter = True if (path / "adapter_config.json").exists() else None
    for latest, engine in ((LATEST_UNIVERSAL, "universal"), ("latest", "deepspeed")):
        if (path / latest).is_file():
            folder = path / read_folder_name(path / latest)
            ranks = len(list(folder.glob("*_optim_states.pt")))
            return Layout(
                path=path, engine=engine, state_folder=folder, adapter=adapter or False, world_size=ranks or None
            )
    if (path / FSDP_MODEL).is_dir():
        ranks = len({rank_of(file) for file in (path / FSDP_MODEL).glob("__*.distcp")})
        return Layout(path=path, engine="fsdp2", state_folder=path, adapter=adapter, world_size=ranks or None)
    if (path / ADAPTER_WEIGHTS).exists() or any((path / name).exists() for name in FULL_WEIGHTS):
        ranks = len(list(path.glob("rng_state*.pth")))
        is_adapter = (path / ADAPTER_WEIGHTS).exists()
        engine = "at_load" if (path / AT_LOAD_OPTIMIZER).is_dir() else "plain"
        engine = "pipeline" if (path / STAGE_OPTIMIZER.format(rank=0)).is_file() else engine
        return Layout(path=path, engine=engine, state_folder=path, adapter=is_adapter, world_size=ranks or None)
    raise ToolkitError(f"{path} holds no supported checkpoint{_unsupported(path)}", hint=_suggestion(path))


def check_readable(path: Path) -> None:
    """Raise ToolkitError for a checkpoint in DeepSpeed's universal layout, which only DeepSpeed reads."""
    if (path / LATEST_UNIVERSAL).is_file():
        raise ToolkitError(
            f"{path} was converted for a DeepSpeed preset, and cannot be read again",
            hint="use the checkpoint that it was converted from (`converted_from` in its manifest.json)",
        )


def is_checkpoint(path: Path) -> bool:
    """Return True if the folder holds training state and not only a model."""
    names = ("optimizer.pt", "trainer_state.json", "latest", "manifest.json")
    shards = (LATEST_UNIVERSAL, FSDP_MODEL, AT_LOAD_OPTIMIZER)
    return any((path / name).exists() for name in (*names, *shards))


def rank_of(path: Path) -> int:
    """Return the rank that wrote a file.

    >>> rank_of(Path("__1_0.distcp")), rank_of(Path("zero_pp_rank_3_mp_rank_00_optim_states.pt"))
    (1, 3)
    """
    found = re.search(r"(?:pp_rank_|^__|dp_rank_)(\d+)", path.name)
    return int(found[1]) if found else 0


def _unsupported(path: Path) -> str:
    reasons = [f"{name}: {why}" for name, why in _UNSUPPORTED.items() if (path / name).exists()]
    return f" ({reasons[0]})" if reasons else ""


def _suggestion(path: Path) -> str:
    inside = sorted(path.glob("checkpoint-*"))
    return f"name one of its checkpoints: `{inside[-1]}`" if inside else "name a folder `checkpoint-STEP`"

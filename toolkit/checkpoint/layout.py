"""Which engine wrote a checkpoint folder, told from its files alone. No torch.

>>> detect(Path("out/checkpoint-8")).engine
'deepspeed'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError

FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FULL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Present with other training frameworks' folders, or with options that no preset uses.
UNREADABLE = {
    "pytorch_model_fsdp.bin": "FSDP's FULL_STATE_DICT; presets write SHARDED_STATE_DICT",
    "pytorch_model.bin": "weights that are no safetensors",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A checkpoint's files by their role."""

    path: Path
    engine: str
    """`deepspeed`, `fsdp2`, `plain` (DDP and one process write alike) or `universal`."""
    state_folder: Path
    """Where the sharded states are: `global_stepN/` of DeepSpeed, the folder itself otherwise."""
    adapter: bool | None
    """Whether only an adapter was saved; None where the files do not say."""
    world_size: int | None
    """Ranks that wrote it; None where the files do not say."""


def detect(path: Path) -> Layout:
    """The layout of a checkpoint. Raises ToolkitError for a folder that holds none that can be read."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint: `OUTPUT_DIR/checkpoint-STEP`")
    adapter = True if (path / "adapter_config.json").exists() else None
    for latest, engine in (("latest_universal", "universal"), ("latest", "deepspeed")):
        if (path / latest).is_file():
            folder = path / (path / latest).read_text().strip()
            ranks = len(list(folder.glob("*_optim_states.pt")))
            return Layout(
                path=path, engine=engine, state_folder=folder, adapter=adapter or False, world_size=ranks or None
            )
    if (path / FSDP_MODEL).is_dir():
        ranks = len({rank_of(file) for file in (path / FSDP_MODEL).glob("__*.distcp")})
        return Layout(path=path, engine="fsdp2", state_folder=path, adapter=adapter, world_size=ranks or None)
    if (path / ADAPTER_WEIGHTS).exists() or any((path / name).exists() for name in FULL_WEIGHTS):
        ranks = len(list(path.glob("rng_state*.pth")))
        whole = not (path / ADAPTER_WEIGHTS).exists()
        return Layout(path=path, engine="plain", state_folder=path, adapter=not whole, world_size=ranks or None)
    raise ToolkitError(f"{path} holds no checkpoint that can be read{_found(path)}", hint=_other(path))


def is_checkpoint(path: Path) -> bool:
    """Whether the folder holds optimizer states, and not only a model."""
    marks = ("optimizer.pt", "trainer_state.json", "latest", "latest_universal", FSDP_MODEL, "manifest.json")
    return any((path / mark).exists() for mark in marks)


def rank_of(path: Path) -> int:
    """The rank that wrote a file: `__1_0.distcp`, `zero_pp_rank_1_mp_rank_00_optim_states.pt`."""
    found = re.search(r"(?:pp_rank_|^__|dp_rank_)(\d+)", path.name)
    return int(found[1]) if found else 0


def _found(path: Path) -> str:
    reasons = [f"{name}: {why}" for name, why in UNREADABLE.items() if (path / name).exists()]
    return f" ({reasons[0]})" if reasons else ""


def _other(path: Path) -> str:
    inside = sorted(path.glob("checkpoint-*"))
    return f"name one of its checkpoints: `{inside[-1]}`" if inside else "name a folder `checkpoint-STEP`"

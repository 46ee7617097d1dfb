"""What a checkpoint is, or all checkpoints of a run folder, without loading a tensor. No torch but for counting.

>>> look(Path("out/checkpoint-8"))["engine"]
'deepspeed'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.checkpoint.layout import FSDP_MODEL, FSDP_OPTIMIZER, Layout, detect, is_checkpoint
from toolkit.errors import ToolkitError
from toolkit.runs.checkpoints import MANIFEST, list_checkpoints, read_checkpoint
from toolkit.runs.folder import read_json
from toolkit.units import gib

UNKNOWN = "no manifest: completeness unknown"
MODEL_WORDS = (
    FSDP_MODEL,
    "model.safetensors",
    "model-",
    "adapter_model",
    "pytorch_model",
    "model_states.pt",
    "fp32.pt",
)
OPTIMIZER_WORDS = (FSDP_OPTIMIZER, "optimizer.pt", "optim_states.pt", "exp_avg", "optimizer_state.pt")


def look_at_all(path: Path) -> list[dict[str, Any]]:
    """Of a checkpoint, or of a run folder: newest first."""
    if not path.is_dir():
        raise ToolkitError(f"no such folder: {path}", hint="name a checkpoint or a run folder")
    inside = [checkpoint.path for checkpoint in list_checkpoints(path)]
    if not is_checkpoint(path) and inside:
        return [look(each) for each in inside]
    return [look(path)]


def look(path: Path) -> dict[str, Any]:
    """One checkpoint, as `inspect --json` gives it."""
    manifest = read_checkpoint(path).manifest or {}
    layout, problem = None, None
    try:
        layout = detect(path)
    except ToolkitError as error:
        problem = error.message
        if not manifest and not (path / MANIFEST).exists():
            raise
    if (path / MANIFEST).exists():
        problem = read_checkpoint(path).problem(deep=True) or problem
        state = "complete" if problem is None else "damaged"
    else:
        state = UNKNOWN
    return {
        "path": str(path),
        "state": state,
        "problem": problem,
        "step": manifest.get("step", (read_json(path / "trainer_state.json") or {}).get("global_step")),
        "preset": manifest.get("preset"),
        "engine": manifest.get("engine", _engine(layout)),
        "sharding": manifest.get("sharding"),
        "world_size": manifest.get("world_size", layout.world_size if layout else None),
        "num_params": manifest.get("num_params"),
        "num_trainable_params": manifest.get("num_trainable_params"),
        "adapter": manifest.get("adapter", layout.adapter if layout else None),
        "converted_from": manifest.get("converted_from"),
        **sizes(path),
    }


def sizes(path: Path) -> dict[str, int]:
    """Bytes of the model's files, of the optimizer's, and of the rest. DeepSpeed's fp32 masters are the optimizer's."""
    found = {"model_bytes": 0, "optimizer_bytes": 0, "other_bytes": 0}
    for file in path.rglob("*"):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            optimizer = any(word in name for word in OPTIMIZER_WORDS)
            model = not optimizer and any(word in name for word in MODEL_WORDS)
            found["optimizer_bytes" if optimizer else "model_bytes" if model else "other_bytes"] += file.stat().st_size
    return found


def lines(facts: dict[str, Any]) -> list[str]:
    """For people."""

    def known(value: Any) -> str:
        return "n/a" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    what = {True: "adapter", False: "full model", None: "n/a"}[facts["adapter"]]
    trained = f"{known(facts['num_trainable_params'])} of {known(facts['num_params'])} parameters trained"
    origin = facts["converted_from"]
    words = [
        facts["path"],
        f"  {facts['state']}{': ' + facts['problem'] if facts['problem'] else ''}",
        f"  step {known(facts['step'])}, preset {known(facts['preset'])}, engine {known(facts['engine'])}"
        f" ({known(facts['sharding'])}), {known(facts['world_size'])} ranks",
        f"  {what}, {trained}",
        f"  model {gib(facts['model_bytes'])}, optimizer {gib(facts['optimizer_bytes'])},"
        f" other {gib(facts['other_bytes'])}",
    ]
    return words + ([f"  converted from {origin['path']}"] if origin else [])


def _engine(layout: Layout | None) -> str | None:
    if layout is None:
        return None
    if layout.engine == "plain":
        return "ddp" if (layout.world_size or 1) > 1 else "none"
    return "deepspeed" if layout.engine == "universal" else layout.engine

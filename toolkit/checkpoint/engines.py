"""The reader and the writer of each engine's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.checkpoint.dcp_checkpoint import AtLoadReader, DcpReader, write_at_load, write_dcp
from toolkit.checkpoint.deepspeed_checkpoint import DeepSpeedReader, write_universal
from toolkit.checkpoint.hf_checkpoint import PlainReader, write_plain
from toolkit.checkpoint.inspect import check_readable, detect
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.reader import CheckpointReader, listed
from toolkit.errors import ToolkitError
from toolkit.files.safe_loading import check_checkpoint

WRITERS: dict[str, Callable[[Path, CheckpointReader, MetaModel, list[list[str]]], None]] = {
    **{"deepspeed": write_universal, "fsdp2": write_dcp, "at_load": write_at_load},
    **{"ddp": write_plain, "none": write_plain},
}
"""By engine of the preset that resumes: write weights and optimizer states, given the names in each parameter group."""
_READERS: dict[str, Callable[..., Any]] = {
    **{"deepspeed": DeepSpeedReader, "fsdp2": DcpReader, "at_load": AtLoadReader},
    **{"plain": PlainReader, "pipeline": PlainReader},
}


def open_checkpoint(path: Path, model: MetaModel, *, trust_pickle: bool = False) -> CheckpointReader:
    """Return the reader of a checkpoint. `model` names the states that DDP numbers.

    Raises ToolkitError for a pickle that would run something (unless it is trusted), for a converted DeepSpeed
    checkpoint, for numbered states that cannot be named, and for a weight of the model that is missing or misshapen.
    """
    check_readable(path)
    if not trust_pickle:
        check_checkpoint(path)
    layout = detect(path)
    reader = CheckpointReader(layout, lambda: _READERS[layout.engine](layout, model, trust_pickle=trust_pickle))
    saved = reader.shapes()
    missing = [name for name in model.shapes if name not in saved]
    if missing:
        raise ToolkitError(f"{path} lacks {listed(missing)}")
    for name, shape in model.shapes.items():
        if saved[name] != shape:
            raise ToolkitError(f"{name} in {path} has shape {saved[name]}, the model's is {shape}")
    return reader

"""The reader and the writer of each engine's checkpoints."""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoint.at_load_checkpoint import AtLoadReader, write_at_load
from toolkit.checkpoint.dcp_checkpoint import DcpReader, write_dcp
from toolkit.checkpoint.deepspeed_checkpoint import DeepSpeedReader, write_universal
from toolkit.checkpoint.detection import Layout, check_readable, detect
from toolkit.checkpoint.model_definition import MetaModel
from toolkit.checkpoint.plain_checkpoint import PlainReader, write_plain
from toolkit.checkpoint.reader import CheckedReader, CheckpointReader
from toolkit.files.safe_loading import check_checkpoint
from toolkit.presets.spec import PresetSpec

_WRITERS = {
    **{"deepspeed": write_universal, "fsdp2": write_dcp, "at_load": write_at_load},
    **{"ddp": write_plain, "none": write_plain},
}


def open_checkpoint(path: Path, model: MetaModel, *, trust_pickle: bool = False) -> CheckpointReader:
    """Return the reader of a checkpoint. `model` names the states that DDP numbers.

    Raises ToolkitError for a pickle that would run something (unless it is trusted), for a converted DeepSpeed
    checkpoint, and for numbered states that cannot be named.
    """
    check_readable(path)
    layout = detect(path)
    if not trust_pickle:
        check_checkpoint(path)
    return CheckedReader(path, lambda: _reader(layout, model, trust_pickle=trust_pickle))


def _reader(layout: Layout, model: MetaModel, *, trust_pickle: bool) -> CheckpointReader:
    match layout.engine:
        case "deepspeed":
            return DeepSpeedReader(layout, trust_pickle=trust_pickle)
        case "fsdp2":
            return DcpReader(layout, trust_pickle=trust_pickle)
        case "at_load":
            return AtLoadReader(layout, model, trust_pickle=trust_pickle)
    return PlainReader(layout, model, trust_pickle=trust_pickle)


def write_checkpoint(
    preset: PresetSpec, folder: Path, reader: CheckpointReader, model: MetaModel, groups: list[list[str]]
) -> None:
    """Write weights and optimizer states as a preset resumes them; `groups` are parameter names."""
    write = _WRITERS["at_load" if preset.sharded_at_load else preset.engine]
    write(folder, reader, model, groups)

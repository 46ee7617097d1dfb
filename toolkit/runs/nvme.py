"""Where a run keeps its swap files: a folder of its own on the disk that the user names.

    >>> swap_folder(Path("/nvme"), "f00d").name
    'finetune-toolkit-f00d'

DeepSpeed empties its parameter folder when it starts, so two runs must never share one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NVME_PATH_VARIABLE = "TOOLKIT_NVME_PATH"
# accelerate fills `"nvme_path": "auto"` from these; `accelerate launch` sets neither from its own flags.
ACCELERATE_VARIABLES = {
    "offload_optimizer": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
}
NAME_A_DISK = f"`toolkit train --nvme-path DIR`, or {NVME_PATH_VARIABLE}=DIR in the environment"


def swap_folder(nvme_path: Path, run_id: str) -> Path:
    """The swap files of one run; each rank has folders of its own in it."""
    return nvme_path / f"finetune-toolkit-{run_id}"


def nvme_blocks(zero: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The offload blocks of a `zero_optimization` block that name an NVMe disk."""
    blocks = {name: zero.get(name) or {} for name in ACCELERATE_VARIABLES}
    return {name: block for name, block in blocks.items() if block.get("device") == "nvme"}

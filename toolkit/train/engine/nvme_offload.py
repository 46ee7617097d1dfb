"""NVMe offload within a rank: DeepSpeed's buffers are sized from the model, where the preset's file leaves that out."""

from math import ceil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from toolkit.engines.zero_process import offload_blocks, set_changed_blocks
from toolkit.errors import ToolkitError
from toolkit.launch.nvme import NVME_PATH_HINT
from toolkit.observe.observed_run import ObservedRun, barrier
from toolkit.train.arguments import Arguments
from toolkit.train.model.loading import model_without_weights


def size_swap_buffers(arguments: Arguments) -> None:
    """Size DeepSpeed's swap buffers, before loading swaps already. Raises ToolkitError if NVMe offload has no disk."""
    blocks = offload_blocks(arguments.training)
    for name, block in blocks.items():
        if str(block.get("nvme_path", "none")) in ("none", "auto"):
            raise ToolkitError(f"{name} is on NVMe, and no disk is named", hint=NVME_PATH_HINT)
    if (param := blocks.get("offload_param")) is not None:
        # Elements of each module's own tensors and its children's: loading gathers them together.
        gathered = [
            [p.numel() for part in (module, *module.children()) for p in part.parameters(recurse=False)]
            for module in model_without_weights(arguments.job).modules()
        ]
        # Buffers hold the largest partition, and there is one for each tensor that is gathered at a time.
        largest = max((size for sizes in gathered for size in sizes), default=1)
        sizes = {"buffer_size": ceil(largest / arguments.training.world_size)}
        sizes["buffer_count"] = max(2, *map(len, gathered))
        param |= {name: value for name, value in sizes.items() if param.get(name, "auto") == "auto"}
    if blocks:
        set_changed_blocks(arguments.training)


class NvmeOffload(TrainerCallback):  # type: ignore[misc]
    """Records in run.json the buffers in effect, and when training ends the bytes on the disk."""

    def __init__(self, run: ObservedRun, blocks: dict[str, dict[str, Any]]) -> None:
        self.run = run
        self.swap_folder, param = Path(next(iter(blocks.values()))["nvme_path"]), blocks.get("offload_param", {})
        self.buffers = {name: param[name] for name in ("buffer_size", "buffer_count") if param}

    def on_train_end(self, *_: Any, **__: Any) -> None:
        barrier()
        if self.run.writes:
            measured_disk = (self.run.folder.read_run() or {}).get("nvme") or {}  # by the launcher
            on_disk = sum(file.stat().st_size for file in self.swap_folder.rglob("*.swp"))  # of this node's ranks
            facts = {"swap_folder": str(self.swap_folder), **self.buffers, "swap_bytes": on_disk}
            self.run.folder.update_run(nvme=measured_disk | facts)

"""Save the trained model so that `from_pretrained` (or `PeftModel`) loads it, under every preset.

Beside it lies the live model's answer to fixed tokens, which `toolkit checkpoint verify` asks the saved one for.

The files are written to a temporary folder and moved one by one, the weights' index and configuration last, so
that a killed save leaves no folder that half loads.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from toolkit.runs.checkpoints import FINGERPRINT
from toolkit.runs.folder import write_json
from toolkit.train.attest.tensors import uncompiled

LAST = ("config.json", "adapter_config.json")


def save_final_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Gather the weights from all ranks, and let rank 0 write them; every rank must call it.

    Raises Diverged for weights that are no numbers: nothing is written then.
    """
    answer = trainer.live_answer()
    started = time.monotonic()
    state = whole_state_dict(trainer)
    if not trainer.accelerator.is_main_process:
        return
    temporary = folder / ".saving"
    shutil.rmtree(temporary, ignore_errors=True)
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    plain.config.use_cache = True  # off during training only
    plain.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
    (folder / FINGERPRINT).unlink(missing_ok=True)  # of the weights that are replaced
    if answer is not None:
        write_json(temporary / FINGERPRINT, answer)
    written = []
    for path in sorted(temporary.iterdir(), key=lambda path: path.name in LAST):
        path.chmod(0o666 & ~_umask())  # safetensors writes for the owner alone
        written.append(path.replace(folder / path.name))
    temporary.rmdir()
    trainer.note_save("model", written, started)


def _umask() -> int:
    """This process's mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def whole_state_dict(trainer: Any) -> dict[str, Any]:
    """All weights on rank 0, whatever shards them; with adapters under ZeRO-3, only those are gathered."""
    wrapped = uncompiled(trainer.model_wrapped)  # accelerate would keep `_orig_mod.` in the names
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    zero3 = hasattr(wrapped, "zero_optimization_stage") and wrapped.zero_optimization_stage() == 3
    state: dict[str, Any] = (
        wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if zero3 and hasattr(plain, "peft_config")
        else trainer.accelerator.get_state_dict(wrapped)
    )
    return state

"""Save the trained model so that `from_pretrained` (or `PeftModel`) loads it, under every preset.

The live model's logits for fixed tokens are saved beside it, for `toolkit checkpoint verify`.

Files are written to a temporary folder and moved one by one, the configuration last, so that an interrupted save
leaves no folder that loads with missing weights.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from toolkit.observe.attest.tensors import uncompiled
from toolkit.record.checkpoints import FINGERPRINT
from toolkit.record.folder import write_json

_MOVED_LAST = ("config.json", "adapter_config.json")


def save_final_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Gather the weights from all ranks, and write them on rank 0. Every rank must call it.

    Raises Diverged before anything is written if the model's logits are NaN or infinite.
    """
    saver = trainer.observer.saver
    fingerprint = saver.fingerprint()
    started = time.monotonic()
    temporary, writes = folder / ".saving", trainer.accelerator.is_main_process
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    plain.config.use_cache = True  # off during training only
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
    if trainer.saves_in_parts:
        plain.save_pretrained(temporary, is_main_process=writes)  # gathers what it sharded
        trainer.accelerator.wait_for_everyone()  # every rank lists the folder, which is emptied below
    else:
        state = full_state_dict(trainer)
        if writes:
            _write_weights(plain, state, temporary)
    if not writes:
        return
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").unlink(missing_ok=True)  # peft's empty model card, with local paths
    (folder / FINGERPRINT).unlink(missing_ok=True)  # belongs to the replaced weights
    if fingerprint is not None:
        write_json(temporary / FINGERPRINT, fingerprint)
    umask = os.umask(0)  # it can only be read by setting it
    os.umask(umask)
    written = []
    for path in sorted(temporary.iterdir(), key=lambda path: path.name in _MOVED_LAST):
        path.chmod(0o666 & ~umask)  # safetensors writes files with mode 0600
        written.append(path.replace(folder / path.name))
    temporary.rmdir()
    saver.note_save("model", written, started)


def _write_weights(plain: Any, state: dict[str, Any], folder: Path) -> None:
    """Write weights and configuration; where frozen weights are bf16 beside trained ones in fp32, all in fp32.

    `from_pretrained` loads a model in the one dtype of its configuration, which would be that of the first parameter.
    """
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1 or hasattr(plain, "peft_config"):  # an adapter's file has no frozen weights
        plain.save_pretrained(folder, state_dict=state)
        return
    plain.save_pretrained(folder, state_dict=in_fp32(state))
    plain.config.dtype = torch.float32
    plain.config.save_pretrained(folder)


def in_fp32(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with floating-point tensors in fp32; tied weights stay tied."""
    raised = {tensor.data_ptr(): tensor.float() for tensor in state.values() if tensor.is_floating_point()}
    return {name: raised.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}


def full_state_dict(trainer: Any) -> dict[str, Any]:
    """Return all weights on rank 0, under any engine; under ZeRO-3 with adapters only the adapters are gathered."""
    wrapped = uncompiled(trainer.model_wrapped)  # accelerate would keep `_orig_mod.` in the names
    plain = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
    zero3 = hasattr(wrapped, "zero_optimization_stage") and wrapped.zero_optimization_stage() == 3
    state: dict[str, Any] = (
        wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if zero3 and hasattr(plain, "peft_config")
        else trainer.accelerator.get_state_dict(wrapped)
    )
    return state

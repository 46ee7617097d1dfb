"""What this script's checkpoints and final model need beyond the Trainer's own saves."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from toolkit.engines.live_engine import is_loaded_by_plugin
from toolkit.engines.safe_loading import torch_load
from toolkit.engines.tensors import innermost_optimizer, uncompiled
from toolkit.errors import ToolkitError
from toolkit.files.model_weights import read_weights
from toolkit.record.checkpoints import AT_LOAD_OPTIMIZER, FINGERPRINT
from toolkit.record.folder import write_json

SCHEDULER = "scheduler.pt"
_MOVED_LAST = ("config.json", "adapter_config.json")


def save_final_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` (or `PeftModel`) loads, under every preset. Collective.

    The live model's logits for fixed tokens are saved beside it, for `toolkit checkpoint verify`. Files are written to
    a temporary folder and moved one by one, the configuration last, so that an interrupted save leaves no folder that
    loads with missing weights. Raises Diverged before anything is written if the logits are NaN or infinite.
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
        trainer.accelerator.wait_for_everyone()  # no rank makes the folder before it is emptied
        plain.save_pretrained(temporary, is_main_process=writes)  # gathers what it sharded
        trainer.accelerator.wait_for_everyone()  # every rank lists the folder, which is emptied below
    else:
        state = full_state_dict(trainer)
        if writes:
            # `from_pretrained` loads a model in one dtype: fp32 where some weights are. An adapter's are all trained.
            dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
            mixed = len(dtypes) != 1 and not hasattr(plain, "peft_config")
            plain.save_pretrained(temporary, state_dict=in_fp32(state) if mixed else state)
            if mixed:
                plain.config.dtype = torch.float32
                plain.config.save_pretrained(temporary)
    if not writes:
        return
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").unlink(missing_ok=True)  # peft's empty model card, which names local paths
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


def full_state_dict(trainer: Any) -> dict[str, Any]:
    """Return all weights on rank 0, under any engine; under ZeRO-3 with adapters only the adapters are gathered."""
    wrapped = uncompiled(trainer.model_wrapped)  # accelerate would keep `_orig_mod.` in the names
    adapted = hasattr(trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False), "peft_config")
    zero3 = hasattr(wrapped, "zero_optimization_stage") and wrapped.zero_optimization_stage() == 3
    if zero3 and adapted:
        return wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)  # type: ignore[no-any-return]
    return trainer.accelerator.get_state_dict(wrapped)  # type: ignore[no-any-return]


def in_fp32(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with floating-point tensors in fp32; tied weights stay tied."""
    raised = {tensor.data_ptr(): tensor.float() for tensor in state.values() if tensor.is_floating_point()}
    return {name: raised.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}


class StatesShardedAtLoad(Trainer):  # type: ignore[misc]
    """Saves and loads optimizer and scheduler of a model that was sharded at load, which transformers 5.23 refuses.

    Weights come back through `from_pretrained(checkpoint, distributed_config=...)`, and all of it on any mesh.
    """

    def __init__(self, *, run: Any, **kwargs: Any) -> None:
        training = run.arguments.training
        save_only_model, training.save_only_model = training.save_only_model, True
        super().__init__(run=run, **kwargs)  # it refuses a model sharded at load unless it saves the model only
        training.save_only_model = save_only_model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer without empty groups: torch's distributed checkpoints cannot load them; LoRA has one."""
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_optimizer_distributed(*self._model_and_optimizer(), str(folder / AT_LOAD_OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Raises ToolkitError where another mesh has other groups, and they had different learning rates."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        load_optimizer_distributed(*self._model_and_optimizer(), str(folder / AT_LOAD_OPTIMIZER))
        saved, own = torch_load(folder / SCHEDULER), self.lr_scheduler.state_dict()
        groups = len(own["base_lrs"])
        if len(saved["base_lrs"]) != groups:  # a group per mesh: experts and adapters have their own
            if len(set(saved["base_lrs"])) > 1 or len(set(saved["_last_lr"])) > 1:
                raise ToolkitError(
                    f"{folder}: {len(saved['base_lrs'])} parameter groups with different learning rates, {groups} now",
                    hint="resume with the degrees of parallelism that wrote the checkpoint",
                )
            saved |= {name: saved[name][:1] * groups for name in ("base_lrs", "_last_lr")}
            saved["lr_lambdas"] = own["lr_lambdas"]
        self.lr_scheduler.load_state_dict(saved)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass

    def _model_and_optimizer(self) -> tuple[Any, Any]:
        plain = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return plain, innermost_optimizer(self.optimizer)


def load_converted(trainer: Any, folder: Path) -> None:
    """Load the weights that a folder stores in other pieces than the live model holds, such as single experts.

    The Trainer resumes with `load_state_dict(..., strict=False)` (transformers 5.23, `_load_from_checkpoint`), without
    the conversion of `from_pretrained`: a mixture would keep the experts of the model that training started from.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if is_loaded_by_plugin(trainer) or hasattr(model, "peft_config"):
        return
    stored = read_weights(folder)
    absent = {name: parameter for name, parameter in model.named_parameters() if name not in stored}
    if absent:
        converted = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
        for name, parameter in absent.items():
            parameter.data.copy_(converted[name])

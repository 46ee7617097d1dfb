"""DDP's gradient communication hooks, torch's own: registered, and read back once DDP has called them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from transformers import TrainerCallback

from toolkit.engines.tensors import uncompiled
from toolkit.errors import ToolkitError
from toolkit.job.argument_fields import ModelArguments

# name -> the hook, and the dtype that it sends
HOOKS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "bf16": (default_hooks.bf16_compress_hook, "bfloat16"),
    "fp16": (default_hooks.fp16_compress_hook, "float16"),
    "power_sgd": (powerSGD_hook.powerSGD_hook, "float32"),
}


class CommunicationHook(TrainerCallback):  # type: ignore[misc]
    """Registers `--ddp_comm_hook` once DDP wraps the model."""

    def __init__(self, trainer: Any, arguments: ModelArguments) -> None:
        self.trainer, self.arguments = trainer, arguments

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook on the live model. Raises ToolkitError where DDP does not wrap it."""
        wrapped, job = uncompiled(self.trainer.model_wrapped), self.arguments
        if not isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            what = f"--ddp_comm_hook: the model is wrapped in {type(wrapped).__name__}, not in DistributedDataParallel"
            raise ToolkitError(what, hint="`--preset ddp`, with two processes or more")
        state = None
        if job.ddp_comm_hook == "power_sgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=job.ddp_comm_hook_power_sgd_rank,
                start_powerSGD_iter=job.ddp_comm_hook_power_sgd_start,
            )
        wrapped.register_comm_hook(state, NamedHook(str(job.ddp_comm_hook)))


class NamedHook:
    """A hook of torch that knows its name, and whether DDP has called it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hook, self.dtype = HOOKS[name]
        self.called = False
        self.__name__ = self.__qualname__ = f"toolkit:{name}"

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        self.called = True
        return self.hook(state, bucket)


def hook_name(wrapped: Any) -> str | None:
    """Return the name of the hook that the live DDP model has called, or of one that a library registered."""
    hook = _called_hook(wrapped)
    others = [each for each, _ in getattr(wrapped, "_comm_hooks", ()) if not isinstance(each, NamedHook)]
    return hook.name if hook else others[0].__qualname__ if others else None


def hook_dtype(wrapped: Any) -> str | None:
    """Return the dtype that DDP's communication hook sends; None without a hook."""
    hook = _called_hook(wrapped)
    return None if hook is None else hook.dtype


def _called_hook(wrapped: Any) -> NamedHook | None:
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ()) if isinstance(hook, NamedHook)]
    return hooks[0] if hooks and hooks[0].called else None

"""What is observed of any `transformers.Trainer` or loop on accelerate, whoever wrote its script.

from toolkit import observe

observe(trainer, folder="runs/mine")      # the package is its own main function: `toolkit.observe.observer.observe`
with observe(accelerator=accelerator, model=model, optimizer=optimizer, folder="runs/mine"): ...    # `observe_loop`
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`toolkit.observe` names both the package and what it does, so the package can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "accelerator" in kwargs:
            from toolkit.observe.accelerate_loop import observe_loop

            return observe_loop(*args, **kwargs)
        from toolkit.observe.observer import observe

        return observe(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

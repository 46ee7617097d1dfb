"""The names of DDP's gradient-communication hooks, and when one is refused. No torch.

    >>> "top_k" in HOOKS
    True

`toolkit/train/comm_hooks.py` registers them.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError, did_you_mean

# `allreduce` compresses nothing: the same counter beside the others.
HOOKS = ("allreduce", "bf16", "fp16", "power_sgd", "int8", "top_k")
OPTIONS = {
    "ddp_comm_hook_top_k_fraction": "top_k",
    "ddp_comm_hook_power_sgd_rank": "power_sgd",
    "ddp_comm_hook_power_sgd_start": "power_sgd",
}
WHY_NOT = {
    "deepspeed": "DeepSpeed reduces gradients itself",
    "fsdp2": "FSDP2 reduce-scatters gradients itself, without DDP's buckets",
    "none": "with one process nothing travels",
}


def check_comm_hook(arguments: dict[str, Any], *, engine: str | None, preset: str, num_processes: int | None) -> None:
    """Refuse an unknown hook, one where DDP does not train, and options out of range."""
    name = arguments.get("ddp_comm_hook")
    if name is None:
        return
    if name not in HOOKS:
        raise ToolkitError(
            f"--ddp_comm_hook is {name!r}, expected {', '.join(HOOKS)}", hint=did_you_mean(str(name), HOOKS)
        )
    if engine in WHY_NOT:
        raise ToolkitError(
            f"--ddp_comm_hook does not work under preset {preset!r}: {WHY_NOT[str(engine)]}", hint="`--preset ddp`"
        )
    if num_processes == 1:
        raise ToolkitError(f"--ddp_comm_hook with one process: {WHY_NOT['none']}", hint="`--num-processes 2`")
    _check_options(arguments)


def _check_options(arguments: dict[str, Any]) -> None:
    fraction = float(arguments.get("ddp_comm_hook_top_k_fraction", 0.01))
    if not 0 < fraction <= 1:
        raise ToolkitError(f"--ddp_comm_hook_top_k_fraction is {fraction}, expected more than 0 and at most 1")
    for option, lowest in (("ddp_comm_hook_power_sgd_rank", 1), ("ddp_comm_hook_power_sgd_start", 2)):
        if int(arguments.get(option, lowest)) < lowest:
            raise ToolkitError(f"--{option} is {arguments[option]}, expected {lowest} or more")

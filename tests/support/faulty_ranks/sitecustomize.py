"""Fault injection: on PYTHONPATH, this module puts a fault into each trial whose row is named after one.

    PYTHONPATH=tests/support/faulty_ranks toolkit compare --preset ddp --variant bf16_adam=ddp ...

Python imports it before a rank's own program; a rank that is forked from a fork server runs it at the same place. It
patches objects of torch, accelerate, DeepSpeed and the toolkit's timer inside the ranks of that trial only; the toolkit
itself does not know of it.
"""

import functools
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

IN_FORK_SERVER = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
ADAM = "torch.optim:AdamW.step"
TRAINER = "transformers:Trainer"
FAULT_VARIABLE = "TOOLKIT_FAULT"
Replacement = Callable[..., Any]


def replace(place: str, replacement: Replacement) -> None:
    """Replace a function, named `module:owner.name`, by one that receives the original first; calls are logged."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        tell()
        return replacement(original, *args, **kwargs)

    setattr(owner, name, changed)


@functools.cache
def tell() -> None:
    """Once a rank, in its log: a fault that never acted proves nothing."""
    line = f"fault {row_of_this_rank()} acts on rank {os.environ['RANK']}\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: both ranks write into one log


def bf16_adam(_: int) -> None:
    import torch

    def store_as(optimizer: Any, dtype: Any) -> None:
        for state in optimizer.state.values():
            for name in {"exp_avg", "exp_avg_sq"} & state.keys():  # none before the first step
                state[name] = state[name].to(dtype)

    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        store_as(optimizer, torch.float32)
        done = original(optimizer, *args, **kwargs)
        store_as(optimizer, torch.bfloat16)
        return done

    replace(ADAM, step)


def replaced(place: str, replacement: Replacement) -> Callable[[int], None]:
    """A fault that is one call of `replace` on every rank."""
    return lambda _: replace(place, replacement)


def no_clipping(original: Any, accelerator: Any, parameters: Any, _: float, *rest: Any) -> Any:
    return original(accelerator, parameters, float("inf"), *rest)


def no_clipping_in_deepspeed(optimizer: str) -> Callable[[int], None]:
    return replaced(f"deepspeed.runtime.zero.{optimizer}.unscale_and_clip_grads", lambda *_, **__: None)


def order_on_rank_1(rank: int) -> None:
    def rows(original: Any, sampler: Any) -> Any:
        sampler.initial_seed += rank
        return original(sampler)

    replace("accelerate.data_loader:SeedableRandomSampler.__iter__", rows)


def with_arguments(*words: str) -> None:
    tell()
    sys.argv += words


def in_environment(_: int, **variables: str) -> None:
    tell()
    os.environ |= variables


def without_resharding(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **(kwargs | {"reshard_after_forward": False}))


def checkpointing(original: Any, trainer: Any, **kwargs: Any) -> Any:
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return original(trainer, **kwargs)


FAULTS: dict[str, Callable[[int], None]] = {
    "bf16_adam": bf16_adam,
    "no_clipping": replaced("accelerate:Accelerator.clip_grad_norm_", no_clipping),
    "no_clipping_zero2": no_clipping_in_deepspeed("stage_1_and_2:DeepSpeedZeroOptimizer"),
    "no_clipping_zero3": no_clipping_in_deepspeed("stage3:DeepSpeedZeroOptimizer_Stage3"),
    "order_on_rank_1": order_on_rank_1,
    "seed_on_rank_1": lambda rank: with_arguments("--seed", "43") if rank == 1 else None,
    "each_alone": functools.partial(in_environment, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0"),
    "ddp_for_fsdp2": functools.partial(in_environment, ACCELERATE_USE_FSDP="false"),
    "fsdp2_without_resharding": replaced("torch.distributed.fsdp:fully_shard", without_resharding),
    "checkpointing": replaced(f"{TRAINER}.train", checkpointing),
    # The layers' flag, which the arguments switched on, is ignored.
    "no_checkpointing": replaced(
        "transformers.modeling_utils:checkpoint", lambda _, function, *args, **__: function(*args)
    ),
}
"""By the name of the row that carries it; each is called with its rank. Those of benchmarks/faults are as well."""


def row_of_this_rank() -> str | None:
    """`bf16_adam` in a rank of trials/bf16_adam-n2-r0, or what the environment names; None in any other process."""
    if "RANK" not in os.environ or FAULT_VARIABLE in os.environ:
        return os.environ.get(FAULT_VARIABLE) if "RANK" in os.environ else None
    folder = argument("--output_dir")
    return None if folder is None else Path(folder).name.rpartition("-n")[0]


def argument(name: str) -> str | None:
    """Of the rank's own command."""
    words = sys.argv if IN_FORK_SERVER else sys.orig_argv
    return words[words.index(name) + 1] if name in words else None


def install_or_exit() -> None:
    try:
        name = row_of_this_rank() or ""
        if name in FAULTS or (name and FAULT_VARIABLE in os.environ):
            from toolkit.observe.rank_process import prepare_environment

            prepare_environment()
            fault = FAULTS.get(name) or importlib.import_module("deviations").DEVIATIONS[name]
            fault(int(os.environ["RANK"]))
    except BaseException:  # Python would continue after an error here, and run the trial without its fault
        traceback.print_exc()
        os._exit(97)


def install_in_forked_ranks() -> None:
    """A forked rank runs its program by `runpy.run_module`, with its own environment and arguments."""
    run_module = runpy.run_module

    @functools.wraps(run_module)
    def install_and_run(*args: Any, **kwargs: Any) -> Any:
        install_or_exit()
        return run_module(*args, **kwargs)

    runpy.run_module = install_and_run


if IN_FORK_SERVER:
    install_in_forked_ranks()
else:
    install_or_exit()

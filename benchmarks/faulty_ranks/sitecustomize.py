"""Fault injection: on PYTHONPATH, this module puts a fault into each trial whose row is named after one.

    PYTHONPATH=benchmarks/faulty_ranks toolkit compare --preset ddp --variant bf16_adam=ddp ...

Python imports it before a rank's own program; a rank that is forked from a fork server runs it at the same place. It
patches objects of torch, accelerate, DeepSpeed and the toolkit's timer inside the ranks of that trial only; the toolkit
itself does not know of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

IN_FORK_SERVER = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
SLOW_SECONDS, FIRST_STEP_SECONDS = 0.3, 1.0
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


def one_process(rank: int) -> None:
    if rank == 1:
        os._exit(0)
    in_environment(rank, WORLD_SIZE="1")


def in_environment(_: int, **variables: str) -> None:
    tell()
    os.environ |= variables


def without_resharding(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **(kwargs | {"reshard_after_forward": False}))


def counted_as(wrong: Callable[[Any], dict[str, int]]) -> Callable[[int], None]:
    def add_batch(original: Any, meter: Any, facts: Any) -> None:
        original(meter, dataclasses.replace(facts, **wrong(facts)))

    return replaced("toolkit.observe.timer:StepTimer.add_batch", add_batch)


def padded_to_the_longest(_: int) -> None:
    """Each batch is as wide as the longest row may be; what is counted is what is trained on."""
    import torch

    widest = int(argument("--max_seq_length") or 0)

    def padded(original: Any, collator: Any, rows: Any, fill: int) -> Any:
        found = original(collator, rows, fill)
        return torch.nn.functional.pad(found, (0, widest - found.shape[1]), value=fill)

    replace("toolkit.train.data.collation:Collator._padded", padded)


def first_step_timed(_: int, *, slowly: bool = False) -> None:
    def row(original: Any, meter: Any, number: int, step: Any) -> Any:
        return original(meter, number, step) | {"step_of_process": number + 2}

    replace("toolkit.observe.timer:StepTimer._row", row)
    if slowly:
        slow_step(0, number=1)


def slow_step(_: int, *, number: int) -> None:
    def training_step(original: Any, trainer: Any, *args: Any) -> Any:
        if trainer.state.global_step == number - 1:
            time.sleep(FIRST_STEP_SECONDS)
        return original(trainer, *args)

    replace(f"{TRAINER}.training_step", training_step)


def slow_rank(rank: int, place: str = f"{TRAINER}.training_step") -> None:
    def slowed(original: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS * rank)
        return original(*args, **kwargs)

    replace(place, slowed)


def checkpointing(original: Any, trainer: Any, **kwargs: Any) -> Any:
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return original(trainer, **kwargs)


def checkpointing_without_a_flag(original: Any, *args: Any) -> Any:
    """Recompute what a layer does, although no module says so."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(original, *args, use_reentrant=False)


def checkpointing_at_two(_: int) -> None:
    if os.environ["WORLD_SIZE"] == "2":
        with_arguments("--activation_checkpointing", "true")


FAULTS: dict[str, Callable[[int], None]] = {
    **dict.fromkeys(("bf16_adam", "bf16_adam_zero2"), bf16_adam),
    "bf16_adam_on_rank_1": lambda rank: bf16_adam(rank) if rank == 1 else None,
    **dict.fromkeys(
        ("no_clipping", "no_clipping_fsdp2", "nothing_to_clip_yet"),
        replaced("accelerate:Accelerator.clip_grad_norm_", no_clipping),
    ),
    "no_clipping_zero2": no_clipping_in_deepspeed("stage_1_and_2:DeepSpeedZeroOptimizer"),
    "no_clipping_zero3": no_clipping_in_deepspeed("stage3:DeepSpeedZeroOptimizer_Stage3"),
    "order_on_rank_1": order_on_rank_1,
    "seed_on_rank_1": lambda rank: with_arguments("--seed", "43") if rank == 1 else None,
    "one_process": one_process,
    "each_alone": functools.partial(in_environment, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0"),
    "ddp_for_fsdp2": functools.partial(in_environment, ACCELERATE_USE_FSDP="false"),
    "fsdp2_without_resharding": replaced("torch.distributed.fsdp:fully_shard", without_resharding),
    "padding_counted_alone": counted_as(lambda facts: {"tokens": facts.tokens - facts.non_padding_tokens}),
    "padding_counted_as_text": counted_as(lambda facts: {"non_padding_tokens": facts.tokens}),
    "prompt_counted_as_supervised": counted_as(lambda facts: {"supervised_tokens": facts.non_padding_tokens}),
    "padded_to_the_longest": padded_to_the_longest,
    "first_step_timed": functools.partial(first_step_timed, slowly=True),
    "first_step_timed_as_fast": first_step_timed,
    "compiled_late": functools.partial(slow_step, number=3),  # after the untimed steps, which are there for this
    **dict.fromkeys(("slow_rank", "slow_rank_zero2", "slow_rank_fsdp2"), slow_rank),
    "slow_loading_on_rank_1": functools.partial(slow_rank, place=f"{TRAINER}.get_batch_samples"),
    "slow_optimizer_on_rank_1": functools.partial(slow_rank, place=ADAM),
    "checkpointing": replaced(f"{TRAINER}.train", checkpointing),
    "checkpointing_without_a_flag": replaced(
        "transformers.models.llama.modeling_llama:LlamaMLP.forward", checkpointing_without_a_flag
    ),
    # The layers' flag, which the arguments switched on, is ignored.
    "no_checkpointing": replaced(
        "transformers.modeling_utils:checkpoint", lambda _, function, *args, **__: function(*args)
    ),
    "checkpointing_at_two": checkpointing_at_two,
}
"""By the name of the row that carries it; each is called with its rank. `live_faults.py` says what each does."""


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

"""Fault injection: on PYTHONPATH, this module puts a fault into each trial whose row is named after one.

    PYTHONPATH=benchmarks/faulty_ranks toolkit compare --preset ddp --variant bf16_adam=ddp ...

Python imports it before a rank's own program; a rank that is forked from a fork server runs it at the same place. It
patches objects of torch, accelerate, DeepSpeed and the toolkit's timer inside the ranks of that trial only; the toolkit
itself does not know of it.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS: dict[str, Callable[[int], None]] = {}
"""By the name of the row that carries it. Each is given its rank."""
IN_FORK_SERVER = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
SLOW_SECONDS = 0.3
FIRST_STEP_SECONDS = 1.0


def fault(install: Callable[[int], None]) -> Callable[[int], None]:
    FAULTS[install.__name__] = install
    return install


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a function that receives the original first; each call is logged."""
    original = getattr(owner, name)

    def put(replacement: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            tell()
            return replacement(original, *args, **kwargs)

        setattr(owner, name, changed)

    return put


@functools.cache
def tell() -> None:
    """Once a rank, in its log: a fault that never acted proves nothing."""
    line = f"fault {row_of_this_rank()} acts on rank {os.environ['RANK']}\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: both ranks write into one log


# 1. Adam's states in bf16


@fault
def bf16_adam(_: int) -> None:
    import torch

    @around(torch.optim.AdamW, "step")
    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stored_as(optimizer, torch.float32)
        done = original(optimizer, *args, **kwargs)
        stored_as(optimizer, torch.bfloat16)
        return done


FAULTS["bf16_adam_zero2"] = bf16_adam


@fault
def bf16_adam_on_rank_1(rank: int) -> None:
    if rank == 1:
        bf16_adam(rank)


def stored_as(optimizer: Any, dtype: Any) -> None:
    """Adam's moments in another dtype."""
    for state in optimizer.state.values():
        for name in {"exp_avg", "exp_avg_sq"} & state.keys():  # none before the first step
            state[name] = state[name].to(dtype)


# 2. gradients that are not clipped, although the arguments say so


@fault
def no_clipping(_: int) -> None:
    from accelerate import Accelerator

    @around(Accelerator, "clip_grad_norm_")
    def clip_grad_norm_(original: Any, accelerator: Any, parameters: Any, max_norm: float, *rest: Any) -> Any:
        del max_norm
        return original(accelerator, parameters, float("inf"), *rest)


FAULTS["no_clipping_fsdp2"] = no_clipping
FAULTS["nothing_to_clip_yet"] = no_clipping


@fault
def no_clipping_zero2(_: int) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    around(DeepSpeedZeroOptimizer, "unscale_and_clip_grads")(lambda *_, **__: None)


@fault
def no_clipping_zero3(_: int) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    around(DeepSpeedZeroOptimizer_Stage3, "unscale_and_clip_grads")(lambda *_, **__: None)


# 3. another seed, another order of the rows


@fault
def order_on_rank_1(rank: int) -> None:
    from accelerate.data_loader import SeedableRandomSampler

    @around(SeedableRandomSampler, "__iter__")
    def rows(original: Any, sampler: Any) -> Any:
        sampler.initial_seed += rank
        return original(sampler)


@fault
def seed_on_rank_1(rank: int) -> None:
    if rank == 1:
        tell()
        sys.argv += ["--seed", "43"]


# 4. one process for two


@fault
def one_process(rank: int) -> None:
    if rank == 1:
        os._exit(0)
    tell()
    os.environ["WORLD_SIZE"] = "1"


@fault
def each_alone(_: int) -> None:
    """Both train, each by itself."""
    tell()
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


# 5. another engine or sharding than the preset's


@fault
def ddp_for_fsdp2(_: int) -> None:
    tell()
    os.environ["ACCELERATE_USE_FSDP"] = "false"


@fault
def fsdp2_without_resharding(_: int) -> None:
    import torch.distributed.fsdp as fsdp

    @around(fsdp, "fully_shard")
    def fully_shard(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | {"reshard_after_forward": False}))


# 6. tokens counted wrong


@fault
def padding_counted_alone(_: int) -> None:
    counted_as(lambda facts: {"tokens": facts.tokens - facts.non_padding_tokens})


@fault
def padding_counted_as_text(_: int) -> None:
    counted_as(lambda facts: {"non_padding_tokens": facts.tokens})


@fault
def prompt_counted_as_supervised(_: int) -> None:
    counted_as(lambda facts: {"supervised_tokens": facts.non_padding_tokens})


@fault
def padded_to_the_longest(_: int) -> None:
    """Each batch is as wide as the longest row may be; what is counted is what is trained on."""
    import torch

    from toolkit.train.data.collation import Collator

    widest = int(argument("--max_seq_length") or 0)

    @around(Collator, "_padded")
    def padded(original: Any, collator: Any, rows: Any, fill: int) -> Any:
        found = original(collator, rows, fill)
        return torch.nn.functional.pad(found, (0, widest - found.shape[1]), value=fill)


def counted_as(wrong: Callable[[Any], dict[str, int]]) -> None:
    from dataclasses import replace

    from toolkit.observe.timer import StepTimer

    @around(StepTimer, "add_batch")
    def add_batch(original: Any, meter: Any, facts: Any) -> None:
        original(meter, replace(facts, **wrong(facts)))


# 7. the first step left in the timing


@fault
def first_step_timed(_: int) -> None:
    """And it is a slow one."""
    every_step_timed()
    slow_first_step(FIRST_STEP_SECONDS)


@fault
def first_step_timed_as_fast(_: int) -> None:
    every_step_timed()


@fault
def compiled_late(_: int) -> None:
    """The first timed step is slow: what the untimed ones are there for came after them."""
    slow_step(FIRST_STEP_SECONDS, number=3)


def every_step_timed() -> None:
    from toolkit.observe.timer import StepTimer

    @around(StepTimer, "_row")
    def row(original: Any, meter: Any, number: int, step: Any) -> Any:
        found = original(meter, number, step)
        return found | {"step_of_process": number + 2}


def slow_first_step(seconds: float) -> None:
    slow_step(seconds, number=1)


def slow_step(seconds: float, *, number: int) -> None:
    from transformers import Trainer

    @around(Trainer, "training_step")
    def training_step(original: Any, trainer: Any, *args: Any) -> Any:
        if trainer.state.global_step == number - 1:
            time.sleep(seconds)
        return original(trainer, *args)


# 8. one rank slower than the other


@fault
def slow_rank(rank: int) -> None:
    slow_on(rank, "training_step")


FAULTS["slow_rank_zero2"] = slow_rank
FAULTS["slow_rank_fsdp2"] = slow_rank


@fault
def slow_loading_on_rank_1(rank: int) -> None:
    slow_on(rank, "get_batch_samples")


@fault
def slow_optimizer_on_rank_1(rank: int) -> None:
    import torch

    @around(torch.optim.AdamW, "step")
    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS * rank)
        return original(*args, **kwargs)


def slow_on(rank: int, method: str) -> None:
    from transformers import Trainer

    @around(Trainer, method)
    def slowed(original: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS * rank)
        return original(*args, **kwargs)


# 9. activations recomputed on one side


@fault
def checkpointing(_: int) -> None:
    from transformers import Trainer

    @around(Trainer, "train")
    def train(original: Any, trainer: Any, **kwargs: Any) -> Any:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        return original(trainer, **kwargs)


@fault
def checkpointing_without_a_flag(_: int) -> None:
    """What a layer does is recomputed, and no module says so."""
    from torch.utils.checkpoint import checkpoint
    from transformers.models.llama.modeling_llama import LlamaMLP

    around(LlamaMLP, "forward")(lambda original, *args: checkpoint(original, *args, use_reentrant=False))


@fault
def no_checkpointing(_: int) -> None:
    """Asked for, and the layers have the flag, but nothing is done about it."""
    import transformers.modeling_utils as modeling

    around(modeling, "checkpoint")(lambda _, function, *args, **__: function(*args))


@fault
def checkpointing_at_two(_: int) -> None:
    """Asked for with two processes, not with one."""
    if os.environ["WORLD_SIZE"] == "2":
        tell()
        sys.argv += ["--activation_checkpointing", "true"]


def row_of_this_rank() -> str | None:
    """`bf16_adam` in a rank of trials/bf16_adam-n2-r0; None where this is no rank of a trial."""
    folder = argument("--output_dir") if "RANK" in os.environ else None
    return None if folder is None else Path(folder).name.rpartition("-n")[0]


def argument(name: str) -> str | None:
    """Of the rank's own command."""
    words = sys.argv if IN_FORK_SERVER else sys.orig_argv
    return words[words.index(name) + 1] if name in words else None


def install() -> None:
    row = row_of_this_rank()
    if row not in FAULTS:
        return
    from toolkit.train.rank_process import prepare_environment

    prepare_environment()
    FAULTS[row](int(os.environ["RANK"]))


def install_or_exit() -> None:
    try:
        install()
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

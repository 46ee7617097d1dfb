"""A world whose other ranks do not exist: the environment of rank r of N, and torch's `fake` process group.

The environment comes from accelerate's own launcher, so that the preset's file is read as in a run. The `fake` backend
has any size and any rank, and its collectives move nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from toolkit.launch.command import launcher_environment, rank_environment
from toolkit.presets import Preset
from toolkit.rehearse.rehearsed_rank import RehearsedRank

SHARD_VALUE = 0.01


def join_fake_world(rehearsed: RehearsedRank, preset: Preset) -> None:
    """Make this process rank r of N. Call it before anything asks for a process group."""
    os.environ.update(launcher_environment(preset, world_size=rehearsed.world_size))
    if rehearsed.fake_tensors:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, which fake tensors take for another device
        if preset.engine == "ddp":
            return  # its reducer takes no fake tensors: the model is traced without it
    if preset.engine != "none":
        os.environ.update(_rank_environment(rehearsed))
    if rehearsed.world_size > 1:  # a single rank's engine starts its own group, as in a run
        _start_fake_process_group(rehearsed)
    if preset.engine == "deepspeed":
        _skip_checks_against_rank_0()


def _rank_environment(rehearsed: RehearsedRank) -> dict[str, str]:
    from accelerate.utils.other import get_free_port

    return rank_environment(
        world_size=rehearsed.world_size,
        rank=rehearsed.rank,
        local_rank=0,  # the one device that is here
        local_world_size=1,
        master_port=get_free_port(),
    )


def _start_fake_process_group(rehearsed: RehearsedRank) -> None:
    """Start a group, which accelerate and every engine use if there is one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rehearsed.rank, world_size=rehearsed.world_size)


def _skip_checks_against_rank_0() -> None:
    """ZeRO-3 compares each rank's order of parameters with rank 0's, which nobody sends."""
    from deepspeed.runtime.zero import utils

    utils.assert_lst_len_same_as_other_ranks = lambda _: None
    utils.get_lst_from_rank0 = lambda own: own


def fill_shards(model: Any) -> None:
    """Fill this rank's shards with a constant, in place of what rank 0 would have sent.

    Uninitialised memory holds NaN at times, and ZeRO skips such a step. A ZeRO-3 model is sharded as soon as it is
    loaded, an FSDP2 model once the Trainer has prepared it.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        shard = parameter.to_local() if shard is None and hasattr(parameter, "to_local") else shard
        if shard is not None and shard.is_floating_point():
            shard.data.fill_(SHARD_VALUE)


def register_local_reduction(wrapped: Any) -> None:
    """Make DDP use its own buckets as the result of the reduction.

    DDP reads the result from the future of the all-reduce, which is empty under the fake backend.
    """
    if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        wrapped.register_comm_hook(None, _own_bucket)


def _own_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
    del state
    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future

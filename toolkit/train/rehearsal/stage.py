"""The stage of a rehearsal: what `accelerate launch` would put around this rank, and a world that is not there.

    rehearsed = set_the_stage(find_promise())    # Rehearsed(world_size=8, rank=3), or None in a run

The environment comes from accelerate's own launcher, so that the preset's file is read as in a run. The process group
is torch's `fake` backend: any size, any rank, and collectives that move nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from toolkit.presets import Preset
from toolkit.runs.rehearsals import FAKE_TENSORS_VARIABLE, RANK_VARIABLE, Rehearsed
from toolkit.train.promise import Promise

FILLED_VALUE = 0.01


def set_the_stage(promise: Promise) -> Rehearsed | None:
    """Make this process rank r of N, if `toolkit rehearse` started it; before anything asks for a process group."""
    if RANK_VARIABLE not in os.environ:
        return None
    assert promise.preset is not None, "toolkit rehearse names a preset"
    assert promise.world_size is not None, "toolkit rehearse names a world size"
    rehearsed = Rehearsed(
        world_size=promise.world_size,
        rank=int(os.environ[RANK_VARIABLE]),
        fake_tensors=FAKE_TENSORS_VARIABLE in os.environ,
    )
    os.environ.update(launcher_environment(promise.preset, world_size=rehearsed.world_size))
    if rehearsed.fake_tensors:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, which fake tensors take for another device
        if promise.preset.engine == "ddp":
            return rehearsed  # its reducer takes no fake tensors: the model is traced without it
    if promise.preset.engine != "none":
        os.environ.update(rank_environment(rehearsed))
    if rehearsed.world_size > 1:  # alone, the engine starts its own group as in a run
        start_fake_world(rehearsed)
    if promise.preset.engine == "deepspeed":
        believe_own_lists()
    return rehearsed


def launcher_environment(preset: Preset, *, world_size: int) -> dict[str, str]:
    """What accelerate's launcher gives its ranks for the strategy, by its own functions."""
    from accelerate.commands import launch

    options = ["--config_file", str(preset.accelerate_config_path), "--num_processes", str(world_size)]
    if preset.deepspeed_config_path is not None:
        options += ["--deepspeed_config_file", str(preset.deepspeed_config_path)]
    shard_size = preset.dp_shard_size(world_size)
    if shard_size is not None:
        options += ["--parallelism_config_dp_shard_size", str(shard_size)]
    options += ["--num_machines", "1", "--main_process_port", "0", "-m", "toolkit.train"]
    arguments, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(options))
    environment: dict[str, str]
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(
            defaults.deepspeed_config
        )  # as launch_command does
        _, environment = launch.prepare_deepspeed_cmd_env(arguments)
    elif preset.engine == "none":
        _, environment = launch.prepare_simple_launcher_cmd_env(arguments)
    else:
        environment = launch.prepare_multi_gpu_env(arguments)
    environment.pop("OMP_NUM_THREADS", None)  # this process has the machine for itself
    return environment


def rank_environment(rehearsed: Rehearsed) -> dict[str, str]:
    """torchrun's variables. The local rank is 0: the one device that is here."""
    from accelerate.utils.other import get_free_port

    world_size, rank = str(rehearsed.world_size), str(rehearsed.rank)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    return address | {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def start_fake_world(rehearsed: Rehearsed) -> None:
    """Every engine and accelerate use the process group that is there already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rehearsed.rank, world_size=rehearsed.world_size)


def believe_own_lists() -> None:
    """ZeRO-3 holds each rank's order of parameters against rank 0's, which nobody sends."""
    from deepspeed.runtime.zero import utils

    utils.assert_lst_len_same_as_other_ranks = lambda _: None
    utils.get_lst_from_rank0 = lambda own: own


def fill_shards(model: Any) -> None:
    """Values for what rank 0 would have sent: uninitialised memory holds NaN at times, and ZeRO skips such a step.

    A ZeRO-3 model is a shard as soon as it is loaded, an FSDP2 model once the Trainer has prepared it.
    """
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        shard = parameter.to_local() if shard is None and hasattr(parameter, "to_local") else shard
        if shard is not None and shard.is_floating_point():
            shard.data.fill_(FILLED_VALUE)


def let_ddp_reduce(wrapped: Any) -> None:
    """DDP reads the result of its all-reduce from the work's future, which is empty under the fake backend."""
    if isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        wrapped.register_comm_hook(None, _own_bucket)


def _own_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
    """The bucket as it is, at once."""
    del state
    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future

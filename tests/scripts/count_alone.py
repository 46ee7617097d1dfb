"""Rank 0 of many, alone: the counting script in one process, its collectives going to torch's fake process group.

    python tests/scripts/count_alone.py CONFIG_FILE WORLD_SIZE training arguments ...

Nothing travels, so losses mean nothing; which collectives are called, and with what, is the engine's own.
"""

import os
import sys

import toolkit.train.__main__ as door


def main() -> int:
    config, world_size, *words = sys.argv[1:]
    door.prepare_environment()
    os.environ |= launched(config, int(world_size))
    import torch.distributed as dist
    from count_collectives import count_steps
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world_size))
    count_steps()
    return door.main(words)


def launched(config: str, world_size: int) -> dict[str, str]:
    """What `accelerate launch` would put into rank 0's environment."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    mesh = ["--parallelism_config_dp_shard_size", str(world_size // 2)] if "hybrid" in config else []
    words = ["--config_file", config, "--num_processes", str(world_size), *mesh, "script.py"]
    arguments, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = "deepspeed_config_file"
        told = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        told = prepare_multi_gpu_env(arguments)
    told = {name: value for name, value in told.items() if name.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))}
    if arguments.use_deepspeed:
        told.pop("ACCELERATE_USE_CPU", None)  # it would turn the engine into DDP
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "8"}
    return told | rank | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


if __name__ == "__main__":
    door.leave(main())

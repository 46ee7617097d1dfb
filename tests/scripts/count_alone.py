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
    """What `accelerate launch` would put into rank 0's environment, on a node of eight ranks."""
    from toolkit.launch.command import launcher_environment, rank_environment
    from toolkit.presets import load_preset

    rank = rank_environment(world_size=world_size, rank=0, local_rank=0, local_world_size=8, master_port=29500)
    return launcher_environment(load_preset(config), world_size=world_size) | rank


if __name__ == "__main__":
    door.leave(main())

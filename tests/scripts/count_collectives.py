"""The training script, with the payload of every collective of every optimizer step counted on each rank.

    accelerate launch --config_file ... tests/scripts/count_collectives.py ...    # as `-m toolkit.train`
    python tests/scripts/count_collectives.py --alone CONFIG_FILE WORLD_SIZE ...  # rank 0 of many, in one process

Alone, collectives go to torch's fake process group: nothing travels, so losses mean nothing; which collectives are
called, and with what, is the engine's own.

Counted where all of them pass, torch's dispatcher: DDP's and FSDP2's own, DeepSpeed's, and those of gradient
clipping. A payload is the whole tensor: what an all-gather ends with, what a reduce-scatter starts with. One JSON line
a step in `collectives/rank0.jsonl` of the run folder: {"step": 1, "all_gather": {"bytes": ..., "calls": ...}, ...}; a
collective among fewer than all ranks has their number in its name: `all_gather of 2`.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import toolkit.train.__main__ as door
from toolkit.observe.rank_process import prepare_environment

# The dispatcher's operator → the collective, and which of its arguments holds the whole tensor.
OPERATORS = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), ("all_reduce", 0)),
    **{"reduce_": ("reduce", 0), "broadcast_": ("broadcast", 0)},
    **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"), ("all_gather", 0)),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    **dict.fromkeys(("reduce_scatter_", "reduce_scatter_tensor_coalesced_"), ("reduce_scatter", 1)),
    **dict.fromkeys(("alltoall_base_", "alltoall_"), ("all_to_all", 1)),
}
FUNCTIONAL = {
    **{"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "broadcast": "broadcast"},
    **{"reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"},
}


def main() -> int:
    words = sys.argv[1:]
    prepare_environment()
    if words[0] == "--alone":
        _, config, world_size, *words = words
        join_fake_group(config, int(world_size))
    count_steps()
    return door.main(words)


def join_fake_group(config: str, world_size: int) -> None:
    """Be rank 0, with what `accelerate launch` would put into its environment on a node of eight ranks."""
    from toolkit.launch.command import launcher_environment, rank_environment
    from toolkit.presets import load_preset

    rank = rank_environment(world_size=world_size, rank=0, local_rank=0, local_world_size=8, master_port=29500)
    os.environ |= launcher_environment(load_preset(config), world_size=world_size) | rank
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def count_steps() -> None:
    """From here on, every Trainer counts its steps' collectives."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import Trainer, TrainerCallback

    def num_bytes(value) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(num_bytes(item) for item in value)

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes, self.calls = Counter(), Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ended = func(*args, **(kwargs or {}))
            space, _, name = func._schema.name.partition("::")
            if space == "c10d" and name in OPERATORS:
                collective, place = OPERATORS[name]
                group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
                self.add(collective, args[place], dist.ProcessGroup.unbox(group).size())
            elif space == "_c10d_functional" and name in FUNCTIONAL:
                whole = ended if name == "all_gather_into_tensor" else args[0]
                self.add(FUNCTIONAL[name], whole, _resolve_process_group(args[-1]).size())
            elif func._schema.name == "deepspeed::dim_zero_all_to_all":  # Ulysses; an operator of its own
                from deepspeed.sequence.layer import _all_to_all_groups

                self.add("all_to_all", args[0], _all_to_all_groups[args[1]].size())
            return ended

        def add(self, collective: str, whole, ranks: int) -> None:
            collective += "" if ranks == dist.get_world_size() else f" of {ranks}"
            self.bytes[collective] += num_bytes(whole)
            self.calls[collective] += 1

    class EachStep(TrainerCallback):
        def on_step_begin(self, *_positional, **_named):
            self.count = Count()
            self.count.__enter__()

        def on_step_end(self, args, state, *_positional, **_named):
            self.count.__exit__(None, None, None)
            counted = {
                name: {"bytes": self.count.bytes[name], "calls": self.count.calls[name]} for name in self.count.bytes
            }
            path = Path(args.output_dir) / "collectives" / f"rank{args.process_index}.jsonl"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **counted}) + "\n")

    begin = Trainer.__init__

    def counting(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.callback_handler.callbacks.insert(0, EachStep())

    Trainer.__init__ = counting


if __name__ == "__main__":
    door.leave(main())

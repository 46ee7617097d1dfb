"""Make DeepSpeed fail as the page of failures says, and then not: `deepspeed_messages.py FOLDER`, on one rank or two.

One rank writes FOLDER/1.json and a ZeRO-2 checkpoint, which two ranks load: FOLDER/2.json. Each result is the message
of an error, or None.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import deepspeed
import torch
import torch.distributed as dist
import torch.utils.cpp_extension
from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch.torch_version import TorchVersion

RESULTS: dict[str, str | None] = {}


@contextlib.contextmanager
def recorded(name):
    RESULTS[name] = None
    try:
        yield
    except Exception as error:
        RESULTS[name] = str(error)


def engine(stage, module=None, **config):
    module = module or torch.nn.Sequential(torch.nn.Linear(4, 4))
    states = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    allowed = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(module.parameters())
    return deepspeed.initialize(model=module, optimizer=optimizer, config=states | allowed | config)[0]


def on_one_rank(folder):
    engine(2).save_checkpoint(folder)
    module = engine(3).module
    whole = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with recorded("saved shards"):
        whole.load_state_dict(module.state_dict())
    with recorded("saved shards, cured"), deepspeed.zero.GatheredParameters(list(module.parameters())):
        whole.load_state_dict(module.state_dict())
    embedding = engine(3, torch.nn.Embedding(10, 4))
    with recorded("shard as a weight"):
        torch.nn.functional.embedding(torch.tensor([1]), embedding.module.weight)
    with recorded("shard as a weight, cured"):
        embedding(torch.tensor([1]))
    with recorded("batch"):
        engine(0, train_batch_size=16, gradient_accumulation_steps=1)
    with recorded("batch, cured"):
        engine(0, gradient_accumulation_steps=16)
    scaler = DynamicLossScaler(4, 1000, 1, 1, False)
    with recorded("loss scale"):
        for _ in range(4):
            scaler.update_scale(True)
    # This torch has no CUDA, and this `nvcc` only prints a version.
    compiler = Path(folder, "cuda", "bin", "nvcc")
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.2, V12.2.140'\n")
    compiler.chmod(0o755)
    torch.utils.cpp_extension.CUDA_HOME = str(compiler.parents[1])
    torch.version.cuda = "13.0"
    with recorded("cuda"):
        assert_no_cuda_mismatch()
    with recorded("cuda of torch"):
        torch.utils.cpp_extension._check_cuda_version("g++", TorchVersion("12.0"))
    os.environ["DS_SKIP_CUDA_CHECK"] = "1"
    with recorded("cuda, unchecked"):
        assert_no_cuda_mismatch()
    del os.environ["DS_SKIP_CUDA_CHECK"]
    torch.version.cuda = "12.2"
    with recorded("cuda, cured"):
        assert_no_cuda_mismatch()
    torch.version.cuda = None


def on_two_ranks(folder):
    with recorded("world size"):
        engine(2).load_checkpoint(folder)
    with recorded("world size, cured"):
        engine(2).load_checkpoint(folder, load_optimizer_states=False)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (on_one_rank if ranks == 1 else on_two_ranks)(sys.argv[1])
    if rank == 0:
        Path(sys.argv[1], f"{ranks}.json").write_text(json.dumps(RESULTS))
    dist.barrier()
    os._exit(0)  # gloo's threads can abort at the end of the interpreter

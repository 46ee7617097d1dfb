"""Run another library's script, unchanged, in the CPU ranks that accelerate's launcher started.

    accelerate launch --config_file zero2.yaml --num_processes 2 run_on_cpu_ranks.py SCRIPT [ARGUMENTS]

Three things differ on a CPU from what the script finds on GPUs:

- For an `Accelerator()`, accelerate 1.15 starts no process group under `MULTI_GPU` or `DEEPSPEED`: each rank would run
  alone, and pass (`Num processes: 1`). The process state for the CPU, made first, gives it its ranks.
- torch 2.13 holds the GIL while `destroy_process_group` joins gloo's threads. A thread that is about to release a
  tensor needs the GIL, and both wait for ever; a second without the GIL lets it finish.
- accelerate 1.15 runs DDP on a CPU where FSDP2 was asked for.
"""

import os
import runpy
import sys
import time

import torch.distributed
from accelerate import PartialState

if __name__ == "__main__":
    destroy = torch.distributed.destroy_process_group

    def destroy_when_idle(*arguments, **named) -> None:
        time.sleep(1)
        destroy(*arguments, **named)

    torch.distributed.destroy_process_group = destroy_when_idle
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from toolkit.engines.fsdp2 import enable_fsdp_on_cpu

        enable_fsdp_on_cpu()
    PartialState(cpu=True)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Many rehearsals from one process: import everything once, and fork for each.

    prepare(cpu=True)
    code = rehearse(preset="zero3", world_size=64, rank=0, words=["--model_name_or_path", "config.json"], folder=out)

A forked process has a world, a model and an engine of its own, and finds the libraries imported.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

MODULES = ("accelerate.commands.launch", "deepspeed", "peft", "torch.distributed.fsdp", "toolkit.train.script")
# deepspeed's muon compiles a function, which imports torch's compiler: two thirds of a tiny rehearsal's time.
CPU_MODULES = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3", "deepspeed.ops.adam")
NOT_KEPT = ["--save_model", "false", "--save_strategy", "no", "--dataset", "synthetic", "--report_to", "none"]


def prepare(*, cpu: bool) -> None:
    """Import what every rehearsal needs. CUDA must not be started here: a fork could not use it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if cpu:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    from toolkit.train.__main__ import prepare_environment

    prepare_environment()
    for name in (*MODULES, *(CPU_MODULES if cpu else ())):
        importlib.import_module(name)
    if cpu:
        importlib.import_module("cpuinfo").get_cpu_info()  # remembered, also by what is forked from here


def rehearse(
    *,
    preset: str,
    world_size: int,
    rank: int,
    words: Sequence[str],
    folder: Path,
    timeout_seconds: float,
    fake_tensors: bool = False,
) -> int | None:
    """One rehearsal in `folder`; its exit code, or None where it was ended for its time."""
    child = os.fork()
    if child == 0:
        if fake_tensors:
            os.environ["TOOLKIT_REHEARSAL_FAKE_TENSORS"], words = "1", ["--bf16", "true", *words]
        _be_the_rank(preset, world_size, rank, words, folder)
    deadline, ended_for_time = time.monotonic() + timeout_seconds, False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline and not ended_for_time:
            os.kill(child, 9)
            ended_for_time = True
        time.sleep(0.01)
    return None if ended_for_time else os.waitstatus_to_exitcode(ended[1])


def log_tail(folder: Path) -> str:
    """The last words of a rehearsal that failed."""
    path = folder / "train.log"
    lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
    return " ".join(lines[-3:])


def _be_the_rank(preset: str, world_size: int, rank: int, words: Sequence[str], folder: Path) -> None:
    from toolkit.presets import load_preset
    from toolkit.train.__main__ import main

    try:
        folder.mkdir(parents=True)
        log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ |= {
            "TOOLKIT_PRESET": str(load_preset(preset).accelerate_config_path),
            "TOOLKIT_WORLD_SIZE": str(world_size),
            "TOOLKIT_REHEARSAL_RANK": str(rank),
            "TOOLKIT_RUN_PREPARED": "1",
        }
        os._exit(main([*NOT_KEPT, *words, "--output_dir", str(folder)]))
    finally:
        os._exit(1)  # not the parent's way out, which removes its folders

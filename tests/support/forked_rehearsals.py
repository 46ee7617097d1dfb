"""Run many rehearsals from one process: import everything once, and fork for each.

    prepare(cpu=True)
    code = rehearse(preset="zero3", world_size=64, rank=0, words=["--model_name_or_path", "config.json"], folder=out)

Each forked process has its own process group, model and engine; the libraries are already imported.
"""

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

MODULES = ("accelerate.commands.launch", "deepspeed", "peft", "torch.distributed.fsdp", "toolkit.rehearse.rank_script")
# DeepSpeed's Muon compiles a function, which imports torch's compiler: two thirds of a tiny rehearsal's time.
CPU_MODULES = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3", "deepspeed.ops.adam")
NOT_KEPT = ["--save_model", "false", "--save_strategy", "no", "--dataset", "synthetic", "--report_to", "none"]


def prepare(*, cpu: bool) -> None:
    """Import what every rehearsal needs. CUDA must not be initialised here: a forked process could not use it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if cpu:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    from toolkit.observe.rank_process import prepare_environment, without_bitsandbytes

    prepare_environment()
    with without_bitsandbytes():  # it asks each GPU for its capability
        for name in (*MODULES, *(CPU_MODULES if cpu else ())):
            importlib.import_module(name)
    import torch

    if torch.cuda.is_initialized():
        raise SystemExit("a library initialised CUDA when it was imported: no rehearsal could be forked")
    if cpu:
        importlib.import_module("cpuinfo").get_cpu_info()  # cached, also in forked processes


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
    """Run one rehearsal in `folder`; return its exit code, or None where it was stopped at its time limit."""
    child = os.fork()
    if child == 0:
        options = ["--preset", preset, "--world-size", str(world_size), "--rank", str(rank)]
        if fake_tensors:
            options, words = [*options, "--fake-tensors"], ["--bf16", "true", *words]
        _run_rank([*options, "--", *NOT_KEPT, *words, "--output_dir", str(folder)], folder)
    deadline, ended_for_time = time.monotonic() + timeout_seconds, False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline and not ended_for_time:
            os.kill(child, 9)
            ended_for_time = True
        time.sleep(0.01)
    return None if ended_for_time else os.waitstatus_to_exitcode(ended[1])


def log_tail(folder: Path) -> str:
    """Return the last lines of a failed rehearsal's log."""
    path = folder / "train.log"
    lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
    return " ".join(lines[-3:])


def _run_rank(argv: Sequence[str], folder: Path) -> None:
    from toolkit.rehearse.__main__ import main

    try:
        folder.mkdir(parents=True)
        log = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        os._exit(main(argv))
    finally:
        os._exit(1)  # skip the parent's exit handlers, which remove its folders

"""Start real distributed runs for tests, by hand as a user would: `accelerate launch --config_file ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
LLAMA_8B_CONFIG = Path(__file__).parent / "fixtures" / "llama-8b" / "config.json"

# Every preset that a CPU can run, and the ranks that its runs have here; the global batch is the same for all.
CPU_PRESETS = {
    **{name: 2 for name in ("ddp", "zero1", "zero2", "zero3", "zero3_cpu_offload", "fsdp2")},
    **{"single": 1, "zero2_cpu_offload": 2, "fsdp2_grad_op": 2, "fsdp2_cpu_offload": 2, "fsdp2_hybrid": 4},
}
GLOBAL_BATCH = 4

# The runs of the fixture `saved_runs`, and after how many steps each saves; it saves after the last one too.
SAVED_STEPS = 6
SAVED = {"ddp": 1, "zero2": 3, "zero2-lora": 2, "zero3": 2, "zero3-lora": 5, "fsdp2": 4, "fsdp2-lora": 3}
LORA = ["--lora_r", "4", "--lora_dropout", "0.1"]  # dropout: the random numbers must go on too


def accelerate_launch(
    config: Path,
    *words: str,
    script: str | None = None,
    num_processes: int = 2,
    options: Sequence[str] = (),
    cwd: Path = ROOT,
    variables: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Two ranks on the CPU, from the repository root; `options` are accelerate's own."""
    started = ["-m", "toolkit.train"] if script is None else [str(SCRIPTS / script)]
    named = ["--config_file", str(config), "--num_processes", str(num_processes), "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *named, *options, *started, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | (variables or {})
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


def torchrun(script: str, *words: str, num_processes: int) -> subprocess.CompletedProcess[str]:
    """A script of the user's own under torchrun; one process is started without it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(SCRIPTS / script), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def toolkit(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "toolkit", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def losses(folder: Path, ranks: int = 2) -> list[float]:
    """Mean over ranks of each step's loss."""
    files = [folder / "ranks" / f"rank{rank}.jsonl" for rank in range(ranks)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [sum(row["loss"] for row in step) / ranks for step in zip(*rows, strict=True)]

"""How fast the planner answers: all presets and eight world sizes of an 8B model, against DeepSpeed's estimator.

    python benchmarks/planner.py --rounds 5

The estimator answers for a model that has been built. Here transformers builds it on the meta device, without weights,
which is kinder than the estimator's documentation, where it is loaded. Two figures: from typing to the answer, each
side in a process of its own, and in one process after all imports, from `config.json` to the last answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import pairs, print_table, spread, write_result

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read import read_model
from toolkit.plan.job import Job
from toolkit.plan.planner import Request, make_plans
from toolkit.presets import list_presets

ROOT = Path(__file__).parent.parent
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Llama-3.1-8B's.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def plan_all(config: Path) -> int:
    """Every preset at every size, with largest micro-batch and smallest world size."""
    request = Request(
        shape=read_model(str(config)),
        presets=list_presets(),
        world_sizes=SIZES,
        job=Job(max_seq_length=4096, activation_checkpointing=True),
        gpu=find_gpu("h100-sxm"),
        strict=False,
    )
    return len(make_plans(request))


def estimate_all(config: Path) -> int:
    """DeepSpeed's two estimators at every size: what they print, thrown away."""
    import torch
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live as zero2
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.parent))
    with contextlib.redirect_stdout(io.StringIO()):
        for size in SIZES:
            zero2(model, num_gpus_per_node=min(size, 8), num_nodes=max(size // 8, 1))
            zero3(model, num_gpus_per_node=min(size, 8), num_nodes=max(size // 8, 1))
    return 2 * len(SIZES)


def seconds(answer: Any, config: Path) -> float:
    """Of one round in this process."""
    started = time.perf_counter()
    answer(config)
    return time.perf_counter() - started


def process_seconds(command: list[str]) -> float:
    """Of one command, from start to exit."""
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - started


def commands(config: Path) -> tuple[list[str], list[str]]:
    """What a user would start on either side."""
    sizes = [word for size in SIZES for word in ("--world-size", str(size))]
    how = ["--gpu", "h100-sxm", "--max-seq-length", "4096", "--activation-checkpointing", "--json"]
    call = f"import planner; planner.estimate_all(planner.Path({str(config)!r}))"
    estimate = f"import sys; sys.path.insert(0, 'benchmarks'); {call}"
    return [sys.executable, "-m", "toolkit", "plan", str(config), *sizes, *how], [sys.executable, "-c", estimate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        answers = plan_all(config), estimate_all(config)  # imports and caches
        inside = pairs(rounds, lambda: seconds(plan_all, config), lambda: seconds(estimate_all, config))
        ours, theirs = commands(config)
        typed = pairs(rounds, lambda: process_seconds(ours), lambda: process_seconds(theirs))
    figures: dict[str, Any] = {"plans": answers[0], "estimates": answers[1]}
    for name, measured in (("process", typed), ("in_process", inside)):
        plan, estimate = ([pair[side] for pair in measured] for side in (0, 1))
        ratios = [theirs / ours for ours, theirs in measured]
        figures[name] = {"plan_seconds": spread(plan), "estimator_seconds": spread(estimate), "ratio": spread(ratios)}
    print_table(
        ["", "plan s", "estimator s", "estimator / plan"],
        [
            (name, *(f"{figures[name][key]['median']:.3f}" for key in ("plan_seconds", "estimator_seconds", "ratio")))
            for name in ("process", "in_process")
        ],
    )
    print(f"answers: {answers[0]} plans, {answers[1]} estimates")
    print(write_result("planner", figures))


if __name__ == "__main__":
    main()

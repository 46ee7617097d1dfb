"""How fast the planner answers: all presets and eight world sizes of an 8B model, against DeepSpeed's estimator.

    python benchmarks/planner.py --rounds 5

The estimator answers for a model that is built, so transformers builds it without memory (on the meta device) first;
both sides are timed in one process after their imports, from `config.json` to the last answer. The goal: all plans in
less than a second, and 20 times as fast as the estimator's ZeRO-2 and ZeRO-3 for the same sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from record import print_table, spread, write_result

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read import read_model
from toolkit.plan.job import Job
from toolkit.plan.planner import Request, make_plans
from toolkit.presets import list_presets

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
    """Of one round."""
    started = time.perf_counter()
    answer(config)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        plans, estimates = plan_all(config), estimate_all(config)  # imports and caches
        ours = [seconds(plan_all, config) for _ in range(rounds)]
        theirs = [seconds(estimate_all, config) for _ in range(rounds)]
    figures = {
        "plans": plans,
        "plan_seconds": spread(ours),
        "estimates": estimates,
        "estimator_seconds": spread(theirs),
        "estimator_over_plan": spread(theirs)["median"] / spread(ours)["median"],
        "estimator_over_plan_per_answer": (spread(theirs)["median"] / estimates) / (spread(ours)["median"] / plans),
    }
    print_table(["side", "answers", "median s"], [
        ("toolkit plan", plans, f"{spread(ours)['median']:.3f}"),
        ("DeepSpeed's estimators", estimates, f"{spread(theirs)['median']:.3f}"),
    ])  # fmt: skip
    print(
        f"{figures['estimator_over_plan']:.1f} times as fast; an answer {figures['estimator_over_plan_per_answer']:.0f}"
    )
    print(write_result("planner", figures))


if __name__ == "__main__":
    main()

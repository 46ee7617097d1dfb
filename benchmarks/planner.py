"""Time the planner: all presets at eight world sizes for an 8B model, against DeepSpeed's estimator.

    python benchmarks/planner.py --rounds 5

The estimator needs a model that has been built. Measured are the ways in which a user may build it: `loaded` by
`from_pretrained`, as its documentation says (transformers 5 maps the checkpoint and reads no weight of it; here it is a
sparse file), and `built` without random weights. Once in one process after all imports, from `config.json` to the last
answer; once as commands, from typing to exit.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record import ROOT, pairs, print_table, spread, write_result

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import PlanRequest, make_plans, plan_request
from toolkit.presets import list_presets

MODEL = ROOT / "tests" / "fixtures" / "llama-8b"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WAYS = ("loaded", "built")


def plan_all(config: Path) -> int:
    """Plan every preset at every world size, with the largest batch size and the smallest world size."""
    job, gpu = PlannedJob(max_seq_length=4096, activation_checkpointing=True), find_gpu("h100-sxm")
    named = {"shape": read_model(str(config)), "presets": list_presets(), "world_sizes": SIZES}
    return len(make_plans(PlanRequest(**named, job=job, gpu=gpu, strict=False)))


def plan_found() -> int:
    """Plan every preset on 8 GPUs, each with the largest micro-batch that fits, as `toolkit plan` does by default."""
    return len(make_plans(plan_request(str(MODEL), PlanOptions(num_processes=(8,), gpu="h100"))))


def estimate_all(folder: Path, way: str) -> None:
    """Run DeepSpeed's two estimators at every world size."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live as zero2

    model = made_model(folder, way)
    with contextlib.redirect_stdout(io.StringIO()):
        for size in SIZES:
            zero2(model, num_gpus_per_node=min(size, 8), num_nodes=max(size // 8, 1))
            zero3(model, num_gpus_per_node=min(size, 8), num_nodes=max(size // 8, 1))


def made_model(folder: Path, way: str) -> Any:
    """Build the 8B model in one of `WAYS`, or on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if way == "loaded":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.device("meta" if way == "meta" else "cpu"), no_init_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def hollow_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of the right shapes whose weights are a sparse file."""
    folder.mkdir()
    (folder / "config.json").write_text((MODEL / "config.json").read_text())
    header, end = {}, 0
    for name, tensor in made_model(folder, "meta").state_dict().items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def seconds(answer: Callable[[], Any]) -> float:
    """Return the seconds of one round."""
    started = time.perf_counter()
    answer()
    return time.perf_counter() - started


def run(*words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=True)


def measure(folder: Path, way: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the medians of both sides, and of the ratio of each pair: in one process, and as commands."""
    estimate_all(folder, way)  # warms up imports and the file's pages
    inside = pairs(rounds, lambda: seconds(lambda: plan_all(MODEL)), lambda: seconds(lambda: estimate_all(folder, way)))
    # What a user would type, and what a user of the estimator would, with as few imports as possible.
    sizes = [word for size in SIZES for word in ("--num-processes", str(size))]
    how = ["--gpu", "h100-sxm", "--max-seq-length", "4096", "--activation-checkpointing", "--json"]
    ours = ["-m", "toolkit", "plan", str(MODEL), *sizes, *how]
    call = f"import planner; planner.estimate_all(planner.Path({str(folder)!r}), {way!r})"
    theirs = ["-c", f"import sys; sys.path.insert(0, 'benchmarks'); {call}"]
    typed = pairs(rounds, lambda: seconds(lambda: run(*ours)), lambda: seconds(lambda: run(*theirs)))
    for timed, measured in (("in one process", inside), ("command", typed)):
        sides = {name: spread([pair[side] for pair in measured]) for side, name in enumerate(("plan", "estimator"))}
        ratios = {"ratio": spread([estimator / plan for plan, estimator in measured])}
        yield {"model": way, "timed": timed, **sides, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    facts: dict[str, Any] = {"plans": plan_all(MODEL), "estimates": 2 * len(SIZES)}
    plan_found()  # imports, and the model's tensors
    facts["found_batch_seconds"] = spread([seconds(plan_found) for _ in range(given.rounds)])
    with tempfile.TemporaryDirectory() as scratch:
        folder = hollow_checkpoint(Path(scratch) / "model")
        rows = [row for way in WAYS for row in measure(folder, way, given.rounds)]
    keys = ("plan", "estimator", "ratio")
    shown = [(row["model"], row["timed"], *(f"{row[key]['median']:.3f}" for key in keys)) for row in rows]
    print_table(["estimator's model", "", "plan s", "estimator s", "estimator / plan"], shown)
    print(f"answers: {facts['plans']} plans, {facts['estimates']} estimates")
    print(f"plan without a batch, 8 GPUs: {facts['found_batch_seconds']['median']:.3f} s")
    print(write_result("planner", facts, rows))


if __name__ == "__main__":
    main()

"""Gradients between accumulation steps under FSDP2, sharded and whole: traced peaks, and rounding in bf16.

    python benchmarks/accumulation.py --trace        # an 8B on 8 GPUs, on fake tensors; a minute
    python benchmarks/accumulation.py --rounding     # one CPU process; seconds

Both write their tables in docs/concepts/gradient-accumulation.md. `--trace` rehearses rank 0 of 8 through a whole
optimizer step and sets the plan beside it. `--rounding` gives one model and the same rows to FSDP2 as accelerate
configures it (bf16 parameters and reduction, fp32 shards), and compares the gradient before the optimizer step with
one in fp32. It runs in one process, so what reductions between ranks round is not in it: both reduce in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, write_result, write_table

from toolkit.units import GIB

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "concepts" / "gradient-accumulation.md"
LLAMA_8B = ROOT / "tests" / "fixtures" / "llama-8b" / "config.json"
RANKS, LENGTH = 8, 2048
JOBS = {"1": [1, "sharded"], "2, `sharded`": [2, "sharded"], "2, `whole`": [2, "whole"]}
ACCUMULATION_STEPS = (1, 4, 16)


def trace() -> dict[str, Any]:
    """Return traced and planned peaks in bytes by job, and by phase for the trace."""
    from toolkit.models.read_model import read_model
    from toolkit.plan.memory import plan_memory
    from toolkit.plan.planned_job import PlannedJob
    from toolkit.presets import load_preset

    found = {}
    for name, (steps, accumulate) in JOBS.items():
        job = PlannedJob(
            per_device_train_batch_size=1,
            max_seq_length=LENGTH,
            gradient_accumulation_steps=steps,
            accumulate=accumulate,
            activation_checkpointing=True,
        )
        plan = plan_memory(read_model(str(LLAMA_8B)), load_preset("fsdp2"), world_size=RANKS, job=job)
        words = ["--per_device_train_batch_size", "1", "--max_seq_length", str(LENGTH), "--accumulate", accumulate]
        words += ["--gradient_accumulation_steps", str(steps), "--activation_checkpointing", "true"]
        phases = {phase: peak["total_bytes"] for phase, peak in rehearsed(words)["peaks"].items()}
        found[name] = {"traced": phases, "planned": {phase.phase: phase.allocated_bytes for phase in plan.phases}}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def rehearsed(words: list[str]) -> dict[str, Any]:
    """Return what `toolkit rehearse --fake-tensors` counts on rank 0."""
    command = [sys.executable, "-m", "toolkit", "rehearse", "--preset", "fsdp2", "--num-processes", str(RANKS)]
    command += ["--fake-tensors", "--json", "--", "--model_name_or_path", str(LLAMA_8B), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout))


def write_trace(found: dict[str, Any]) -> None:
    """Write the table of traced and planned peaks."""
    phases = ("forward", "backward", "step")
    rows = []
    for name, peaks in found.items():
        cells = [f"{peaks['traced'][phase] / GIB:.1f}" for phase in phases]
        traced, planned = (max(peaks[kind][phase] for phase in phases) for kind in ("traced", "planned"))
        rows.append([name, *cells, f"{traced / GIB:.1f}", f"{planned / GIB:.1f}", f"{planned / traced - 1:+.1%}"])
    header = ["accumulation steps", *phases, "traced peak", "planned", "error"]
    write_table(PAGE, "traced accumulation", header, rows)


def rounding() -> dict[str, Any]:
    """Return the relative error of the gradient in bf16 by accumulation steps, sharded and whole."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    batches = [torch.randint(0, 512, (1, 64)) for _ in range(max(ACCUMULATION_STEPS))]
    errors: dict[str, list[float]] = {"sharded": [], "whole": []}
    for steps in ACCUMULATION_STEPS:
        exact = accumulated(batches[:steps], dtype=torch.float32, sharded=True)
        for name, found in errors.items():
            gradient = accumulated(batches[:steps], dtype=torch.bfloat16, sharded=name == "sharded")
            found.append(((gradient - exact).norm() / exact.norm()).item())
    dist.destroy_process_group()
    return {"accumulation_steps": list(ACCUMULATION_STEPS), **errors}


def accumulated(batches: list[Any], *, dtype: Any, sharded: bool) -> Any:
    """Return the complete gradient, flat, of the mean loss over all batches."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(sharded or index == len(batches) - 1)
        (model(input_ids=batch, labels=batch).loss / len(batches)).backward()
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])


def write_rounding(found: dict[str, Any]) -> None:
    """Write the table of errors."""
    header = ["", *map(str, found["accumulation_steps"])]
    rows = [[f"`{name}`", *(f"{error:.2%}" for error in found[name])] for name in ("sharded", "whole")]
    write_table(PAGE, "rounding of accumulation", header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="peaks on fake tensors, next to the plan")
    parser.add_argument("--rounding", action="store_true", help="error of the gradient in bf16, on a CPU")
    given = parser.parse_args()
    path = RESULTS / "accumulation.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    figures = {name: before[name] for name in ("trace", "rounding") if name in before}
    if given.trace:
        figures["trace"] = trace()
        write_trace(figures["trace"])
    if given.rounding:
        figures["rounding"] = rounding()
        write_rounding(figures["rounding"])
    write_result("accumulation", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

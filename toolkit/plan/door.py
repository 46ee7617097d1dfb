"""`toolkit plan`: read the model and the presets, plan, print a table or JSON.

$ toolkit plan MODEL --world-size 8 --gpu h100 --max-seq-length 4096 --activation-checkpointing
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import Gpu, find_gpu, gpu_by_hand
from toolkit.models.read import check_unquantized, read_model
from toolkit.plan.job import Job
from toolkit.plan.planner import Plan, Request, make_plans
from toolkit.presets import list_presets, load_preset
from toolkit.units import GIB


def plans_of(
    model: str,
    *,
    presets: Sequence[str],
    world_sizes: Sequence[int],
    job: Job,
    gpu: str | None,
    gpu_memory_gib: float | None,
    gpu_tflops: float | None,
    host_memory_gib: float | None,
) -> tuple[list[Plan], Request]:
    """The plans of the named presets, or of all that can have the world sizes, and what was asked."""
    chosen_gpu = the_gpu(gpu, memory_gib=gpu_memory_gib, tflops=gpu_tflops)
    if host_memory_gib is not None and not 0 < host_memory_gib < 10**6:
        raise ToolkitError(f"--host-memory-gib is {host_memory_gib}, expected more than 0 and below a million")
    chosen = [load_preset(name) for name in dict.fromkeys(presets)] or list_presets()
    check_unquantized(model)
    shape = read_model(model)
    request = Request(
        shape=shape,
        presets=chosen,
        world_sizes=sorted(set(world_sizes)),
        job=job,
        gpu=chosen_gpu,
        host_memory_bytes=None if host_memory_gib is None else round(host_memory_gib * GIB),
        strict=bool(presets),
    )
    return make_plans(request), request


def print_json(model: str, plans: Sequence[Plan], request: Request, **more: Any) -> None:
    """The plans as JSON, with what else was found."""
    shape = request.shape
    head = {"model": model, "model_type": shape.model_type, "counted_on": shape.counted_on}
    head |= {"activations_from": shape.activations_from}
    print(json.dumps(head | {"plans": [plan.as_row() for plan in plans]} | more, indent=2))


def the_gpu(name: str | None, *, memory_gib: float | None, tflops: float | None) -> Gpu:
    """Of the table, given by hand, or of the table with numbers replaced."""
    if name is None and memory_gib is None:
        raise ToolkitError("which GPU? none is named", hint="--gpu NAME, for example `--gpu h100`, or --gpu-memory-gib")
    base = None if name is None else find_gpu(name)
    if memory_gib is None and tflops is None and base is not None:
        return base
    return gpu_by_hand(base, memory_gib=memory_gib, tflops=tflops)

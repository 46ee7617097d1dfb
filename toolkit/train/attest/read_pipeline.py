"""Read a pipeline back from its live stages and torch's live schedule, and compare the stages of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from toolkit.parallel.layout import ParallelLayout
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B
from toolkit.train.arguments import Arguments
from toolkit.train.attest.readings import Difference, Values
from toolkit.train.attest.tensors import dtype_names
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel

_SCHEDULES = {ScheduleGPipe: GPIPE, Schedule1F1B: ONE_F_ONE_B, ScheduleInterleaved1F1B: INTERLEAVED}


def expected_pipeline(arguments: Arguments) -> Values:
    """Return the values of a pipeline that every rank must read under these arguments; none without one."""
    settings = arguments.pipeline
    if settings is None:
        return {}
    return {
        "pipeline_schedule": settings.schedule,
        "pipeline_stages": settings.stages,
        "micro_batches": arguments.training.gradient_accumulation_steps,
        "activation_dtype": "float32",  # the residual stream between layers, under autocast too
    }


def read_pipeline(trainer: Any, model: PipelineModel) -> Values:
    """Read this rank's stages, and the schedule that has run them."""
    schedule = trainer.steps.schedule
    sent = [buffer for stage in _live_stages(schedule) for buffer in _received(stage)]
    return {
        "pipeline_schedule": _SCHEDULES.get(type(schedule), type(schedule).__name__),
        "pipeline_stages": schedule._num_stages,
        "micro_batches": schedule._n_microbatches,
        "activation_dtype": dtype_names(sent),
        "stages": [stage.stage_index for stage in _live_stages(schedule)],
        "layers": [int(name) for stage in model.stages for name, _ in stage.decoder.model.layers.named_children()],
        "tied_copy_bytes": sum(stage.tied_copy.nbytes for stage in model.stages if stage.tied_copy is not None),
    }


def _live_stages(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def _received(stage: Any) -> list[Any]:
    """The buffers in which a stage receives activations, or else their gradients."""
    infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    return [info.buffer for each in infos for info in each if info.buffer is not None]


def pipeline_layout(model: PipelineModel) -> tuple[dict[str, int], list[int]]:
    """Return the degrees of the live mesh, and the ranks of this pipeline."""
    mesh = model.ranks.mesh
    sizes = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
    return sizes, [int(rank) for rank in dist.get_process_group_ranks(model.ranks.pipeline)]


def pipeline_differences(ranks: Sequence[Mapping[str, Any]], layout: ParallelLayout | None) -> list[Difference]:
    """Return layers that no rank of a pipeline holds, or more than one, and parameters that are on no rank."""
    if layout is None or layout.pp == 1:
        return []
    found = []
    for first in range(0, len(ranks), layout.pp):
        pipeline = ranks[first : first + layout.pp]
        layers = sorted(layer for reading in pipeline for layer in reading["layers"])
        if layers != list(range(len(layers))):
            found.append(Difference(name="layers of all stages", rank=None, expected="each layer once", found=layers))
        held = sum(reading["parameter_bytes"] - reading["tied_copy_bytes"] for reading in pipeline)
        whole = 4 * ranks[0]["num_params"]
        if held != whole:
            found.append(Difference(name="parameter_bytes of all stages", rank=None, expected=whole, found=held))
    return found

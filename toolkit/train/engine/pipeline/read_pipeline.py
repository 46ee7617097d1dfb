"""Read a pipeline back from its live stages and torch's live schedule."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from toolkit.observe.attest.readings import Values
from toolkit.observe.attest.tensors import dtype_names
from toolkit.parallel.layout import DIMENSIONS
from toolkit.parallel.pipeline_schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B
from toolkit.train.engine.pipeline.pipeline_model import PipelineModel

_SCHEDULES = {ScheduleGPipe: GPIPE, Schedule1F1B: ONE_F_ONE_B, ScheduleInterleaved1F1B: INTERLEAVED}


def read_pipeline(trainer: Any, model: Any) -> Values:
    """Read this rank's stages, and the schedule that has run them; nothing of another model."""
    if not isinstance(model, PipelineModel):
        return {}
    schedule = trainer.steps.schedule
    sent = [buffer for stage in _live_stages(schedule) for buffer in _received(stage)]
    degrees, group = _mesh(model)
    return {
        "engine": "pipeline",
        "num_trainable_params": model.num_params_of_all_stages(),  # all of them are trained
        "layout": {name: degrees.get(name, 1) for name in DIMENSIONS},
        "batch_group": group,
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


def _mesh(model: PipelineModel) -> tuple[dict[str, int], list[int]]:
    """Return the degrees of the live mesh, and the ranks of this pipeline."""
    mesh = model.ranks.mesh
    sizes = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
    return sizes, [int(rank) for rank in dist.get_process_group_ranks(model.ranks.pipeline)]

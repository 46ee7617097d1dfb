"""Which parts train a run: transformers' Trainer around a whole model, or the toolkit's loop over pipeline stages."""

from __future__ import annotations

from typing import Any

from toolkit.observe.attest.tensors import compute_dtype
from toolkit.train.active_run import ActiveRun
from toolkit.train.engine.pipeline.pipeline_model import PipelineRanks, load_pipeline
from toolkit.train.engine.pipeline.pipeline_trainer import PipelineTrainer
from toolkit.train.model.loading import load_model
from toolkit.train.trainer import TrainerParts


def load_engine(run: ActiveRun) -> tuple[Any, TrainerParts]:
    """Load the run's model, from its checkpoint where the engine divides it; return it with the parts that train it."""
    arguments = run.arguments
    checkpoint = None if run.checkpoint is None else run.checkpoint.path
    layout, pipeline, dtype = arguments.layout, arguments.pipeline, compute_dtype(arguments.training)
    if layout is not None and pipeline is not None:
        ranks = PipelineRanks.of(layout, arguments.training.device.type)
        device = arguments.training.device
        model = load_pipeline(arguments.job, pipeline, ranks, compute_dtype=dtype, device=device, checkpoint=checkpoint)
        return model, TrainerParts(trainer=PipelineTrainer)
    model = load_model(arguments.job, compute_dtype=dtype, layout=run.layout_at_load, checkpoint=checkpoint)
    return model, TrainerParts()

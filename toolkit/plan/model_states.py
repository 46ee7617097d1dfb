"""Model states of one rank between steps: parameters, gradients and optimizer states, exact to the byte.

Rank 0 has the largest share under every engine. `tests/plan/test_engine_bytes.py` compares all of it with real engines.
"""

from __future__ import annotations

from functools import lru_cache

from toolkit.engines.engine import EngineSettings
from toolkit.engines.planned import ModelStates
from toolkit.models.job_weights import JobWeights
from toolkit.models.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerSpec
from toolkit.models.shape import ModelShape
from toolkit.plan.planned_job import PlannedJob, TrainingSetup
from toolkit.presets.spec import PresetSpec


@lru_cache(maxsize=64)  # the same for every micro-batch that a search tries
def model_states(engine: EngineSettings, weights: JobWeights, optimizer: OptimizerSpec | None = None) -> ModelStates:
    """Return the bytes that the engine's rank holds between steps, with the default optimizer or another."""
    return engine.traits.model_states(engine, weights, optimizer or OPTIMIZERS[DEFAULT_OPTIMIZER])


def all_ranks_bytes(shape: ModelShape, preset: PresetSpec, *, world_size: int, job: PlannedJob) -> int:
    """Return the bytes of all ranks in fp32, as a run on a CPU holds them."""
    setup = TrainingSetup(shape=shape, preset=preset, world_size=world_size, job=job, mixed_precision="no")
    return world_size * model_states(setup.engine, setup.weights, job.optimizer).total_bytes

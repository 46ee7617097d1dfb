"""Stages of a model: which tensors each has, their times, and their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launching import LLAMA_8B_CONFIG

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.planned_job import PlannedJob
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.stage_plans import StagedModel

FOUR = PipelineSize(stages=4, micro_batches=8)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model(str(LLAMA_8B_CONFIG))


def staged(shape: ModelShape, **changes: object) -> StagedModel:
    job = PlannedJob(max_seq_length=2048, per_device_train_batch_size=1, lengths_differ=False)
    return replace(StagedModel(shape=shape, job=job, gpu=find_gpu("h100")), **changes)  # type: ignore[arg-type]


def test_the_chunks_together_are_the_model(shape: ModelShape) -> None:
    for size in (FOUR, replace(FOUR, chunks=2), replace(FOUR, stages=5), replace(FOUR, stages=1)):
        parts = [staged(shape).part(size, chunk) for chunk in range(size.num_chunks)]
        assert sum(part.num_params for part in parts) == shape.num_params
        assert sum(part.num_layers for part in parts) == shape.num_layers
        assert [tensor for part in parts for tensor in part.outer] == list(shape.outer)


def test_the_stages_do_the_operations_of_the_whole_model(shape: ModelShape) -> None:
    whole = staged(shape).chunk_times(replace(FOUR, stages=1), end=0)[0]
    parts = staged(shape).chunk_times(FOUR, end=0)
    assert sum(part.seconds for part in parts) == pytest.approx(whole.seconds)
    lookup, layers, _, head = (part.seconds for part in parts)
    assert head > lookup == pytest.approx(layers), "the head computes, a lookup does not"


def test_weights_take_half_of_a_dense_backward_and_recomputing_is_part_of_the_other_half(shape: ModelShape) -> None:
    times = staged(shape).chunk_times(FOUR, end=0)[1]
    assert times.weight_seconds < times.forward_seconds < times.backward_seconds  # attention has no weights
    checkpointing = staged(shape, job=PlannedJob(max_seq_length=2048, activation_checkpointing=True))
    again = checkpointing.chunk_times(FOUR, end=0)[1]
    assert again.backward_seconds / again.weight_seconds > times.backward_seconds / times.weight_seconds + 0.9


def test_model_states_are_16_bytes_per_parameter_and_replicas_share_12_of_them(shape: ModelShape) -> None:
    for replicas, bytes_each in ((1, 16), (4, 4 + 12 / 4)):
        model = staged(shape, data_parallel_size=replicas)
        states = [stage.state_bytes for stage in model.stage_memory(model.simulate("1f1b", FOUR))]
        params = [model.part(FOUR, chunk).num_params for chunk in range(4)]
        assert states == pytest.approx([bytes_each * count for count in params], rel=1e-6)
        assert (model.gradient_seconds(FOUR)[0] > 0) == (replicas > 1), "replicas sum their gradients"


def test_activations_grow_with_the_micro_batches_in_flight(shape: ModelShape) -> None:
    model = staged(shape)
    gpipe, one_f_one_b, zb_h2 = (
        model.stage_memory(model.simulate(schedule, FOUR)) for schedule in ("gpipe", "1f1b", "zb_h2")
    )
    each = one_f_one_b[1].held_bytes - one_f_one_b[2].held_bytes  # 3 and 2 in flight
    assert gpipe[1].held_bytes - one_f_one_b[1].held_bytes == 5 * each > 0
    assert gpipe[0].peak_bytes > zb_h2[0].peak_bytes > one_f_one_b[0].peak_bytes  # 8, 7 and 4 micro-batches


def test_tensor_parallelism_divides_states_and_adds_exchanges(shape: ModelShape) -> None:
    alone, split = staged(shape), staged(shape, tp=4)
    memory = [model.stage_memory(model.simulate("1f1b", FOUR))[0].state_bytes for model in (alone, split)]
    assert memory[1] == pytest.approx(memory[0] / 4, rel=0.001)  # norms are whole
    times = [model.chunk_times(FOUR, end=1)[1] for model in (alone, split)]
    assert times[1].weight_seconds < times[0].weight_seconds / 2
    assert times[1].forward_seconds > times[0].forward_seconds / 4


def test_a_model_without_formulas_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match="no formulas"):
        staged(replace(shape, counted_on="meta device")).check()

"""Model states and activations of a pipeline's stages, against tensors counted by hand."""

from dataclasses import replace

import pytest
from model_configs import LLAMA

from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.config_fields import ConfigFields
from toolkit.models.decoders import shape_from_config
from toolkit.models.shape import ModelShape
from toolkit.parallel.pipeline_schedule import PipelineSettings
from toolkit.plan.communication import step_collectives
from toolkit.plan.interconnect import Interconnect
from toolkit.plan.memory import plan_memory
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.step_time import step_time
from toolkit.plan.training_setup import StageLoad, TrainingSetup, stage_shape
from toolkit.presets import load_preset
from toolkit.simulate.pipeline_schedules import ChunkTimes, PipelineSize, simulate

LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64
EMBEDDING = 1009 * 64
PRESET = load_preset("pipeline_1f1b")


def llama(*, layers: int = 5, tied: bool = False) -> ModelShape:
    fields = {**LLAMA, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return shape_from_config(ConfigFields(fields, "config.json"))


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_has_its_layers_and_the_ends_embedding_and_head(tied: bool) -> None:
    settings = PipelineSettings(ranks=3)
    held = [stage_shape(llama(tied=tied), settings, rank).num_params for rank in range(3)]
    assert held == [EMBEDDING + 2 * LAYER, 2 * LAYER, LAYER + 64 + EMBEDDING]
    settings = PipelineSettings(ranks=2, schedule="interleaved_1f1b", chunks=2)  # deals out layers 0-1, 2, 3, 4
    held = [stage_shape(llama(tied=tied), settings, rank).num_params for rank in range(2)]
    assert held == [EMBEDDING + 3 * LAYER, 2 * LAYER + 64 + EMBEDDING]


def test_the_plan_is_of_the_stage_that_needs_most() -> None:
    """In fp32, four times the parameters for weights and gradients each, eight times for AdamW."""
    job = PlannedJob(pp=2, gradient_accumulation_steps=4, max_seq_length=64, per_device_train_batch_size=1)
    states = plan_memory(llama(), PRESET, world_size=2, job=job).states
    worst = EMBEDDING + 3 * LAYER
    assert (states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes) == (4 * worst, 4 * worst, 8 * worst)


def test_gpipe_keeps_the_logits_of_all_micro_batches_and_the_first_stage_receives_gradients_only() -> None:
    gpipe, one_f_one_b = (PipelineSettings(ranks=4, schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert [StageLoad.of(gpipe, rank, micro_batches=16).logits_in_flight for rank in (0, 3)] == [0, 15]
    assert StageLoad.of(one_f_one_b, 0, micro_batches=16).buffered_activations == 16


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3)])
def test_bubble_and_micro_batches_in_flight_are_those_of_the_simulated_operations(schedule: str, chunks: int) -> None:
    settings = PipelineSettings(ranks=4, schedule=schedule, chunks=chunks)
    size = PipelineSize(stages=4, micro_batches=12, chunks=settings.chunks)
    each = ChunkTimes(forward_seconds=1.0, backward_seconds=2.0)
    run = simulate(settings.schedule, size, [each] * size.num_chunks)
    assert run.makespan_seconds / run.work_seconds == pytest.approx(settings.bubble_factor(12))
    in_flight = [StageLoad.of(settings, rank, micro_batches=12).micro_batches_in_flight for rank in range(4)]
    assert run.peak_micro_batches == pytest.approx(in_flight)


def test_the_planned_step_is_that_of_the_slowest_stage() -> None:
    """With a vocabulary of 65,536, nearly all operations are the head's, on the last of four GPUs."""
    interconnect = Interconnect(gpu=find_gpu("h100"), world_size=4, gpus_per_node=8)
    seconds = []
    for vocab_size in (64, 64 * 1024):
        fields = {**LLAMA, "num_hidden_layers": 4, "vocab_size": vocab_size, "tie_word_embeddings": False}
        shape = shape_from_config(ConfigFields(fields, "config.json"))
        job = PlannedJob(pp=4, gradient_accumulation_steps=8, max_seq_length=4096, per_device_train_batch_size=64)
        staged = step_time(TrainingSetup(shape=shape, preset=PRESET, world_size=4, job=job), interconnect)
        whole = replace(job, pp=None, gradient_accumulation_steps=8)
        alone = step_time(
            TrainingSetup(shape=shape, preset=load_preset("single"), world_size=1, job=whole),
            replace(interconnect, world_size=1),
        )
        seconds.append(staged.compute_seconds / (alone.compute_seconds / 4))
    assert seconds[0] == pytest.approx(1 + 3 / 8, rel=0.05)  # the bubble of four stages and eight micro-batches
    assert seconds[1] > 2 * seconds[0]


def test_a_rank_sends_activations_and_gradients_and_all_reduces_over_replicas() -> None:
    job = PlannedJob(pp=2, gradient_accumulation_steps=4, max_seq_length=64, per_device_train_batch_size=1)
    found = step_collectives(TrainingSetup(shape=llama(tied=True), preset=PRESET, world_size=4, job=job))
    assert [(each.name, each.dimension, each.payload_bytes) for each in found] == [
        ("permute", "pp", 2 * 4 * 4 * 64 * 64),
        ("all_reduce", "pp", 4 * EMBEDDING),
        ("all_reduce", "dp_replicate", 4 * (EMBEDDING + 3 * LAYER)),
    ]

"""Stages of a model: which tensors each has, their times, their memory; and layouts where no preset fits."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from command_line import run_command
from launching import LLAMA_8B_CONFIG

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.models.read_model import read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.candidates import RecommendRequest
from toolkit.plan.methods import Method
from toolkit.plan.options import RecommendOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.recommend import recommend_request
from toolkit.simulate.pipeline_schedules import PipelineSize
from toolkit.simulate.stage_plans import StagedModel, best_pipeline_layout, pipeline_layouts, trained_pipeline

FOUR = PipelineSize(stages=4, micro_batches=8)
# One size of GPU on which the presets are too close to call, with host memory for no offload.
NO_PRESET = ["recommend", str(LLAMA_8B_CONFIG), "--num-processes", "16", "--gpu", "h100", "--max-seq-length", "2048"]
NO_PRESET += ["--gpu-memory-gib", "15", "--host-memory-gib", "30"]


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
    assert sum(map(sum, parts)) == pytest.approx(sum(whole), rel=1e-3)
    lookup, layers, _, head = map(sum, parts)
    assert head > lookup == pytest.approx(layers, rel=1e-3), "the head computes, a lookup does not"


def test_a_backward_takes_twice_a_forward_and_with_recomputing_nearly_three_times(shape: ModelShape) -> None:
    times = staged(shape).chunk_times(FOUR, end=0)[1]
    assert times.backward_seconds == pytest.approx(2 * times.forward_seconds, rel=0.1)
    checkpointing = staged(shape, job=PlannedJob(max_seq_length=2048, activation_checkpointing=True))
    again = checkpointing.chunk_times(FOUR, end=0)[1]
    assert again.backward_seconds == pytest.approx(3 * again.forward_seconds, rel=0.1)


def test_model_states_are_16_bytes_per_parameter_and_replicas_share_12_of_them(shape: ModelShape) -> None:
    for replicas, bytes_each in ((1, 16), (4, 4 + 12 / 4)):
        model = staged(shape, data_parallel_size=replicas)
        states = [stage.state_bytes for stage in model.stage_memory(model.simulate("1f1b", FOUR))]
        params = [model.part(FOUR, chunk).num_params for chunk in range(4)]
        assert states == pytest.approx([bytes_each * count for count in params], rel=1e-6)
        assert (model.gradient_seconds(FOUR)[0] > 0) == (replicas > 1), "replicas sum their gradients"


def test_activations_grow_with_the_micro_batches_in_flight(shape: ModelShape) -> None:
    model = staged(shape)
    gpipe, one_f_one_b = (model.stage_memory(model.simulate(schedule, FOUR)) for schedule in ("gpipe", "1f1b"))
    each = one_f_one_b[1].activation_bytes - one_f_one_b[2].activation_bytes  # 3 and 2 in flight
    assert gpipe[1].activation_bytes - one_f_one_b[1].activation_bytes == 5 * each > 0
    assert gpipe[0].peak_bytes > one_f_one_b[0].peak_bytes  # 8 and 4 micro-batches


def test_tensor_parallelism_divides_states_and_adds_exchanges(shape: ModelShape) -> None:
    alone, split = staged(shape), staged(shape, tp=4)
    memory = [model.stage_memory(model.simulate("1f1b", FOUR))[0].state_bytes for model in (alone, split)]
    assert memory[1] == pytest.approx(memory[0] / 4, rel=0.001)  # norms are whole
    times = [model.chunk_times(FOUR, end=1)[1] for model in (alone, split)]
    assert times[1].backward_seconds < 0.6 * times[0].backward_seconds
    assert times[1].forward_seconds > times[0].forward_seconds / 4


def test_a_model_without_formulas_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ToolkitError, match="no formulas"):
        staged(replace(shape, counted_on="meta device")).check()


def request(**options: Any) -> RecommendRequest:
    values: dict[str, Any] = {"num_processes": 16, "gpu": "h100", "max_seq_length": 2048, "global_batch_size": 64}
    return recommend_request(str(LLAMA_8B_CONFIG), RecommendOptions(**{**values, **options}))


def test_every_layout_uses_all_gpus_and_trains_the_whole_batch_and_the_fastest_that_fits_is_best() -> None:
    layouts = list(pipeline_layouts(request()))
    assert {layout.degrees["pp"] for layout in layouts} == {2, 4, 8, 16}
    assert {layout.degrees["tp"] for layout in layouts} == {1, 2, 4, 8}
    for layout in layouts:
        assert math.prod(layout.degrees.values()) == 16
        rows = layout.run.size.micro_batches * layout.staged.job.per_device_train_batch_size
        assert rows * layout.degrees["dp"] == 64
        assert layout.run.size.micro_batches >= layout.degrees["pp"]
    best = best_pipeline_layout(request())
    assert best is not None
    assert best.step_seconds() == min(layout.step_seconds() for layout in layouts if layout.fits)
    assert best.step_seconds(0) < best.step_seconds() < best.step_seconds(1)
    assert len(best.memory) == best.degrees["pp"]


def test_where_no_preset_fits_a_layout_is_planned_with_memory_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command([*NO_PRESET, "--json"], capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    layout = found["pipeline_layout"]
    assert found["choice"] is None
    assert found["why_no_choice"].startswith("nothing fits on 16")
    assert layout["degrees"] == {"dp": 1, "tp": 8, "pp": 2}
    assert len(layout["planned_peak_bytes"]) == 2
    preset = found["trained_pipeline"]
    assert preset["command"] is None
    assert preset["why_not"] == "needs 32.6 GiB of host memory per node, which has 30.0"
    text = run_command(NO_PRESET, capsys)[1]
    assert "Preset pipeline_1f1b, which has neither tensor parallelism nor" in text
    assert "dp 1 x tp 8 x pp 2 (data x tensor x pipeline parallelism)" in text
    assert "; with more GPUs: `--num-processes 32`." in text


@pytest.mark.parametrize("words", [["--preset", "fsdp2"], ["--lora-r", "16", "--gpu-memory-gib", "3"]])
def test_named_presets_and_jobs_that_fit_nowhere_are_still_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_command([*NO_PRESET, *words], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: nothing fits on 16")


def test_the_preset_that_can_train_a_pipeline_is_found_with_its_degrees_or_why_it_cannot() -> None:
    candidate, why_not = trained_pipeline(request(num_processes=8))
    assert candidate is not None, why_not
    job = candidate.job
    assert job.pp is not None
    assert job.gradient_accumulation_steps >= job.pp  # 1F1B fills all stages
    assert job.per_device_train_batch_size * job.gradient_accumulation_steps * (8 // job.pp) == 64
    answer = trained_pipeline(request(num_processes=3, global_batch_size=3))
    assert answer == (None, "with pp 2 needs a multiple of 2 processes, 2 or more")


def of_method(shape: ModelShape, name: str, **method: Any) -> StagedModel:
    return staged(shape, job=replace(staged(shape).job, method=Method(method=name, **method)))


def test_a_reference_of_a_stage_is_held_beside_its_weights_and_runs_before_each_forward(shape: ModelShape) -> None:
    dpo, orpo, ahead = (
        of_method(shape, *how, **more)
        for how, more in ((("dpo",), {}), (("orpo",), {}), (("dpo",), {"precompute_ref_log_probs": True}))
    )
    runs = [each.simulate("1f1b", FOUR) for each in (dpo, orpo, ahead)]
    memory = [each.stage_memory(run) for each, run in zip((dpo, orpo, ahead), runs, strict=True)]
    for stage, (held, without, _) in enumerate(zip(*memory, strict=True)):
        assert held.state_bytes - without.state_bytes == 2 * dpo.part(FOUR, stage).num_params
    assert [each.state_bytes for each in memory[1]] == [each.state_bytes for each in memory[2]]
    times = [each.chunk_times(FOUR, end=0)[1] for each in (dpo, orpo, staged(shape))]
    assert times[0].forward_seconds == pytest.approx(2 * times[1].forward_seconds)
    assert sum(times[1]) == pytest.approx(2 * sum(times[2]))  # two rows of a pair


def test_a_reward_model_has_a_head_of_one_row_in_its_last_stage_alone(shape: ModelShape) -> None:
    parts = [of_method(shape, "reward").part(FOUR, chunk) for chunk in range(4)]
    assert [[tensor.name for tensor in part.outer][-1:] for part in parts[1:]] == [[], [], ["score.weight"]]

"""Rows with images: against the one public series of peaks by number of tokens, and what is trained of a model."""

from dataclasses import replace
from typing import Any

import pytest
from command_line import run_command

from toolkit.models.job_weights import job_weights
from toolkit.models.read_model import read_model
from toolkit.models.vision_tower import saved_per_token
from toolkit.plan.memory import MemoryPlan, plan_engine_memory
from toolkit.plan.options import PlanOptions
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.training_setup import engine_settings
from toolkit.presets import load_preset

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
# https://github.com/yiqiao-yin/deepspeed-course/pull/31: one A40, ZeRO-3, rows of this length with 12 tokens of text,
# and what torch allocated at most in GB (1e9 bytes).
MEASURED_GB = {276: 22.1, 540: 25.3, 1068: 31.6, 1596: 37.9}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DEEPSPEEDS_BUCKET = 500_000_000  # elements: its file leaves out `reduce_bucket_size`


def planned(preset: str = "zero3", ranks: int = 1, bucket: int | None = None, **options: Any) -> MemoryPlan:
    one: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    job = PlannedJob.from_options(PlanOptions(**one | options), full_length=True)
    shape = read_model(MODEL)
    engine = engine_settings(load_preset(preset), world_size=ranks, hidden_size=shape.hidden_size)
    return plan_engine_memory(shape, engine if bucket is None else replace(engine, reduce_bucket=bucket), job)


def test_peaks_by_number_of_image_tokens_are_within_4_percent_of_those_measured_on_an_a40() -> None:
    for tokens, measured in MEASURED_GB.items():
        row: dict[str, Any] = {"max_seq_length": tokens, "image_tokens": tokens - 12}
        program: dict[str, Any] = {"program": "trainer", "loss": "full", "lora_r": 16, "lora_dropout": 0.05}
        plan = planned(bucket=DEEPSPEEDS_BUCKET, lora_target_modules=ATTENTION, **row, **program)
        assert plan.peak.allocated_bytes / 1e9 == pytest.approx(measured, rel=0.04)


def test_a_frozen_encoder_saves_nothing_and_a_trained_one_as_much_as_its_formulas_say() -> None:
    text, images = planned(lora_r=16), planned(lora_r=16, image_tokens=500)
    per_token = saved_per_token(read_model(MODEL), autocast=False, lora_r=16, recomputes=False)
    assert images.peak.activation_bytes - text.peak.activation_bytes == 500 * per_token
    frozen: dict[str, Any] = {"lora_r": 16, "freeze_vision_tower": True}
    assert planned(image_tokens=500, **frozen).peak == planned(**frozen).peak


def test_a_full_fine_tune_trains_the_encoder_of_images_or_holds_it_frozen_in_bf16() -> None:
    shape = read_model(MODEL)
    whole, part = job_weights(shape), job_weights(shape, frozen_tower=True)
    assert (whole.num_trained, whole.trains_tower) == (shape.num_params, True)
    assert (part.num_trained, part.trains_tower) == (shape.num_params - shape.num_tower_params, False)
    assert part.num_frozen == shape.num_tower_params
    trained, frozen = (planned("single", freeze_vision_tower=frozen).states for frozen in (False, True))
    assert trained.total_bytes - frozen.total_bytes == (16 - 2) * shape.num_tower_params
    assert part.adapters is None  # frozen weights alone are no LoRA


def test_adapters_of_named_layers_leave_the_encoder_frozen_where_it_has_other_names() -> None:
    shape = read_model(MODEL)
    assert job_weights(shape, 8).trains_tower
    assert not job_weights(shape, 8, lora_target_modules=ATTENTION).trains_tower
    assert not job_weights(shape, 8, frozen_tower=True).trains_tower


def test_a_recommendation_plans_images_too_and_names_a_script_that_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["recommend", MODEL, "--gpu", "h100", "--num-processes", "2", "--preset", "ddp", "--lora-r", "16"]
    _, text, _ = run_command(command, capsys)
    assert "text only: `--image-tokens` plans images" in text
    _, images, _ = run_command([*command, "--image-tokens", "800"], capsys)
    assert "(800 of images, their encoder trained)" in images
    assert "run it, in a script around a trainer that reads images:\n  toolkit train --preset ddp" in images
    assert " --script sft.py -- " in images
    assert "toolkit compare --preset" not in images


def test_the_plan_says_what_is_trained_and_that_images_need_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", MODEL, "--gpu", "h100", "--num-processes", "1", "--preset", "zero2", "--lora-r", "16"]
    said = {}
    for more in ((), ("--image-tokens", "800"), ("--image-tokens", "800", "--freeze-vision-tower")):
        code, said[more], _ = run_command([*command, *more], capsys)
        assert code == 0
    text, trained, frozen = said.values()
    assert "text only: `--image-tokens` plans images" in text
    assert "800 of images, their encoder trained" in trained
    assert "800 of images, their encoder frozen" in frozen
    command[1] = "meta-llama/Llama-3.2-11B-Vision-Instruct"
    assert "text only: its images are read by cross-attention" in run_command(command, capsys)[1]

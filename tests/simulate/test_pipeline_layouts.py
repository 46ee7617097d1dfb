"""Layouts of data, tensor and pipeline parallelism, and `toolkit recommend` where no preset fits."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from command_line import run_command
from launching import LLAMA_8B_CONFIG

from toolkit.plan.candidates import RecommendRequest
from toolkit.plan.options import RecommendOptions
from toolkit.plan.recommend import recommend_request
from toolkit.simulate.pipeline_layouts import best_pipeline_layout, pipeline_layouts, trained_pipeline

# One size of GPU on which the presets are too close to call, with host memory for no offload.
NO_PRESET = ["recommend", str(LLAMA_8B_CONFIG), "--num-processes", "16", "--gpu", "h100", "--max-seq-length", "2048"]
NO_PRESET += ["--gpu-memory-gib", "13", "--host-memory-gib", "60"]


def request(**options: Any) -> RecommendRequest:
    values: dict[str, Any] = {"num_processes": 16, "gpu": "h100", "max_seq_length": 2048, "global_batch_size": 64}
    return recommend_request(str(LLAMA_8B_CONFIG), RecommendOptions(**{**values, **options}))


def test_every_layout_uses_all_gpus_and_trains_the_whole_batch() -> None:
    layouts = list(pipeline_layouts(request()))
    assert {layout.degrees["pp"] for layout in layouts} == {2, 4, 8, 16}
    assert {layout.degrees["tp"] for layout in layouts} == {1, 2, 4, 8}
    for layout in layouts:
        assert math.prod(layout.degrees.values()) == 16
        rows = layout.run.size.micro_batches * layout.staged.job.per_device_train_batch_size
        assert rows * layout.degrees["dp"] == 64
        assert layout.run.size.micro_batches >= layout.degrees["pp"]


def test_the_best_layout_is_the_fastest_that_fits() -> None:
    best = best_pipeline_layout(request())
    assert best is not None
    assert best.step_seconds() == min(layout.step_seconds() for layout in pipeline_layouts(request()) if layout.fits)
    low, high = best.step_seconds(0), best.step_seconds(1)
    assert low < best.step_seconds() < high
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
    assert preset["why_not"].startswith("does not fit: ")
    text = run_command(NO_PRESET, capsys)[1]
    assert "Preset pipeline_1f1b, which has neither tensor parallelism nor" in text
    assert "dp 1 x tp 8 x pp 2 (data x tensor x pipeline parallelism)" in text
    assert "For a preset: `--num-processes 32` fits." in text


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

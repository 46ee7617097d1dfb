"""The options of a run: its default number of processes, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import LLAMA_8B_CONFIG

from toolkit.cli.plan import RehearseOptions
from toolkit.errors import ToolkitError
from toolkit.launch.options import TrainOptions
from toolkit.plan.options import PlanOptions, RecommendOptions
from toolkit.plan.planner import plan_request
from toolkit.plan.recommend import recommend_request
from toolkit.presets import load_preset


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="this node has GPUs of its own")
@pytest.mark.parametrize(
    ("gpus", "preset", "cpu", "processes"),
    [(8, "zero3", None, 8), (1, "zero3", None, 1), (8, "single", None, 1), (0, "zero3", None, 2), (8, "ddp", True, 2)],
)
def test_a_run_uses_all_visible_gpus_or_two_processes_on_a_cpu_and_a_plan_is_for_them(
    gpus: int, preset: str, cpu: bool | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {index}: NVIDIA H100'\n" for index in range(gpus)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert TrainOptions(preset=preset, cpu=cpu).world_size(load_preset(preset)) == processes
    if gpus:
        plan = plan_request(str(LLAMA_8B_CONFIG), PlanOptions(gpu="h100"))
        recommendation = recommend_request(str(LLAMA_8B_CONFIG), RecommendOptions(gpu="h100"))
        assert (list(plan.world_sizes), recommendation.world_size) == ([gpus], gpus)
        assert RehearseOptions(preset="ddp").world_size == gpus


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("timeout_minutes", 0.0, "--timeout-minutes is 0, expected more than 0"),
        ("timeout_minutes", float("nan"), "--timeout-minutes is nan, expected more than 0"),
        ("timeout_minutes", float("inf"), "--timeout-minutes is inf, expected 527,040 or less"),
        ("hang_timeout_minutes", float("nan"), "--hang-timeout-minutes is nan, expected 0 or more"),
        ("stop_minutes", 1e300, "--stop-minutes is 1e+300, expected 527,040 or less"),
        ("max_restarts", 10**20, f"--max-restarts is {10**20}, expected 1,000 or less"),
    ],
)
def test_a_limit_beyond_any_run_is_refused(name: str, value: float, message: str) -> None:
    limit: dict[str, Any] = {name: value}
    with pytest.raises(ToolkitError) as caught:
        TrainOptions(preset="ddp", num_processes=2, **limit)
    assert caught.value.message == message

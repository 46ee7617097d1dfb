"""Default number of processes of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import LLAMA_8B_CONFIG

from toolkit.cli.rehearse import RehearseOptions
from toolkit.launch.options import TrainOptions
from toolkit.plan.options import PlanOptions, RecommendOptions
from toolkit.plan.planner import plan_request
from toolkit.plan.recommend import recommend_request
from toolkit.presets import load_preset


@pytest.fixture
def visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """An nvidia-smi that lists so many GPUs; a node that has real ones is left alone."""
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("this node has GPUs of its own")

    def list_gpus(count: int) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {index}: NVIDIA H100'\n" for index in range(count)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return list_gpus


@pytest.mark.parametrize(
    ("gpus", "preset", "processes"), [(8, "zero3", 8), (1, "zero3", 1), (8, "single", 1), (0, "zero3", 2)]
)
def test_a_run_uses_all_visible_gpus_or_two_processes_on_a_cpu(
    gpus: int, preset: str, processes: int, visible: Callable[[int], None]
) -> None:
    visible(gpus)
    assert TrainOptions(preset=preset).world_size(load_preset(preset)) == processes


def test_a_run_on_the_cpu_of_a_node_with_gpus_has_two_processes(visible: Callable[[int], None]) -> None:
    visible(8)
    assert TrainOptions(preset="ddp", cpu=True).world_size(load_preset("ddp")) == 2


def test_a_plan_is_for_all_visible_gpus(visible: Callable[[int], None]) -> None:
    visible(4)
    plan = plan_request(str(LLAMA_8B_CONFIG), PlanOptions(gpu="h100"))
    recommendation = recommend_request(str(LLAMA_8B_CONFIG), RecommendOptions(gpu="h100"))
    rehearsal = RehearseOptions(preset="ddp")
    assert (list(plan.world_sizes), recommendation.world_size, rehearsal.world_size) == ([4], 4, 4)

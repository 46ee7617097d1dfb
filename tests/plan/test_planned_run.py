"""The plan of a run: from its training arguments, for the GPUs of this node, in run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.hardware.gpu_table import find_gpu
from toolkit.job.job import Job
from toolkit.plan.planned_job import PlannedJob
from toolkit.plan.planner import plan_line, plan_run, plan_run_here
from toolkit.presets import load_preset

LLAMA_8B = Path(__file__).parents[1] / "fixtures" / "llama-8b"
H100 = "NVIDIA H100 80GB HBM3, 81559, 570.86.15, 700.00, 1980, 2619"


def arguments(**more: Any) -> Job:
    return Job(model_name_or_path=str(LLAMA_8B), per_device_train_batch_size=1, max_seq_length=2048, **more)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An nvidia-smi that prints the given lines."""

    def listed(*lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return listed


def test_training_arguments_become_the_planners_job() -> None:
    job = PlannedJob.of(
        Job.from_values(
            {"gradient_checkpointing": "true", "lora_r": "8", "optim": "adamw_torch", "use_liger_kernel": "true"}
        )
    )
    assert job.per_device_train_batch_size == 8  # transformers' default
    assert (job.activation_checkpointing, job.lora_r, job.optim, job.loss) == (True, 8, "adamw_torch", "fused")


def test_a_run_that_cannot_be_planned_says_why(gpus: Any) -> None:
    with pytest.raises(ToolkitError, match="--optim galore_adamw is not planned"):
        PlannedJob.of(Job.from_values({"optim": "galore_adamw"}))
    said: list[str] = []
    zero2 = load_preset("zero2")
    gpus(H100)
    assert plan_run_here(zero2, arguments(optim="galore_adamw"), world_size=2, say=said.append) is None
    gpus(H100, H100.replace("H100", "A100"))
    assert plan_run_here(zero2, arguments(), world_size=2, say=said.append) is None
    gpus()
    assert plan_run_here(zero2, arguments(), world_size=2, say=said.append) is None
    assert said == [
        "not planned: --optim galore_adamw is not planned",
        "not planned: the GPUs of this node are NVIDIA A100 80GB HBM3, NVIDIA H100 80GB HBM3",
        "not planned: the GPUs of this node are not known to nvidia-smi",
    ]


def test_a_run_that_does_not_fit_says_so_before_it_starts(gpus: Any) -> None:
    said: list[str] = []
    gpus(H100, H100)
    row = plan_run_here(load_preset("ddp"), arguments(), world_size=2, say=said.append)
    assert row is not None
    assert row["verdict"] == "does_not_fit"
    assert said[0].endswith("): does not fit")
    assert "`toolkit recommend`" in said[1]


def test_the_plan_of_a_run_is_that_of_the_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from toolkit import cli

    plan = plan_run(load_preset("fsdp2"), arguments(), world_size=8, gpu=find_gpu("h100"))
    words = ["--num-processes", "8", "--gpu", "h100", "--preset", "fsdp2", "--max-seq-length", "2048", "--json"]
    words += ["--per-device-train-batch-size", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(LLAMA_8B), *words])
    assert ended.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["plans"] == [plan.as_row()]
    assert plan_line(plan).startswith("planned peak ")

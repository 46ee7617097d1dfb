"""`--measured RUN`: plans that are calibrated by a run, and runs that are no measure."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run_command
from launching import LLAMA_8B_CONFIG

from toolkit.hardware.gpus import read_gpu_row
from toolkit.record.folder import RunFolder
from toolkit.record.measurements import measure, read_steps

Capsys = pytest.CaptureFixture[str]
H100 = "NVIDIA H100 80GB HBM3"
GIB = 2**30


@pytest.fixture
def gpu_run(preset_runs: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a recorded run of `ddp` (2 ranks, 2 x 64 tokens each), with the facts of a GPU."""

    def copy(*, gpu: str = H100, seconds: float = 0.5, **facts: Any) -> Path:
        folder = RunFolder(tmp_path / "run")
        shutil.copytree(preset_runs["ddp"], folder.path, dirs_exist_ok=True)
        for rank in range(2):
            rows = [json.loads(line) for line in folder.rank_rows(rank).read_text().splitlines()]
            peaks = {"peak_allocated_bytes": GIB, "peak_reserved_bytes": 2 * GIB, "driver_bytes": 3 * GIB}
            lines = (json.dumps(row | peaks | {"seconds": seconds}) + "\n" for row in rows)
            folder.rank_rows(rank).write_text("".join(lines))
        attested = json.loads(folder.attestation_json.read_text())
        for reading in attested["ranks"]:
            reading |= {"device": "cuda:0", "compute_dtype": "bfloat16"}
        folder.attestation_json.write_text(json.dumps(attested))
        node = {"gpus": [read_gpu_row([gpu, "81559", "570.0"])] * 2}
        measured = measure(read_steps(folder), untimed_steps=2).summary()
        folder.update_run(**{"hardware": node, "measured": measured} | facts)
        return folder.path

    return copy


def words(model: Path, run: Path, *more: str, command: str = "plan") -> list[str]:
    return [command, str(model), "--num-processes", "2", "--measured", str(run), *more]


@pytest.mark.launch
def test_a_run_on_a_gpu_multiplies_the_speed_of_every_plan(
    gpu_run: Callable[..., Path], tiny_model: Path, capsys: Capsys
) -> None:
    run, presets = gpu_run(), ["--preset", "ddp", "--preset", "zero3"]
    found = json_of(words(tiny_model, run, *presets), capsys)
    plain = json_of(["plan", str(tiny_model), "--gpu", "h100", "--num-processes", "2", *presets], capsys)
    assert found["measured"]["ratio"] == pytest.approx(0.5 / found["measured"]["step_seconds_estimate"])
    for calibrated, before in zip(found["plans"], plain["plans"], strict=True):
        assert calibrated["gpu"] == "h100-sxm"  # no --gpu: the run's
        assert calibrated["calibrated_by"] == str(run)
        assert before["calibrated_by"] is None
        expected = before["step_seconds_estimate"] * found["measured"]["ratio"]
        assert calibrated["step_seconds_estimate"] == pytest.approx(expected)


@pytest.mark.launch
def test_the_runs_own_job_is_planned_to_take_what_it_took(
    gpu_run: Callable[..., Path], tiny_model: Path, capsys: Capsys
) -> None:
    own = ["--preset", "ddp", "--per-device-train-batch-size", "2", "--max-seq-length", "64"]
    found = json_of(words(tiny_model, gpu_run(), *own), capsys)
    assert found["measured"]["max_seq_length"] == 64  # from its tokens
    assert found["plans"][0]["step_seconds_estimate"] == pytest.approx(0.5)
    assert found["measured"]["peak_reserved_bytes"] == 2 * GIB


@pytest.mark.launch
def test_people_read_which_run_calibrates_a_recommendation_and_that_it_is_unlikely(
    gpu_run: Callable[..., Path], tiny_model: Path, capsys: Capsys
) -> None:
    run = gpu_run()
    code, out, _ = run_command(words(tiny_model, run, command="recommend"), capsys)
    assert code == 0
    assert f"calibrated by {run} (ddp, 2 GPUs, 2 x 64 tokens per GPU): 500 ms per step measured" in out
    assert "outside of the planned range" in out  # a tiny model does not take half a second
    assert "1.00 GiB allocated (planned " in out


@pytest.mark.launch
def test_a_run_on_a_cpu_is_no_measure_of_a_gpu(preset_runs: dict[str, Path], tiny_model: Path, capsys: Capsys) -> None:
    code, _, err = run_command(words(tiny_model, preset_runs["ddp"], "--gpu", "h100"), capsys)
    assert code == 2
    assert len(err.splitlines()) == 2
    assert "trained on a CPU, whose speed says nothing of a GPU" in err


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "failed": ({"status": "out_of_memory"}, [], "ended as out_of_memory"),
    "untimed": ({"measured": {"timed_steps": 0}}, [], "has no timed steps"),
    "other GPU": ({}, ["--gpu", "a100-80gb"], "trained on h100-sxm, and the plan is of a100-80gb"),
    "adapters": ({}, ["--lora-r", "1"], "trained 336,192 parameters, and the plan trains"),
    "method": ({}, ["--method", "dpo"], "trained sft, and the plan is of dpo"),
    "rehearsal": ({"rehearsal": {}}, [], "is a rehearsal"),
    "script": ({"preset": None}, [], "does not record its preset"),
}


@pytest.mark.launch
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_is_no_measure_of_the_plan_is_refused_in_two_lines(
    case: str, gpu_run: Callable[..., Path], tiny_model: Path, capsys: Capsys
) -> None:
    facts, more, said = REFUSED[case]
    code, _, err = run_command(words(tiny_model, gpu_run(**facts), *more), capsys)
    assert code == 2
    assert len(err.splitlines()) == 2
    assert said in err


@pytest.mark.launch
def test_a_run_of_another_model_is_refused(gpu_run: Callable[..., Path], capsys: Capsys) -> None:
    code, _, err = run_command(words(LLAMA_8B_CONFIG, gpu_run()), capsys)
    assert code == 2
    assert "336,192 parameters, and the planned one has 8,030,261,248" in err

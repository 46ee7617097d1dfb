"""What only CUDA reaches in a rank, on a CPU: fake CUDA tensors, a stand-in for torch's device functions, and NVML's
readings in the types that nvidia-ml-py returns. On a GPU the tests marked `gpu` and `make gpu-check` run it for real.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import PYTHON_PATH, read, run_captured, toolkit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.file_baton import FileBaton
from trl_jobs import trl_words

from toolkit.hardware.shared_gpu import WAYS
from toolkit.job.job import Job
from toolkit.observe import checkpoint_saver
from toolkit.observe.checkpoint_saver import BackgroundSaver
from toolkit.observe.failure_report import report_failure, status_of
from toolkit.observe.foreign_script import make_cpu_group
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.parts import ObserverParts
from toolkit.observe.profiler import MemorySnapshot
from toolkit.observe.progress import Progress
from toolkit.observe.rank_process import prepare_environment
from toolkit.observe.timer import StepTimer
from toolkit.record.folder import RunFolder
from toolkit.rehearse.rehearsal import _measured_lines
from toolkit.rehearse.stand_ins import RehearsedTimer
from toolkit.train.model.chunked_loss import sum_with_product
from toolkit.train.model.loading import choose_attention

UUID = "5c0e3b1a-0000-0000-0000-000000000000"
MIB = 2**20


class Event:
    """A CUDA event that is done once its time is asked for; each is recorded 0.25 s after the one before."""

    clock_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.done = False

    def record(self) -> None:
        Event.clock_ms += 250.0
        self.at = Event.clock_ms

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One GPU, for torch and for NVML; its sizes can be changed."""
    sizes: dict[str, Any] = {"memory_allocated": 10 * MIB, "max_memory_allocated": 30 * MIB}
    sizes |= {"max_memory_reserved": 40 * MIB, "memory_stats": {"num_alloc_retries": 2}, "is_available": True}
    sizes |= {"get_device_capability": (9, 0), "get_device_properties": SimpleNamespace(uuid=UUID), "resets": 0}
    for name in sizes:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: sizes[name], raising=False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: sizes.update(resets=sizes["resets"] + 1))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=900 * MIB)
    answers = {
        "ComputeRunningProcesses": [process],
        "TotalEnergyConsumption": 5_000,
        "CurrentClocksThrottleReasons": 0x24,
    }
    nvml: Any = SimpleNamespace(NVMLError=RuntimeError, nvmlInit=lambda: None)
    nvml.nvmlDeviceGetHandleByUUID = {f"GPU-{UUID}": "handle"}.__getitem__
    for name, answer in answers.items():
        setattr(nvml, f"nvmlDeviceGet{name}", lambda _, answer=answer: answer)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return sizes


def run_of(folder: Path) -> ObservedRun:
    made = RunFolder(folder)
    made.make()
    return ObservedRun(folder=made, progress=Progress(), rank=0, world_size=1)


def test_a_step_is_timed_by_events_and_its_row_waits_until_the_gpu_has_done_it(
    cuda: dict[str, Any], tmp_path: Path
) -> None:
    timer = StepTimer(run_of(tmp_path), ObserverParts(), device=torch.device("cuda"))
    timer.begin_training(0)
    assert timer.progress.memory_by_phase is not None
    assert timer.progress.memory_by_phase.model_dump()["bytes_of"] == "allocated"
    assert timer.progress.memory_by_phase.load == 10 * MIB
    memory = timer.read_memory()
    peaks = {"peak_allocated_bytes": 30 * MIB, "peak_reserved_bytes": 40 * MIB, "allocator_retries": 2}
    assert memory.items() >= (peaks | {"driver_bytes": 900 * MIB}).items()
    assert memory["gpu_reading"].energy_joules == 5.0
    assert memory["gpu_reading"].throttle_reasons == ["software power cap", "software thermal slowdown"]
    assert timer.read_memory()["gpu_reading"] is None  # once per second
    timer.step.end, timer.step.memory = timer._now(), memory
    timer.unwritten.append((1, timer.step))
    timer.flush(wait=False)
    assert not timer.path.exists()
    timer.step.end.synchronize()
    timer.flush(wait=False)
    assert '"seconds": 0.25,' in timer.path.read_text()
    assert cuda["resets"] == 0  # peaks are of the whole process


@pytest.mark.parametrize(("rank", "ranks", "caps"), [("3", "4", [0.25]), ("3", "1", []), (None, "4", [])])
def test_a_rank_that_shares_a_gpu_may_allocate_its_part_of_it(
    rank: str | None, ranks: str, caps: list[float], cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    capped: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", capped.append)
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)
    given = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "4" if rank else None}
    given |= {"TOOLKIT_RANKS_PER_GPU": ranks, "CUDA_VISIBLE_DEVICES": "7", "PATH": os.environ["PATH"]}
    with monkeypatch.context() as variables:
        for name, text in (os.environ | given).items():
            variables.delenv(name, raising=False) if text is None else variables.setenv(name, text)
        prepare_environment()
        placed = os.environ.get("LOCAL_RANK"), os.environ["CUDA_VISIBLE_DEVICES"]
        for name in ("NCCL_HOSTID", *WAYS["hosts"]):
            os.environ.pop(name, None)
    assert (capped, placed) == (caps, ("0" if caps else rank, "7"))
    assert cuda["is_available"]


def test_a_rehearsal_reads_the_allocators_peak_of_each_phase(cuda: dict[str, Any], tmp_path: Path) -> None:
    timer = RehearsedTimer(run_of(tmp_path), ObserverParts(), device=torch.device("cuda"))
    timer._enter("forward")
    cuda |= {"max_memory_allocated": 50 * MIB, "max_memory_reserved": 60 * MIB}
    peaks = timer.read_peaks()
    assert [peaks[phase]["peak_allocated_bytes"] for phase in ("load", "forward")] == [30 * MIB, 50 * MIB]
    assert (cuda["resets"], timer.read_memory()["peak_reserved_bytes"]) == (1, 60 * MIB)
    lines = list(_measured_lines({"steps": 3, "phase_peaks": peaks, "compute_step_seconds": 0.5}, "cuda"))
    assert lines[1].split() == ["load", "30.0", "MiB", "allocated,", "40.0", "MiB", "reserved"]
    assert lines[-1] == "compute of a step, without communication: 500 ms"


@pytest.mark.usefixtures("cuda")
def test_a_gpu_without_memory_left_is_reported_with_the_allocators_peak(tmp_path: Path) -> None:
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert status_of(error) == "out_of_memory"
    progress = Progress()
    progress.output_dir = tmp_path
    report_failure(error, progress)
    failure = read(tmp_path / "failure.json")
    assert (failure["kind"], failure["peak_bytes"]) == ("out_of_memory", 30 * MIB)


def test_allocations_are_recorded_from_the_begin_of_training_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    snapshot = MemorySnapshot(run_of(tmp_path))
    snapshot.on_train_begin()
    snapshot.on_train_end()
    path = tmp_path / "profile" / "memory_rank0.pickle"
    assert calls == [{"max_entries": 100_000}, str(path), {"enabled": None}]
    assert path.parent.is_dir()


class Operators(TorchDispatchMode):
    """Notes the operators that are called, and computes none of those that write their output."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called += [] if func.namespace == "prim" else [str(func)]
        return kwargs["out"] if "out" in kwargs else func(*args, **kwargs)


def test_a_bf16_product_is_added_in_fp32_on_a_gpu_without_a_bf16_copy() -> None:
    with FakeTensorMode(), Operators() as operators:
        value = torch.zeros(4, 8, device="cuda")
        left, right = (torch.ones(*size, device="cuda", dtype=torch.bfloat16) for size in ((4, 2), (2, 8)))
        operators.called.clear()
        assert sum_with_product(value, left, right) is value
    assert operators.called == ["aten.addmm.dtype_out"]


def test_packed_rows_get_torchs_flash_attention_where_the_gpu_has_it(cuda: dict[str, Any], tiny_model: Path) -> None:
    job, asked = Job(model_name_or_path=str(tiny_model), packing=True), {"compute_dtype": torch.bfloat16}
    assert choose_attention(job, **asked, on_cpu=False) == "sdpa_varlen"
    cuda["get_device_capability"] = (7, 5)
    assert choose_attention(job, **asked, on_cpu=False) == choose_attention(job, **asked, on_cpu=True)


def test_a_checkpoint_of_a_gpu_is_copied_through_pinned_memory(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_saver, "DefaultStager", lambda options: options)
    for on_gpu in (True, False):
        cuda["is_available"] = on_gpu
        options: Any = BackgroundSaver(torch.nn.Linear(1, 1), timeout=timedelta(seconds=1)).stager
        assert (options.use_pinned_memory, options.use_non_blocking_copy) == (on_gpu, on_gpu)


@pytest.mark.usefixtures("cuda")
def test_ranks_with_gpus_make_their_own_group() -> None:
    from accelerate import PartialState

    before = PartialState.__init__
    make_cpu_group(2)
    assert PartialState.__init__ is before


# -- on a GPU


@pytest.mark.gpu
def test_a_run_on_a_gpu_saves_profiles_and_records_allocations(tmp_path: Path, tiny_job: list[str]) -> None:
    job = [*tiny_job, "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3"]
    job += ["--profile_steps", "4:5", "--memory_snapshot", "true", "--output_dir", str(tmp_path / "run")]
    ended = toolkit("train", "--preset", "single", "--num-processes", "1", "--no-cpu", "--", *job)
    assert ended.returncode == 0, ended.stderr[-3000:]
    run, folder = read(tmp_path / "run" / "run.json"), RunFolder(tmp_path / "run")
    assert (folder.path / "profile" / "memory_rank0.pickle").stat().st_size > 0
    assert all(step["compute_seconds"] > 0 for step in run["profile"]["steps"])
    verified = toolkit("checkpoint", "verify", str(folder.path))  # the logits that the saving rank recorded
    assert verified.returncode == 0, verified.stderr[-3000:]


@pytest.mark.gpu
def test_scripts_compute_on_the_gpu(tmp_path: Path, tiny_model: Path) -> None:
    code = "from toolkit import load_preset\n"
    code += "print(load_preset('single').training_arguments(output_dir='out', report_to='none').device.type)\n"
    ended = run_captured([sys.executable, "-c", code], os.environ | {"PYTHONPATH": PYTHON_PATH}, cwd=tmp_path)
    assert ended.stdout.split()[-1:] == ["cuda"], ended.stderr[-3000:]
    words = ["--preset", "zero2", "--num-processes", "4", "--module", "trl.scripts.sft", "--no-cpu", "--json"]
    ended = toolkit("rehearse", *words, "--", *trl_words("sft", tiny_model, tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout)["peak_allocated_bytes"] > 0

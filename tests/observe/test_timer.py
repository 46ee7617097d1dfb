"""The step timer: the time that a rank works on its own, and the end of a run that diverged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.observe.batches import BatchFacts
from toolkit.observe.failure_report import Diverged
from toolkit.observe.observed_run import ObservedRun
from toolkit.observe.parts import ObserverParts
from toolkit.observe.progress import Progress
from toolkit.observe.timer import StepTimer, time_waits_in_forward
from toolkit.record.folder import RunFolder


class ClockedTimer(StepTimer):
    """A step timer whose clock is set by the test."""

    now = 0.0

    def _now(self) -> float:
        return self.now

    def at(self, seconds: float) -> ClockedTimer:
        self.now = seconds
        return self


@pytest.fixture
def timer(tmp_path: Path) -> ClockedTimer:
    folder = RunFolder(tmp_path)
    folder.make()
    run = ObservedRun(folder=folder, progress=Progress(), rank=0, world_size=1)
    timer = ClockedTimer(run, ObserverParts(), device=torch.device("cpu"))
    timer.restart_clock()
    return timer


def ended(timer: ClockedTimer, seconds: float) -> Any:
    timer.at(seconds).step.end, timer.step.memory = seconds, timer.read_memory()
    return timer._row(1, timer.step).own_seconds


def test_a_log_of_one_step_has_only_what_the_line_of_the_step_lacks(
    timer: ClockedTimer, capsys: pytest.CaptureFixture[str]
) -> None:
    timer.step_lines.every_step = True
    timer.step_lines.start(0)
    for logs in ({"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "epoch": 1.0}, {"loss": 2.0, "entropy": 0.5}):
        timer.print_log(1, logs)
    timer.step_lines.end()
    assert capsys.readouterr().out == "log at step 1, all ranks: entropy 0.5\n"


def test_waits_and_backward_are_no_work_of_the_rank_itself(timer: ClockedTimer) -> None:
    """1 s of loading, 2 s of forward and 0.5 s in the optimizer. A wait within a wait changes nothing."""
    assert ended(timer, 0.5) is None  # unknown where backward was not reported
    timer.at(1.0).begin_wait()  # tokens are counted over all ranks
    timer.at(2.0).begin_wait()
    timer.at(3.0).end_wait()
    timer.at(3.5).end_wait()
    timer.at(5.0).enter_backward()
    timer.at(6.0).begin_wait()  # the second accumulation step's forward, under DDP
    timer.at(7.0).end_wait()
    timer.at(8.0).enter_backward()
    timer.at(9.0).before_optimizer_step()
    assert ended(timer, 9.5) == pytest.approx(3.5)


def test_ddp_waits_from_its_own_forward_until_that_of_the_model() -> None:
    calls: list[str] = []
    waits = {"begin_wait": lambda: calls.append("wait"), "end_wait": lambda: calls.append("end")}
    timer: Any = SimpleNamespace(**waits, parts=ObserverParts())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model.module.register_forward_pre_hook(lambda *_: calls.append("model"))
        time_waits_in_forward(model, timer)
        model(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert calls == ["wait", "model", "end"]


def test_a_loss_that_is_not_finite_ends_the_run_with_its_rows(timer: ClockedTimer) -> None:
    timer.add_batch(BatchFacts(tokens=4, non_padding_tokens=4, supervised_tokens=4, sha256="0" * 64, rows=(7, 8)))
    timer.add_loss(torch.tensor(float("nan")))
    with pytest.raises(Diverged, match="the loss is nan at step 1") as raised:
        timer.at(1.0).end_step(1)
    assert raised.value.rows == (7, 8)

"""The step timer: the time that a rank works on its own, and the rows that a resumed run keeps."""

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
from toolkit.observe.progress import Progress
from toolkit.observe.timer import StepTimer, time_waits_in_forward
from toolkit.record.measurements import drop_rows_after, read_rows


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
    timer = ClockedTimer(tmp_path / "rank0.jsonl", rank=0, device=torch.device("cpu"), progress=Progress())
    timer.restart_clock()
    return timer


def ended(timer: ClockedTimer, seconds: float) -> Any:
    timer.at(seconds).step.end = seconds
    return timer._own_seconds(timer.step)


def test_waits_and_backward_are_no_work_of_the_rank_itself(timer: ClockedTimer) -> None:
    """1 s of loading, 2 s of forward and 0.5 s in the optimizer."""
    timer.at(1.0).begin_wait()  # tokens are counted over all ranks
    timer.at(3.0).end_wait()
    timer.at(5.0).enter_backward()
    timer.at(6.0).begin_wait()  # the second accumulation step's forward, under DDP
    timer.at(7.0).end_wait()
    timer.at(8.0).enter_backward()
    timer.at(9.0).on_pre_optimizer_step()
    assert ended(timer, 9.5) == pytest.approx(3.5)


def test_a_wait_within_a_wait_changes_nothing(timer: ClockedTimer) -> None:
    timer.at(1.0).begin_wait()
    timer.at(2.0).begin_wait()
    timer.at(3.0).end_wait()
    timer.at(4.0).end_wait()
    timer.at(5.0).enter_backward()
    timer.at(9.0).on_pre_optimizer_step()
    assert ended(timer, 9.0) == pytest.approx(3.0)


def test_own_time_is_unknown_where_backward_was_not_reported(timer: ClockedTimer) -> None:
    assert ended(timer, 9.0) is None


def test_ddp_waits_from_its_own_forward_until_that_of_the_model() -> None:
    calls: list[str] = []
    waits = {"begin_wait": lambda: calls.append("wait"), "end_wait": lambda: calls.append("end")}
    timer: Any = SimpleNamespace(**waits, compiles=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model.module.register_forward_pre_hook(lambda *_: calls.append("model"))
        time_waits_in_forward(model, timer)
        model(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert calls == ["wait", "model", "end"]


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    recorded = (
        (Path(__file__).parents[1] / "fixtures" / "recorded_demo_ddp" / "ranks" / "rank0.jsonl")
        .read_text()
        .splitlines(keepends=True)
    )
    path.write_text("".join(recorded[:3]))
    drop_rows_after(path, 2)
    assert [row.step for row in read_rows(path)] == [1, 2]


def test_a_loss_that_is_not_finite_ends_the_run_with_its_rows(timer: ClockedTimer) -> None:
    timer.add_batch(BatchFacts(tokens=4, non_padding_tokens=4, supervised_tokens=4, sha256="0" * 64, rows=(7, 8)))
    timer.add_loss(torch.tensor(float("nan")))
    state = SimpleNamespace(global_step=1, max_steps=2)
    with pytest.raises(Diverged, match="the loss is nan at step 1") as raised:
        timer.at(1.0).on_step_end(SimpleNamespace(fp16=False), state, SimpleNamespace(should_save=False))
    assert raised.value.rows == (7, 8)

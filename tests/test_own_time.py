"""The time of a step that a rank works by itself: waits for other ranks, and backward, are no part of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from toolkit.train.failure import Progress
from toolkit.train.meter import Meter, watch_waits


class Clocked(Meter):
    """A meter that is told the time."""

    now = 0.0

    def _now(self) -> float:
        return self.now

    def at(self, seconds: float) -> Clocked:
        self.now = seconds
        return self


@pytest.fixture
def meter(tmp_path: Path) -> Clocked:
    meter = Clocked(tmp_path / "rank0.jsonl", rank=0, device=torch.device("cpu"), progress=Progress())
    meter.restart_clock()
    return meter


def ended(meter: Clocked, seconds: float) -> Any:
    meter.at(seconds).step.end = seconds
    return meter._own_seconds(meter.step)


def test_a_step_of_two_micro_steps_has_three_turns_of_its_own(meter: Clocked) -> None:
    """1 s of loading, 2 s of forward and 0.5 s in the optimizer."""
    meter.at(1.0).wait()  # tokens are counted over all ranks
    meter.at(3.0).go_on()
    meter.at(5.0).enter_backward()
    meter.at(6.0).wait()  # the second micro-step's forward, under DDP
    meter.at(7.0).go_on()
    meter.at(8.0).enter_backward()
    meter.at(9.0).on_pre_optimizer_step()
    assert ended(meter, 9.5) == pytest.approx(3.5)


def test_waits_without_an_end_between_them_are_one(meter: Clocked) -> None:
    meter.at(1.0).wait()
    meter.at(2.0).wait()
    meter.at(3.0).go_on()
    meter.at(4.0).go_on()
    meter.at(5.0).enter_backward()
    meter.at(9.0).on_pre_optimizer_step()
    assert ended(meter, 9.0) == pytest.approx(3.0)


def test_a_step_that_never_told_of_its_backward_is_unknown(meter: Clocked) -> None:
    assert ended(meter, 9.0) is None


def test_ddp_waits_from_its_own_forward_to_the_models() -> None:
    calls: list[str] = []
    meter: Any = SimpleNamespace(wait=lambda: calls.append("wait"), go_on=lambda: calls.append("go on"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model.module.register_forward_pre_hook(lambda *_: calls.append("model"))
        watch_waits(model, meter)
        model(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert calls == ["wait", "model", "go on"]

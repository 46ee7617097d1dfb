"""Every optimizer of the installed transformers is planned with the states that it makes, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from toolkit.errors import ToolkitError
from toolkit.models.optimizers import MUON, OPTIMIZERS, UpdatedTensor, why_not_planned
from toolkit.models.read_model import read_model
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request

NAMES = [name.value for name in OptimizerNames]
BITSANDBYTES = [name for name, spec in OPTIMIZERS.items() if spec.class_name.startswith("bitsandbytes.")]
SHAPES = ((96, 80), (64,))  # 30 blocks of 256 elements, and fewer than are quantized


def planned_bytes(optim: str) -> int:
    options = PlanOptions(gpu="h200", num_processes=[1], preset=["single"], optim=optim, gradient_accumulation_steps=1)
    return make_plans(plan_request("Qwen/Qwen3-0.6B", options))[0].memory.states.optimizer_bytes


@pytest.mark.parametrize("optim", [*NAMES, "dion"])
def test_an_optimizer_is_planned_or_refused_with_a_reason(optim: str) -> None:
    if optim in OPTIMIZERS:
        assert why_not_planned(optim) is None
        return
    with pytest.raises(ToolkitError, match=f"--optim {optim} is not planned: "):
        planned_bytes(optim)


def test_no_planned_name_is_unknown_to_transformers() -> None:
    assert set(OPTIMIZERS) - {MUON} <= set(NAMES)


@pytest.mark.parametrize("optim", BITSANDBYTES)
def test_states_are_those_that_bitsandbytes_makes(optim: str) -> None:
    spec = OPTIMIZERS[optim]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    import bitsandbytes.optim

    make: Any = getattr(bitsandbytes.optim, spec.class_name.partition(".")[2])
    optimizer = make(parameters, lr=0.1, optim_bits=8 if "8bit" in optim else 32)
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    live = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in live}
    assert sum(storages.values()) == spec.state_bytes([UpdatedTensor(shape=shape) for shape in SHAPES])


@pytest.mark.parametrize("optim", [name for name in OPTIMIZERS if name.startswith("schedule_free")])
def test_states_are_those_that_schedulefree_makes(optim: str) -> None:
    library = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    spec = OPTIMIZERS[optim]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = getattr(library, spec.class_name.partition(".")[2])(parameters, lr=0.1)
    optimizer.train()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    live = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in live) == spec.state_bytes([UpdatedTensor(shape=shape) for shape in SHAPES])


def test_three_states_take_half_as_much_again_as_two() -> None:
    size = read_model("Qwen/Qwen3-0.6B").num_params
    assert planned_bytes("ademamix") == 3 * 4 * size
    assert planned_bytes("adamw_torch_fused") == 2 * 4 * size
    assert planned_bytes("rmsprop_bnb") == 4 * size

"""Activation checkpointing is detected from backward; flags decide only where backward shows nothing."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from toolkit.observe.verify.read_rank import ForwardDetector, _float8_modules, uses_activation_checkpointing


class Block(torch.nn.Module):
    def __init__(self, *, checkpointed: bool, flagged: bool) -> None:
        super().__init__()
        self.inner, self.checkpointed, self.gradient_checkpointing = torch.nn.Linear(2, 2), checkpointed, flagged

    def forward(self, values: torch.Tensor) -> Any:
        values = checkpoint(self.inner, values, use_reentrant=False) if self.checkpointed else self.inner(values)
        return values.sigmoid()


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_forward_in_backward_is_detected_whatever_the_flag(checkpointed: bool, flagged: bool) -> None:
    block, detector = Block(checkpointed=checkpointed, flagged=flagged), ForwardDetector()
    detector.start(block)
    block(torch.ones(1, 2, requires_grad=True)).sum().backward()
    detector.stop()
    assert detector.recomputes is checkpointed
    assert uses_activation_checkpointing(block, detector.recomputes) is checkpointed


def test_flags_decide_without_a_detector_or_without_trained_weights() -> None:
    block = Block(checkpointed=True, flagged=True)
    assert uses_activation_checkpointing(block, None)
    assert not uses_activation_checkpointing(block, False)
    block.requires_grad_(False)
    assert uses_activation_checkpointing(block, False)


@pytest.mark.parametrize(("autocast", "read"), [(True, "bfloat16"), (False, "float32")])
def test_the_compute_dtype_is_that_of_linear_layers_whatever_is_configured(autocast: bool, read: str) -> None:
    layer, detector = torch.nn.Linear(2, 2), ForwardDetector()
    detector.start(layer)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(torch.ones(1, 2))
    detector.stop()
    assert detector.compute_dtype("bfloat16") == read


def test_the_compute_dtype_is_the_configured_one_where_no_linear_layer_ran() -> None:
    assert ForwardDetector().compute_dtype("bfloat16") == "bfloat16"


def test_a_module_of_a_communication_hook_that_runs_in_the_backward_is_no_recomputation() -> None:
    block, of_hook, detector = Block(checkpointed=False, flagged=False), torch.nn.Identity(), ForwardDetector()
    detector.start(block)
    block.inner.weight.register_hook(of_hook)
    block(torch.ones(1, 2, requires_grad=True)).sum().backward()
    detector.stop()
    assert detector.recomputes is False


def test_layers_in_fp8_are_counted_also_as_fsdp2_makes_subclasses_of_them() -> None:
    Float8Linear = type("Float8Linear", (torch.nn.Linear,), {})  # noqa: N806
    sharded = type("FSDPFloat8Linear", (Float8Linear,), {})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Float8Linear(2, 2), sharded(2, 2))
    assert _float8_modules(model) == 2

"""Stand-ins for kernels save what the kernels' own `save_for_backward` has, and have a gradient for each input."""

from typing import Any

import torch
from live_bytes import saved_storages
from transformers.models.qwen3_5 import modeling_qwen3_5 as module

from toolkit.models.fake_tensors import STAND_INS, with_kernels

ROWS, LENGTH, HEADS, KEY_HEADS, WIDTH = 2, 128, 4, 2, 16


def saved_by(call: Any) -> tuple[Any, int]:
    """The output, and the bytes of the storages that are saved, each once."""
    with saved_storages() as storages:
        output = call()
    return output, sum(storages.values())


def test_the_gated_delta_rule_saves_what_flash_linear_attention_saves() -> None:
    """q and k normalised, their fp32 statistics, v, summed decays, beta and one 64-wide matrix per head and token."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    query, key = (torch.zeros(ROWS, LENGTH, KEY_HEADS, WIDTH, **options) for _ in range(2))
    value = torch.zeros(ROWS, LENGTH, HEADS, WIDTH, **options)
    decays = torch.zeros(ROWS, LENGTH, HEADS, requires_grad=True)
    beta = torch.zeros(ROWS, LENGTH, HEADS, **options)
    (output, _), held = saved_by(
        lambda: STAND_INS["torch_chunk_gated_delta_rule"](query, key, value, g=decays, beta=beta)
    )
    per_token = (
        2 * 2 * KEY_HEADS * WIDTH + 2 * 4 * KEY_HEADS + 2 * HEADS * WIDTH + 4 * HEADS + 2 * HEADS + 2 * 64 * HEADS
    )
    assert held == ROWS * LENGTH * per_token
    output.sum().backward()
    assert all(each.grad.shape == each.shape for each in (query, key, value, decays, beta))


def test_mamba_2_saves_its_projected_input_the_scans_output_and_a_statistic() -> None:
    groups, state = 1, 8
    width = HEADS * WIDTH
    projected = torch.zeros(ROWS, LENGTH, 2 * width + 2 * groups * state + HEADS, requires_grad=True)
    weights = [torch.zeros(width + 2 * groups * state, 4), None, torch.zeros(HEADS), torch.zeros(HEADS)]
    out_projection = torch.zeros(32, width, requires_grad=True)
    output, held = saved_by(
        lambda: STAND_INS["mamba2_split_conv1d_scan_combined"](
            projected, *weights, D=torch.zeros(HEADS), chunk_size=64, headdim=WIDTH, ngroups=groups,
            rmsnorm_weight=torch.zeros(width), outproj_weight=out_projection,
        )
    )  # fmt: skip
    small = sum(each.nbytes for each in weights if each is not None) + 4 * (HEADS + width + 32 * width)
    assert held == projected.nbytes + 4 * ROWS * LENGTH * (width + groups) + small
    output.sum().backward()
    assert projected.grad.shape == projected.shape


def test_mamba_1_saves_its_inputs_with_neighbouring_tokens_its_states_and_what_the_gate_multiplies() -> None:
    width, state, chunks = 32, 8, 2
    length = 2048 * chunks - 1
    options: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    states, steps = (torch.zeros(ROWS, width, length, **options) for _ in range(2))
    turned, gate = (torch.zeros(ROWS, length, each, **options) for each in (state, width))
    decays, bias = torch.zeros(width, state, requires_grad=True), torch.zeros(width, requires_grad=True)
    inputs = (states, steps, decays, turned.transpose(1, 2), turned.transpose(1, 2))

    def held(**gated: Any) -> int:
        output, size = saved_by(lambda: STAND_INS["mamba_selective_scan"](*inputs, delta_bias=bias, **gated))
        assert output.shape == states.shape
        output.sum().backward()
        return size

    rows, ends = 2 * ROWS * length, 4 * ROWS * width * chunks * 2 * state
    assert held() == rows * (2 * width + 2 * state) + ends + decays.nbytes + bias.nbytes
    assert held(z=gate.transpose(1, 2)) == rows * (4 * width + 2 * state) + ends + decays.nbytes + bias.nbytes
    assert all(each.grad.shape == each.shape for each in (states, steps, decays, turned, gate, bias))


def test_functions_of_models_are_replaced_and_put_back() -> None:
    original = module.torch_chunk_gated_delta_rule
    with with_kernels():
        assert module.torch_chunk_gated_delta_rule is STAND_INS["torch_chunk_gated_delta_rule"]
    assert module.torch_chunk_gated_delta_rule is original

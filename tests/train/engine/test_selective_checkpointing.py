"""Checkpoints that keep attention's outputs: the gradient, what runs again, and the bytes that are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import EXPERTS, WIDE, config_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import ToolkitError
from toolkit.models.activations import Activations
from toolkit.models.read_model import read_model
from toolkit.train.engine.layers import KERNELS, keep_attention, keeps_attention, prepare_checkpoints

ROWS, LENGTH = 2, 40
MODELS = {"llama": WIDE, "qwen3": WIDE | {"head_dim": 32}, "mixtral": WIDE, "qwen3_moe": WIDE | EXPERTS}
MODELS |= {"phi3": WIDE, "gpt_neox": WIDE, "olmo2": WIDE, "gemma": WIDE | {"head_dim": 32}}


class Attention(TorchDispatchMode):
    """Notes the bytes that each run of an attention kernel returns."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if KERNELS.fullmatch(operator.name()) and "backward" not in operator.name():
            self.returned.append(sum(each.nbytes for each in result if isinstance(each, torch.Tensor)))
        return result


@pytest.mark.parametrize("model_type", MODELS)
def test_a_layer_keeps_what_is_planned_and_its_gradient_is_that_of_full_checkpointing(
    model_type: str, tmp_path: Path
) -> None:
    path = config_file(tmp_path, model_type, MODELS[model_type])
    tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 90
    gradients, runs = [], []
    for selective in (False, True):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        prepare_checkpoints(model, selective=selective)
        with Attention() as attention:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        runs.append(attention.returned)
        assert keeps_attention(model) is selective
    assert all(map(torch.equal, *gradients))
    shape = read_model(str(path))
    assert len(runs[0]) == 2 * shape.num_layers
    planned = ROWS * LENGTH * Activations(shape=shape).attention_output_bytes
    assert runs[1] == [planned] * shape.num_layers


def test_attention_with_dropout_is_refused() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with pytest.raises(ToolkitError, match=r"dropout in attention, which is 0\.1 here"):
        keep_attention(None, flash, None, None, None, 0.1)
    with pytest.raises(ToolkitError, match="dropout in attention"):
        keep_attention(None, flash, None, None, None, dropout_p=0.5)


@pytest.mark.parametrize("selective", [False, True])
def test_dropout_is_recomputed_as_it_was_where_accelerate_wraps_the_layers(selective: bool) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    gradients = []
    for model in (layer, torch.nn.Sequential(checkpoint_wrapper(layer, preserve_rng_state=False))):
        prepare_checkpoints(model, selective=selective)
        torch.manual_seed(0)
        layer.zero_grad()
        model(torch.ones(8, 4, requires_grad=True)).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))

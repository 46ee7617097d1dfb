"""What is read from the source of the installed libraries, compared with what they have once imported."""

from __future__ import annotations

from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.attention import VARLEN
from toolkit.versions import attention_names, optimizer_module


def test_each_optimizer_needs_the_module_that_its_function_imports() -> None:
    needed = {name: optimizer_module(name) for name in trainer_schema().fields["optim"].choices}
    assert {name for name, module in needed.items() if module is None} == {
        *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
    }
    assert needed["adamw_8bit"] == ("bitsandbytes", "pip install -U bitsandbytes")
    assert needed["stable_adamw"] == ("optimi", "pip install torch-optimi")
    assert needed["adamw_torch_xla"] == ("torch_xla", "pip install torch_xla")


def test_the_attention_functions_are_those_of_the_library() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "/" not in name}
    assert {"eager", *registered} - {VARLEN} == set(attention_names())  # ours, once it is registered

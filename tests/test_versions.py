"""What is written down or read from the source of the installed libraries is what they have once imported."""

import dataclasses

from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.attention import VARLEN
from toolkit.models.optimizers import OPTIMIZERS
from toolkit.versions import attention_names, lora_config_fields


def test_every_optimizer_of_transformers_has_its_options() -> None:
    schema = trainer_schema()
    assert set(schema.optim_args) == set(schema.fields["optim"].choices)
    assert {"momentum", "dampening", "weight_decay", "nesterov"} <= set(schema.optim_args["sgd"])
    assert "momentum" not in schema.optim_args["adamw_torch"]


def test_the_optimizers_of_bitsandbytes_are_those_of_transformers() -> None:
    from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

    theirs = {optim.value for optim in _BITSANDBYTES_OPTIMIZERS}
    assert {name for name, spec in OPTIMIZERS.items() if spec.class_name.startswith("bitsandbytes.")} == theirs


def test_the_attention_functions_are_those_of_the_library() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "/" not in name}
    ours = {VARLEN, "flash"}  # once they are registered: the second stands for a kernel while a model is counted
    assert {"eager", *registered} - ours == set(attention_names())


def test_the_fields_of_lora_are_those_of_peft() -> None:
    from peft import LoraConfig, PeftConfig

    inherited = {field.name for field in dataclasses.fields(PeftConfig)}
    assert {field.name for field in dataclasses.fields(LoraConfig)} - inherited == set(lora_config_fields())

"""What is written down or read from the source of the installed libraries is what they have once imported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import transformers

from toolkit.job.trainer_checks import OPTIMIZER_OPTIONS, optimizer_module, optimizer_options
from toolkit.job.trainer_schema import trainer_schema
from toolkit.models.attention import VARLEN
from toolkit.versions import attention_names, lora_config_fields


def test_every_optimizer_of_transformers_has_its_options_and_its_module() -> None:
    choices = trainer_schema().fields["optim"].choices
    assert [name for name in choices if optimizer_options(name) is None] == []
    own = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
    assert {name for name in choices if optimizer_module(name) is None} == set(own)
    assert optimizer_module("stable_adamw") == ("optimi", "pip install torch-optimi")
    source = Path(transformers.__file__).with_name("trainer_optimizer.py").read_text()
    names = {option for options in OPTIMIZER_OPTIONS.values() for option in options}
    assert {name for name in names if f'"{name}"' not in source} == set()


def test_the_attention_functions_are_those_of_the_library() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "/" not in name}
    assert {"eager", *registered} - {VARLEN} == set(attention_names())  # ours, once it is registered


def test_the_fields_of_lora_are_those_of_peft() -> None:
    from peft import LoraConfig, PeftConfig

    inherited = {field.name for field in dataclasses.fields(PeftConfig)}
    assert {field.name for field in dataclasses.fields(LoraConfig)} - inherited == set(lora_config_fields())

"""What is read from the source of the installed libraries, compared with what they have once imported."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest

from toolkit.models.attention import VARLEN
from toolkit.versions import (
    accelerator_config_types,
    attention_names,
    optimizer_module,
    scheduler_arguments,
    training_argument_defaults,
    training_argument_words,
)


def test_the_words_of_each_argument_are_those_of_the_library() -> None:
    from transformers import TrainingArguments
    from transformers.debug_utils import DebugOption
    from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    enums: dict[str, type[enum.Enum]] = {
        "optim": OptimizerNames,
        "lr_scheduler_type": SchedulerType,
        "eval_strategy": IntervalStrategy,
        "logging_strategy": IntervalStrategy,
        "save_strategy": SaveStrategy,
        "hub_strategy": HubStrategy,
        "debug": DebugOption,
    }
    choices = {
        field.name: tuple(field.metadata["choices"])
        for field in dataclasses.fields(TrainingArguments)
        if "choices" in field.metadata
    }
    expected = choices | {name: tuple(member.value for member in words) for name, words in enums.items()}
    assert training_argument_words() == expected


def test_the_defaults_are_those_of_the_library() -> None:
    from transformers import TrainingArguments

    real: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    read = training_argument_defaults()
    assert {name: real[name] for name in read} == read
    assert {"save_strategy", "logging_steps", "dataloader_num_workers"} <= read.keys()


@pytest.mark.parametrize("schedule", training_argument_words()["lr_scheduler_type"])
def test_the_arguments_of_a_schedule_are_those_of_its_function(schedule: str) -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(schedule)]).parameters
    own = {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in parameters.items()
        if name not in ("optimizer", "num_warmup_steps", "num_training_steps")
    }
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert scheduler_arguments(schedule) == (None if takes_any else own)


def test_each_optimizer_needs_the_module_that_its_function_imports() -> None:
    needed = {name: optimizer_module(name) for name in training_argument_words()["optim"]}
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


def test_the_fields_of_the_accelerator_configuration_are_those_of_the_library() -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig

    assert list(accelerator_config_types()) == [field.name for field in dataclasses.fields(AcceleratorConfig)]

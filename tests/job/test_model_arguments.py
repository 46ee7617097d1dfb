"""Names of the model's parts, compared with the models that transformers builds."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from model_configs import ARCHITECTURES, TINY, built, config_file

from toolkit.errors import ToolkitError
from toolkit.job.job import Job
from toolkit.job.model_arguments import check_attention, parameter_names
from toolkit.models.read_model import read_model
from toolkit.presets.preset_checks import check_parts

LLAMA = TINY | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("model_type", "fields"), ARCHITECTURES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_parameter_that_transformers_makes_is_known_by_name(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = config_file(tmp_path, model_type, fields)
    real = {name for name, _ in built(path).named_parameters(remove_duplicate=False)}
    known = set(parameter_names(read_model(str(path))))
    assert real <= known
    assert known - real <= {"lm_head.weight"}


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"freeze": ["nope"]}, "--freeze 'nope' matches no parameter", "there is `"),
        ({"freeze": ["*"]}, "--freeze leaves nothing to train", "freeze fewer parameters"),
        ({"train_only": ["model.layer.*"]}, "--train_only 'model.layer.*' matches no parameter", "there is `model."),
        ({"lora_target_modules": ["qproj"]}, "--lora_target_modules qproj names no module of the model",
         "did you mean `q_proj`?"),
        ({"lora_target_modules": "xyz"}, "--lora_target_modules xyz names no module of the model",
         "one of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)  # fmt: skip
def test_a_name_of_no_part_is_refused(arguments: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        check_parts(Job.from_values(arguments | ({"lora_r": "4"} if "lora" in message else {})), LLAMA)
    assert caught.value.message == message
    assert (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"freeze": ["model.embed_tokens.*"]}, LLAMA),
        ({"freeze": ["lm_head.weight"]}, LLAMA | {"tie_word_embeddings": True}),
        ({"train_only": "*.2.mlp.*"}, LLAMA),
        ({"lora_r": "4", "lora_target_modules": ["all-linear"]}, LLAMA),
        ({"lora_r": "4", "lora_target_modules": ["q_proj", "nope"]}, LLAMA),  # peft needs one that exists
        ({"lora_r": "4", "lora_target_modules": ["lm_head"]}, LLAMA),
        ({"lora_target_modules": ["nope"]}, LLAMA),  # has no effect, which is a warning
        ({"freeze": ["nope"]}, {"model_type": "unknown"}),
        ({"freeze": ["nope"]}, {"model_type": "llama"}),
    ],
)
def test_a_name_that_may_be_right_is_left_to_the_model(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    check_parts(Job.from_values(arguments), config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "is_refused"), [(["qproj"], True), (["q_proj", "nope"], False), (["2.mlp.up_proj"], False)]
)
def test_lora_on_no_module_is_refused_by_peft_with_the_same_names(
    targets: list[str], is_refused: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    path, job = config_file(tmp_path, "llama", TINY), Job.from_values({"lora_r": "4", "lora_target_modules": targets})
    with pytest.raises(ValueError) if is_refused else nullcontext():  # noqa: PT011  (its whole message is peft's)
        get_peft_model(built(path), LoraConfig(r=4, target_modules=targets))
    with pytest.raises(ToolkitError) if is_refused else nullcontext():
        check_parts(job, json.loads(path.read_text()))


def test_an_attention_function_is_one_that_transformers_has() -> None:
    for name in (None, "sdpa", "eager", "flex_attention", "paged|eager", "kernels-community/flash-attn2@main:attend"):
        check_attention(name)
    with pytest.raises(ToolkitError, match="is 'sdpaa', expected auto, sdpa_varlen, eager") as caught:
        check_attention("sdpaa")
    assert caught.value.hint == "did you mean `sdpa`?"

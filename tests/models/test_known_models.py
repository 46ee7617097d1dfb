"""Well-known models are planned without the hub, from facts that agree with what is published of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json, read_json_object
from toolkit.models.read_model import bundled_models, config_path, known_models, read_model
from toolkit.plan.options import PlanOptions
from toolkit.plan.plan_table import PlanAnswer, summary
from toolkit.plan.planner import make_plans, plan_request

# Billions of parameters that are published where the name says none, or rounds it more than the rest.
PUBLISHED = {
    **{"openai-community/gpt2": 0.124, "microsoft/phi-2": 2.7, "microsoft/phi-4": 14.7},
    **{"microsoft/Phi-3-mini-4k-instruct": 3.82, "microsoft/Phi-4-mini-instruct": 3.8},
    **{"mistralai/Mistral-Large-Instruct-2407": 123, "mistralai/Mixtral-8x7B-v0.1": 46.7},
    **{"google/gemma-7b": 8.54, "google/gemma-2-2b": 2.6, "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen2.5-3B": 3.09},
    **{"meta-llama/Llama-3.2-1B": 1.23, "meta-llama/Llama-3.2-3B": 3.21, "Qwen/Qwen3-0.6B": 0.6},
}


# Those whose configuration has the exact number, as its checkpoint's files have it.
COUNTED_PARAMETERS = {
    name: values["_num_params"] for name, path in known_models().items() if "_num_params" in (values := read_json(path))
}
READABLE = list(bundled_models())


@pytest.mark.parametrize("model", [name for name in READABLE if name not in COUNTED_PARAMETERS])
def test_a_known_model_has_as_many_parameters_as_are_published(model: str) -> None:
    named = re.search(r"-(\d+(?:\.\d+)?)([mMbB])\b", model)
    billions = PUBLISHED.get(model)
    if billions is None:
        assert named is not None
        billions = float(named[1]) / (1000 if named[2] in "mM" else 1)
    assert read_model(model).num_params / 1e9 == pytest.approx(billions, rel=0.09)


def test_bundled_models_have_the_exact_number_of_parameters() -> None:
    exact = {name: number for name, number in COUNTED_PARAMETERS.items() if name in READABLE}
    assert {name: read_model(name).num_params for name in exact} == exact
    assert len(exact) > 60


def test_every_known_model_names_its_source() -> None:
    assert all(read_json_object(path).get("_source") for path in known_models().values())
    shapes = {name: read_model(name) for name in READABLE}
    # saved activations are worked out or counted, and never estimated as another architecture's
    assert {name for name, shape in shapes.items() if shape.activations_from == "llama"} == set()
    assert len(shapes) >= 130


def test_the_name_of_a_model_that_is_counted_needs_neither_transformers_nor_its_owner() -> None:
    """A child process that can import none of the counting libraries."""
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'peft'])); from toolkit.models."
    code += "read_model import read_model as r; s = r('Qwen3.5-27B'); print(s.num_params, s.activations_from)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["27356728560", "saved tensors\n"]


PLAN = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "peft", "accelerate", "deepspeed"]))
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request
for model in sys.argv[1:]:
    options = PlanOptions(gpu="h200", num_processes=(8,), preset=("zero3",), per_device_train_batch_size=1)
    print(model, make_plans(plan_request(model, options))[0].memory.planned_peak_bytes > 0)
"""


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(READABLE[::20], id="some"),
        pytest.param(READABLE, id="all", marks=pytest.mark.nightly),
    ],
)
def test_bundled_models_are_planned_without_the_libraries_that_train(models: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PLAN, *models], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{model} True" for model in models]


def written(folder: Path, model_type: str, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | fields))
    return str(folder)


# The third and the fourth are those of a reward model and of EmbeddingGemma.
OTHER_TASKS = {
    "an encoder with a decoder": {"model_type": "newer_t5", "is_encoder_decoder": True},
    "stored as a classifier": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    "stored as an embedding model": {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    r"stored as an embedding model \(Qwen3Model\)": {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
}


@pytest.mark.parametrize("kind", OTHER_TASKS)
def test_what_is_stored_for_another_task_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ToolkitError, match=kind):
        read_model(written(tmp_path, **OTHER_TASKS[kind]))  # type: ignore[arg-type]


def test_encoders_and_models_of_sound_are_refused_by_name(tmp_path: Path) -> None:
    for model_type, kind in {"bert": "an encoder", "t5": "an encoder with", "whisper": "a model of sound"}.items():
        with pytest.raises(ToolkitError, match=f"{model_type} is {kind}"):
            read_model(written(tmp_path, model_type))
    with pytest.raises(ToolkitError, match="unknown model_type 'mimo'") as refused:
        read_model(written(tmp_path, "mimo"))
    assert "mimi" not in str(refused.value.hint)  # a codec of sound
    with pytest.raises(ToolkitError, match="unknown model_type 'minimax_m9'") as refused:
        read_model(written(tmp_path, "minimax_m9"))  # a later generation than the installed library's
    assert "a newer version may" in str(refused.value.hint)


def test_activations_that_could_not_be_counted_are_named_in_the_first_line() -> None:
    options = PlanOptions(gpu="h200", num_processes=(8,), preset=("zero3",), per_device_train_batch_size=1)
    request = plan_request("Qwen/Qwen3-VL-8B-Instruct", options)
    shape = replace(request.shape, counted_activations=None, why_not_counted="it reads values")
    request = replace(request, shape=shape)
    line = summary(PlanAnswer(request=request, plans=make_plans(request)))
    assert line.startswith("fits on")
    assert "(margin: activations estimated as Llama's)" in line


def test_a_known_model_needs_no_owner() -> None:
    assert config_path("Qwen3-8B") == config_path("Qwen/Qwen3-8B")

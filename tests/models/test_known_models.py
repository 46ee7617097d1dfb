"""Well-known models are planned without the hub, from facts that agree with what is published of them."""

from __future__ import annotations

import re

import pytest

from toolkit.files.documents import read_json_object
from toolkit.models.read_model import config_path, known_models, read_model

# Billions of parameters that are published where the name says none, or rounds it more than the rest.
PUBLISHED = {
    **{"openai-community/gpt2": 0.124, "microsoft/phi-2": 2.7, "microsoft/phi-4": 14.7},
    **{"microsoft/Phi-3-mini-4k-instruct": 3.82, "microsoft/Phi-4-mini-instruct": 3.8},
    **{"mistralai/Mistral-Large-Instruct-2407": 123, "mistralai/Mixtral-8x7B-v0.1": 46.7},
    **{"google/gemma-7b": 8.54, "google/gemma-2-2b": 2.6, "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen2.5-3B": 3.09},
    **{"meta-llama/Llama-3.2-1B": 1.23, "meta-llama/Llama-3.2-3B": 3.21, "Qwen/Qwen3-0.6B": 0.6},
}


@pytest.mark.parametrize("model", known_models())
def test_a_known_model_has_as_many_parameters_as_are_published(model: str) -> None:
    named = re.search(r"-(\d+(?:\.\d+)?)([mMbB])\b", model)
    billions = PUBLISHED.get(model)
    if billions is None:
        assert named is not None
        billions = float(named[1]) / (1000 if named[2] in "mM" else 1)
    assert read_model(model).num_params / 1e9 == pytest.approx(billions, rel=0.09)


def test_every_known_model_names_its_source_and_is_counted_by_formulas() -> None:
    assert all(read_json_object(path).get("_source") for path in known_models().values())
    assert {read_model(model).counted_on for model in known_models()} == {"arithmetic"}


def test_a_known_model_needs_no_owner() -> None:
    assert config_path("Qwen3-8B") == config_path("Qwen/Qwen3-8B")

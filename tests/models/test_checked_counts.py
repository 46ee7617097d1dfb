"""Every entry of the table by which `toolkit plan` calls model states exact, compared with the libraries' tensors."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from model_configs import TINY, built, config_file, counted_tensors, fields_of
from peft import LoraConfig, get_peft_model

from toolkit.errors import ToolkitError
from toolkit.models.config_fields import ConfigFields
from toolkit.models.count_from_transformers import refused_modules
from toolkit.models.decoders import shape_from_config
from toolkit.models.lora import ALL_LINEAR, RENAMED_TARGETS, check_lora_targets, lora_layer, outer_lora
from toolkit.models.read_model import CHECKED, MIXTURES_WITH_ADAPTED_EXPERTS, MIXTURES_WITH_FROZEN_EXPERTS, QUANTIZED
from toolkit.models.shape import ModelShape

RANK = 4
ROOT = Path(__file__).parents[2]
MEASURED_IN_4BIT = json.loads((ROOT / "tests" / "fixtures" / "quantized_bytes.json").read_text())["rows"]

# By formula and counted, dense and both kinds of mixtures; the others are compared every night.
REPRESENTATIVE = ("llama", "gpt2", "qwen3_moe", "cohere", "deepseek_v3", "gpt_oss")
ARCHITECTURES = [
    pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.nightly, id=name) for name in CHECKED
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # for fused experts
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def configs(folder: Path, model_type: str) -> list[Path]:
    numbered = enumerate(fields_of(model_type))
    return [config_file(folder / f"{model_type}-{number}", model_type, fields) for number, fields in numbered]


@cache
def planned(config: Path) -> ModelShape:
    """The shape as `read_model` reads it: by formula, or as its child process counts it, without activations."""
    shape = shape_from_config(ConfigFields(json.loads(config.read_text()), str(config)))
    return counted_tensors(built(config)) if shape is None else shape


def adapters_that_peft_makes(config: Path, targets: Any) -> list[tuple[int, ...]]:
    left_out = refused_modules(built(config)) if targets == "all-linear" else []  # with which no forward pass runs
    lora = LoraConfig(r=RANK, target_modules=targets, exclude_modules=left_out or None, task_type="CAUSAL_LM")
    model = get_peft_model(built(config), lora)
    return sorted(tuple(p.shape) for p in model.parameters() if p.requires_grad)


def planned_adapters(shape: ModelShape, targets: tuple[str, ...]) -> list[tuple[int, ...]]:
    layers = (*(lora_layer(shape, kind, RANK, targets) for kind in shape.layers), outer_lora(shape, RANK, targets))
    return sorted(tensor.shape for layer in layers for tensor in layer)


def choices_of_modules(shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """Each name that a linear layer in a decoder layer has, for itself; a fused parameter by both of its old names."""
    renamed = RENAMED_TARGETS.get(shape.model_type, {}) if shape.counted_adapters is None else shape.renamed_targets
    for new_name in sorted(set(renamed.values())):
        yield tuple(sorted(old for old, new in renamed.items() if new == new_name))
    names = {tensor.name.split(".")[-2] for kind in shape.layer_kinds for tensor in kind if tensor.is_linear_weight}
    heads = {tensor.name.split(".")[-2] for tensor in shape.outer if tensor.name.endswith(".weight")}
    outside = {adapter.target.split(".")[-1] for adapter in shape.outer_adapters} | heads
    yield from ((name,) for name in sorted(names - set(renamed) - outside))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_planned_tensors_and_adapters_are_those_that_transformers_and_peft_make(model_type: str, folders: Path) -> None:
    for config in configs(folders, model_type):
        shape = planned(config)
        tensors = [tensor.shape for layer in (*shape.layers, shape.outer) for tensor in layer]
        assert sorted(tensors) == sorted(tuple(p.shape) for p in built(config).parameters())
        assert planned_adapters(shape, ALL_LINEAR) == adapters_that_peft_makes(config, "all-linear")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_planned_adapters_on_named_modules_are_those_that_peft_makes(model_type: str, folders: Path) -> None:
    config = configs(folders, model_type)[0]
    shape, tried = planned(config), 0
    for targets in choices_of_modules(shape):
        made = planned_adapters(shape, targets)
        if made:  # dense MLP layers beside adapted experts have no adapter of their own
            tried += 1
            assert made == adapters_that_peft_makes(config, list(targets)), targets
    assert tried >= 2


@pytest.mark.parametrize(
    "model_type",
    [each for each in ARCHITECTURES if each.id in MIXTURES_WITH_ADAPTED_EXPERTS + MIXTURES_WITH_FROZEN_EXPERTS],
)
def test_a_mixture_is_checked_with_experts(model_type: str, folders: Path) -> None:
    """The tiny configuration really has fused experts, and peft adapts them where the table says so."""
    shape = planned(configs(folders, model_type)[0])
    assert any(len(tensor.shape) == 3 for kind in shape.layer_kinds for tensor in kind)
    ranks = [adapter.rank_multiple for layer in shape.counted_adapters.values() for adapter in layer]
    assert (max(ranks) > 1) is (model_type in MIXTURES_WITH_ADAPTED_EXPERTS)


def test_a_model_that_peft_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    shape = planned(config_file(tmp_path, "mamba", TINY))
    with pytest.raises(ToolkitError, match=r"peft cannot adapt .* mamba: it refuses out_proj"):
        check_lora_targets(shape, ALL_LINEAR)


def test_quantized_bytes_were_measured_for_every_architecture_that_the_table_says() -> None:
    """`tests/plan/test_model_states.py` compares each of these rows with the plan."""
    assert {row["config"]["model_type"] for row in MEASURED_IN_4BIT} == set(QUANTIZED)

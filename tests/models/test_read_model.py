"""Shapes from configurations, compared with transformers on the meta device, tensor by tensor."""

import contextlib
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from model_configs import ARCHITECTURES, EXPERTS, TINY, built, config_file, counted_tensors
from transformers import Trainer

from toolkit.errors import ToolkitError
from toolkit.models import count_from_transformers as counting
from toolkit.models import read_model as reading
from toolkit.models.decoders import types_with_formulas
from toolkit.models.read_model import cached_count, config_path, count_shape, read_model
from toolkit.models.shape import ModelShape


def test_every_known_architecture_is_held_against_transformers() -> None:
    assert {model_type for model_type, _ in ARCHITECTURES} == set(types_with_formulas())


@pytest.mark.parametrize(
    ("model_type", "fields"), ARCHITECTURES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_tensors_and_weight_decay_are_transformers_own(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = config_file(tmp_path, model_type, fields)
    model, shape = built(path), read_model(str(path))
    classes = set(model._no_split_modules)
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    assert shape.counted_on == "arithmetic"
    assert len(layers) == shape.num_layers
    planned = [[(tensor.name, tensor.shape) for tensor in layer] for layer in shape.layers]
    assert planned == [[(name, tuple(p.shape)) for name, p in layer.named_parameters()] for layer in layers]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outer = [(name, tuple(p.shape)) for name, p in model.named_parameters() if id(p) not in inside]
    assert sorted((tensor.name, tensor.shape) for tensor in shape.outer) == sorted(outer)
    assert shape.attention == model.config._attn_implementation
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    tensors = [tensor for layer in (*shape.layers, shape.outer) for tensor in layer if tensor.has_weight_decay]
    expected = sum(p.numel() for name, p in model.named_parameters() if name in decayed)
    assert sum(tensor.num_elements for tensor in tensors) == expected
    words = ("hidden_act", "hidden_activation", "activation_function")
    assert shape.activation in [getattr(model.config, word, None) for word in words]


def test_counting_on_the_meta_device_agrees_with_arithmetic(tmp_path: Path) -> None:
    path = config_file(tmp_path, "qwen3_moe", TINY | EXPERTS | {"mlp_only_layers": [1]})

    def described(shape: ModelShape) -> dict[str, Any]:
        layers = [[(tensor.name, tensor.shape, tensor.is_linear_weight) for tensor in kind] for kind in shape.layers]
        names = ("hidden_size", "intermediate_size", "num_experts", "experts_per_token", "head_dim", "gated_mlp")
        outer = sorted((tensor.name, tensor.shape) for tensor in shape.outer)
        return {"layers": layers, "outer": outer} | {name: getattr(shape, name) for name in names}

    assert described(counted_tensors(built(path))) == described(read_model(str(path)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": None}, "has no `hidden_size`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of 1 or more"),
        ({"hidden_size": 10**15}, "hidden_size is 1000000000000000, expected"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer is 1000000000, expected an integer from 0 to 2,000"),
        ({"model_type": "cohere", "num_hidden_layers": 10**9}, "expected an integer from 0 to 2,000"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of 4 heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 32 is not a multiple of 5"),
        ({"model_type": "lama"}, "did you mean `llama`?"),
        ({"model_type": None}, "has no `model_type`"),
        ({"model_type": 5}, "model_type is 5, expected a name"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"model_type": "phi", "resid_pdrop": 2}, "resid_pdrop is 2, expected a number from 0 to 1"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], expected text"),
        ({"model_type": "gemma2", "layer_types": {"a": 1}}, "expected a list of names"),
        ({"text_config": [1]}, "text_config is [1], expected keys and values"),
    ],
)
def test_a_configuration_without_sense_is_refused_by_field(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY | fields))
    with pytest.raises(ToolkitError, match=re.escape(said)):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no/such/folder", "no such file or folder"),
        ("/data/models/Llama-3.2-1B-medical", r"plan its base, maybe `meta-llama/Llama-3\.2-1B`"),  # of another node
        (str(Path(__file__).parent), r"has no config\.json"),
        (__file__, "line 1: not JSON"),
        ("someone/model", r"the hub cannot be reached.*\n  hint: name a local folder that holds the model's config"),
        ("some one/model", "is neither a folder nor a hub id"),
    ],
)
def test_a_model_that_is_not_there_names_the_folder_way(model: str, said: str) -> None:
    with pytest.raises(ToolkitError, match=said):
        read_model(model)


def test_a_folder_of_another_node_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    model = "/scratch/modelscope/LLM-Research/Meta-Llama-3___2-1B-Instruct"
    assert read_model(model).num_layers == 16
    assert f"{model} is not here, and is planned by its name, with the configuration" in capsys.readouterr().err
    with pytest.raises(ToolkitError, match="no such file or folder"):
        config_path(model, known=False)  # to train it


VALUES = {"model_type": "cohere", "hidden_size": 8}
SAVED = {"layers": [0, 64, 2.0], "largest_layer": [0, 32, 1.0], "backward": [0, 8, 0.0], "outer": [0, 16, 0.0]}
ANSWER: dict[str, Any] = {
    **{"model_type": "cohere", "num_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2},
    **{"num_kv_heads": 2, "head_dim": 4, "vocab_size": 10, "gated_mlp": True, "tied_embeddings": True},
    **{"num_experts": None, "experts_per_token": None, "attention": "sdpa", "activation": "silu"},
    **{"sliding_window": None, "layers_of_kind": [[["mlp.weight", [16, 8], True]]], "kind_of_layer": [0, 0]},
    **{"outer": [["embed_tokens.weight", [10, 8], False]], "counted_rank": 8, "why_not_counted": None},
    **{"adapters_of_layer": [[["mlp", 16, 8, 1]], [["mlp", 16, 8, 1]]], "outer_adapters": [], "renamed_targets": {}},
    "activations": [{"autocast": False, "lora": False, "mask": "none", "per_rank": False, "logit_bytes": 0, **SAVED}],
}


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty cache, and the commands of the child processes, which all give `ANSWER`."""
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(ANSWER) + "\n", "")

    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reading.subprocess, "run", run)
    return started


def test_the_second_call_starts_no_child(children: list[list[str]]) -> None:
    first, second = (count_shape(Path("config.json"), VALUES) for _ in range(2))
    assert len(children) == 1
    assert children[0][1:] == ["-m", "toolkit.models.count_from_transformers", "config.json"]
    for shape in (first, second):
        assert (shape.counted_on, shape.activations_from, shape.num_params) == ("meta device", "saved tensors", 336)
        assert shape.counted_activations.at(autocast=False, lora_r=None, mask="none").layers.token_bytes(3) == 70


def test_another_configuration_library_or_counting_code_is_counted_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {cached_count(VALUES), cached_count(VALUES | {"hidden_size": 16})}
    monkeypatch.setattr(reading, "COUNTING_MODULES", (*reading.COUNTING_MODULES, "shape"))
    entries.add(cached_count(VALUES))
    monkeypatch.setattr(reading, "installed_version", lambda name: "99" if name == "peft" else "1")
    assert len(entries | {cached_count(VALUES)}) == 4


@pytest.mark.parametrize("damaged", ["[]", "null", '{"model_type": "cohere"}', '{"layers_of_kind": [[["w", "a", 1]]]}'])
def test_a_damaged_entry_is_counted_again_and_replaced(damaged: str, children: list[list[str]]) -> None:
    path = cached_count(VALUES)
    path.parent.mkdir(parents=True)
    path.write_text(damaged)
    assert count_shape(Path("config.json"), VALUES).num_layers == 2
    assert len(children) == 1
    assert json.loads(path.read_text()) == ANSWER
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_a_cache_that_cannot_be_written_is_no_error(children: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert count_shape(Path("config.json"), VALUES).num_layers == 2
    assert len(children) == 1


@pytest.mark.nightly
def test_a_real_child_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    path = config_file(tmp_path, "cohere", TINY)
    counted = read_model(str(path))  # arithmetic does not know this architecture
    assert counted.num_params == sum(p.numel() for p in built(path).parameters())
    assert (counted.num_layers, counted.num_kv_heads, counted.gated_mlp) == (3, 2, True)
    assert len(set(counted.layers)) == 1
    assert (counted.counted_on, counted.activations_from) == ("meta device", "saved tensors"), counted.why_not_counted
    monkeypatch.setattr(reading.subprocess, "run", None)  # a second child would fail
    assert read_model(str(path)).num_params == counted.num_params


@pytest.mark.launch
@pytest.mark.cold_start
def test_remote_code_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    named = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    values = {"model_type": "vit", "hidden_size": 8, "architectures": 5, "auto_map": named}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ToolkitError, match="only decoders are"):
        read_model(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_a_module_that_is_named_beside_the_layer_around_it_is_no_layer(model_type: str, tmp_path: Path) -> None:
    """Mamba names its mixers and its blocks, and each was counted: the adapters then had fewer layers."""
    model = built(config_file(tmp_path, model_type, {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 96}))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = counted_tensors(model)
    assert (shape.num_layers, shape.num_params) == (3, parameters)


SMALL_BIOGPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("zamba2", TINY | {"n_mamba_heads": 2, "layers_block_type": ["hybrid"] * 3}, "its layers share tensors"),
        ("biogpt", SMALL_BIOGPT, "it names no layers that are never split"),
    ],
)
def test_a_model_whose_layers_cannot_be_planned_is_refused_with_the_reason(
    model_type: str,
    fields: dict[str, Any],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zamba 2 said that `zip()` was longer, and BioGPT's plan had the largest of no layers."""
    monkeypatch.setattr(counting, "COUNTING_CPU_SECONDS", time.process_time() + 60)
    with pytest.raises(SystemExit):
        counting.main([str(config_file(tmp_path, model_type, fields))])
    assert capsys.readouterr().out.startswith(f"{reading.REFUSED}{why}")


def test_the_limit_of_a_count_holds_where_its_first_error_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what a callback raises that runs while a tensor is freed."""

    def work(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def count() -> None:
        with contextlib.suppress(TimeoutError):
            work(2)
        work(4)

    monkeypatch.setattr(counting, "COUNTING_CPU_SECONDS", 0)
    with pytest.raises(TimeoutError), counting.limited_seconds():
        count()

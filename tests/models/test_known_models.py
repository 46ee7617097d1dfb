"""Well-known models are planned without the hub, from facts that agree with what is published of them."""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, nightly

from toolkit.errors import ToolkitError
from toolkit.files.documents import read_json, read_json_object
from toolkit.hardware.gpu_table import custom_gpu
from toolkit.models import count_from_transformers as counting
from toolkit.models import read_model as reading
from toolkit.models.count_from_transformers import read_configuration
from toolkit.models.families import COUNTED, TERMS, family_count
from toolkit.models.read_model import _say_once, bundled_models, config_path, known_models, read_model
from toolkit.models.shape import ModelShape
from toolkit.plan.options import PlanOptions
from toolkit.plan.plan_table import PlanAnswer, summary
from toolkit.plan.planner import make_plans, plan_request
from toolkit.versions import model_types


@pytest.fixture(scope="module")
def shapes() -> dict[str, ModelShape]:
    return {name: read_model(name) for name in bundled_models()}


def test_bundled_models_have_the_exact_number_of_parameters_that_is_published(shapes: dict[str, ModelShape]) -> None:
    """It is in the configuration, as its checkpoint's files have it."""
    published = {name: read_json(known_models()[name])["_num_params"] for name in shapes}
    assert {name: shape.num_params for name, shape in shapes.items()} == published


def test_every_known_model_names_its_source(shapes: dict[str, ModelShape]) -> None:
    assert all(read_json_object(path).get("_source") for path in known_models().values())
    # saved activations are worked out or counted, and never estimated as another architecture's
    assert {name for name, shape in shapes.items() if shape.activations_from == "llama"} == set()
    assert len(shapes) >= 290


PLAN = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "peft", "accelerate", "deepspeed"]))
from toolkit.plan.options import PlanOptions
from toolkit.plan.planner import make_plans, plan_request
for model in sys.argv[1:]:
    options = PlanOptions(gpu="h200", num_processes=(8,), preset=("zero3",), per_device_train_batch_size=1)
    print(model, make_plans(plan_request(model, options))[0].memory.planned_peak_bytes > 0)
"""


@pytest.mark.parametrize("each", [20, *nightly(1)])
def test_bundled_models_are_planned_without_the_libraries_that_train(each: int) -> None:
    models = list(bundled_models())[::each]
    done = subprocess.run([sys.executable, "-c", PLAN, *models], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{model} True" for model in models]


@pytest.mark.nightly
def test_terms_of_families_are_those_that_the_installed_transformers_gives() -> None:
    names = ["LiquidAI/LFM2-1.2B", "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3-VL-2B-Instruct", "tiiuae/Falcon-H1-0.5B-Base"]
    command = [sys.executable, "tests/scripts/family_terms.py", "--again", "--check", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.split("\n")) >= len(names), "one of them has no terms"


def written(folder: Path, model_type: str, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | fields))
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "fields", "kind"),
    [
        ("rwkv", {}, "computed token by token in Python"),
        ("newer_t5", {"is_encoder_decoder": True}, "an encoder with a decoder"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "stored as a classifier"),  # a reward model
        ("gemma3_text", {"use_bidirectional_attention": True}, "stored as an embedding model"),  # EmbeddingGemma
        ("qwen3", {"architectures": ["Qwen3Model"]}, "stored as an embedding model (Qwen3Model)"),
        ("bert", {}, "bert is an encoder"),
        ("t5", {}, "t5 is an encoder with"),
        ("whisper", {}, "whisper is a model of sound"),
        ("mimi2", {}, "unknown model_type 'mimi2'"),
    ],
)
def test_what_is_no_decoder_is_refused_by_name(
    model_type: str, fields: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError, match=re.escape(kind)):
        read_model(written(tmp_path, model_type, **fields))


def test_a_model_whose_configuration_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    ids = {
        "google/flan-t5-base": "an encoder with",
        "openai/whisper-tiny": "a model of sound",
        "BAAI/bge-base": "an emb",
        "openai/clip-vit-base-patch16": "a model of images",
    }
    for name, kind in ids.items():
        with pytest.raises(ToolkitError, match=f"{name}, by its name, is {kind}"):
            config_path(name)
    for name in ("bartowski/Qwen_Qwen3-8B-GGUF", "Robert/llm-7b", "OmniTech/llm-7b"):  # an owner is no kind of model
        with pytest.raises(ToolkitError, match="the hub cannot be reached"):
            config_path(name)
    with pytest.raises(ToolkitError, match="unknown model_type 'minimax_m9'") as refused:
        read_model(written(tmp_path, "minimax_m9"))  # a later generation than the installed library's
    assert "a newer version may" in str(refused.value.hint)


def test_code_of_the_hub_with_known_tensors_is_counted_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "missing_package", lambda *_: ToolkitError("torch is not installed"))
    # `kimi_k2` lacks what is no parameter: biases of the router, and the scales of its fp8 checkpoint
    counts = {"moonshotai/Kimi-K2-Instruct": 1_026_408_209_408, "XiaomiMiMo/MiMo-7B-Base": 7_833_409_536}
    for name, count in counts.items():
        values = read_json_object(known_models()[name])
        assert values["model_type"] in reading.SAME_TENSORS
        assert read_model(written(tmp_path, **values)).num_params == count


def scaled_pairs() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What families say of each counted model when its own count is left out, and its own count."""
    folders = [path.with_name(COUNTED).parent for path in known_models().values() if path.with_name(COUNTED).exists()]
    for folder in folders:
        others = [each for each in folders if each != folder]
        if result := family_count(read_json_object(folder / "config.json"), others):
            yield result[0], read_json_object(folder / COUNTED)


def test_another_size_of_a_counted_family_has_the_tensors_and_adapters_that_transformers_counts() -> None:
    pairs, wrong = list(scaled_pairs()), []
    for scaled, own in pairs:
        parts = [
            [
                *(each["outer"], each["outer_adapters"], each["adapters_of_layer"], each["num_kv_heads"]),
                *(each["layers_of_kind"][kind] for kind in each["kind_of_layer"]),
            ]
            for each in (scaled, own)
        ]
        wrong += [] if parts[0] == parts[1] else [(own["model_type"], own["num_layers"], own["hidden_size"])]
    assert wrong == []
    assert len(pairs) >= 20


def test_the_terms_of_a_counted_model_give_its_own_count() -> None:
    """Qwen3-VL-235B was planned with 60 experts of 128: its configuration names their number in another way."""
    folders = [path.parent for path in known_models().values() if path.with_name(TERMS).exists()]
    results = {folder: family_count(read_json_object(folder / "config.json"), [folder]) for folder in folders}
    of_own = {folder: result[0] for folder, result in results.items() if result is not None}
    parts = ("layers_of_kind", "outer", "adapters_of_layer", "outer_adapters", "num_experts", "hidden_size")
    for folder, found in of_own.items():
        own = read_json_object(folder / COUNTED)
        assert {part: found[part] for part in parts} == {part: own[part] for part in parts}, folder.name
    assert len(of_own) >= 59


def test_a_family_is_not_used_for_layers_of_which_no_counted_size_consists() -> None:
    """LFM2 with attention in every layer, as its configuration has it by default, ended in a traceback."""
    folder = known_models()["LiquidAI/LFM2-1.2B"].parent
    values = read_json_object(folder / "config.json")
    assert family_count(values, [folder]) is not None
    assert family_count(values | {"layer_types": ["full_attention"] * 16}, [folder]) is None


@pytest.mark.parametrize("each", [40, *nightly(1)])
def test_the_configuration_that_a_fine_tune_saves_has_the_count_of_its_base(each: int, tmp_path: Path) -> None:
    """Of 162 models without formulas 65 were refused by it in the light installation, and one was planned as tied."""
    counted = [path for path in known_models().values() if path.with_name(COUNTED).exists()]
    for path in counted[::each]:
        read_configuration(path).save_pretrained(tmp_path)
        assert reading.bundled_count(read_json_object(tmp_path / "config.json", allow_nan=True)) == path.with_name(
            COUNTED
        )


def test_a_window_that_is_switched_off_does_not_hide_a_counted_model() -> None:
    """Qwen2.5-VL's own file has one of 32,768 tokens, which transformers drops."""
    path = known_models()["Qwen/Qwen2.5-VL-7B-Instruct"]
    values = read_json_object(path) | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    assert reading.bundled_count(values) == path.with_name(COUNTED)
    assert reading.bundled_count(values | {"use_sliding_window": True}) is None


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-11B-Vision-Instruct", "state-spaces/mamba-130m-hf"])
def test_a_counted_model_with_more_tokens_has_the_tensors_that_transformers_builds(name: str, tmp_path: Path) -> None:
    """37 of the models without formulas were refused with tokens added, in the light installation."""
    path = known_models()[name]
    config = counting.read_configuration(path)
    config.get_text_config().vocab_size += 100
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = counting.model_class(config).from_config(config)
    result = family_count(read_json_object(tmp_path / "config.json"), [path.parent])
    assert result[0]["outer"] == counting.describe_tensors(model)["outer"]
    assert result[1] == path.parent.name


def test_terms_are_not_used_where_a_size_has_a_name_that_they_do_not_know(tmp_path: Path) -> None:
    base = known_models()["Qwen/Qwen3-VL-30B-A3B-Instruct"].parent
    for name in ("config.json", COUNTED, TERMS):
        text = (base / name).read_text()
        (tmp_path / name).write_text(text.replace("num_experts", "how_many_experts") if name == "config.json" else text)
    assert family_count(read_json_object(tmp_path / "config.json"), [tmp_path]) is None


def test_activations_scaled_from_another_size_are_within_15_percent_of_its_own_count() -> None:
    """What all layers save in rows of 4,096 tokens, for every dtype, method and mask."""
    errors = []
    for scaled, own in scaled_pairs():
        for row, right in zip(scaled["activations"], own["activations"], strict=True):
            found, counted = (fixed + 4096 * (per + 4096 * at) for fixed, per, at in (row["layers"], right["layers"]))
            errors += [] if row["per_rank"] else [abs(found / counted - 1)]
    print(f"{len(errors)} counts: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.15


def test_a_count_that_takes_too_long_is_scaled_from_the_family_and_the_first_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = read_json_object(known_models()["openai/gpt-oss-20b"]) | {"num_hidden_layers": 30, "_source": None}
    values["layer_types"] = [*values["layer_types"], *values["layer_types"][:6]]
    counted = read_json_object(known_models()["openai/gpt-oss-20b"].with_name(COUNTED))
    counted |= {"activations": [], "why_not_counted": "its count takes more than 30 s of a processor"}
    monkeypatch.setattr(reading, "_run_child", lambda _: counted)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    options = PlanOptions(gpu="h200", num_processes=(8,), preset=("zero3",), per_device_train_batch_size=1)
    request = plan_request(written(tmp_path, **values), options)
    assert (request.shape.num_layers, request.shape.activations_from) == (30, "family")
    line = summary(PlanAnswer(request=request, plans=make_plans(request)))
    assert "(margin: activations scaled from gpt-oss-" in line


def test_activations_that_could_not_be_counted_are_named_in_the_first_line() -> None:
    options = PlanOptions(gpu="h200", num_processes=(8,), preset=("zero3",), per_device_train_batch_size=1)
    request = plan_request("Qwen/Qwen3-VL-8B-Instruct", options)
    shape = replace(request.shape, counted_activations=None, why_not_counted="it reads values")
    request = replace(request, shape=shape)
    line = summary(PlanAnswer(request=request, plans=make_plans(request)))
    assert line.startswith("fits on")
    assert "(margin: activations estimated as Llama's)" in line
    request = replace(request, gpu=custom_gpu(request.gpu, memory_gib=8))
    line = summary(PlanAnswer(request=request, plans=make_plans(request)))
    assert line.startswith("does not fit on")  # its estimate may be too high, too
    assert "(margin: activations estimated as Llama's)" in line


def test_the_plan_of_an_embedding_model_says_that_it_is_one_of_a_language_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _say_once.cache_clear()
    for name in ("Qwen/Qwen3-Embedding-8B", "Qwen3-8B"):
        assert config_path(name).exists()
    assert capsys.readouterr().err.startswith("Qwen/Qwen3-Embedding-8B: planned as a language model")


def test_a_run_is_planned_by_a_count_that_is_there() -> None:
    """`toolkit train` waits for no count, and said "not planned" of a model that `recommend` plans."""
    assert read_model("Qwen/Qwen3.5-0.8B", count=False).num_params == read_model("Qwen/Qwen3.5-0.8B").num_params


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("unsloth/gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("google/gemma-4-E4B", "google/gemma-4-E4B-it"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "Qwen/Qwen3-14B"),
        ("qwen/qwen3-vl-8b-thinking", "Qwen/Qwen3-VL-8B-Instruct"),
        ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-1025-7B"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "unsloth/Mistral-Small-3.2-24B-Instruct-2506"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("DeepSeek-R1-0528-Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_another_tuning_of_a_known_model_needs_no_hub(name: str, known: str) -> None:
    assert config_path(name) == known_models()[known]


def test_a_published_copy_is_planned_as_the_model_that_it_is_listed_with() -> None:
    copies = read_json_object(reading.KNOWN / "copies.json")
    assert set(copies) <= set(known_models())
    listed = {copy: known for known, each in copies.items() for copy in each}
    assert len(listed) == sum(map(len, copies.values())) > 200, "listed twice"
    assert {copy: reading.same_shape(copy) for copy in listed} == listed


@pytest.mark.parametrize("name", ["somebody/Qwen3-8B", "Qwen/Qwen3-9B-Instruct", "Qwen/Qwen3-8B-GGUF", "Qwen2-VL-9B"])
def test_a_model_of_another_shape_or_owner_is_not_planned_as_a_known_one(name: str) -> None:
    assert reading.same_shape(name) is None


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama3.3:70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("somebody/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-32B-AWQ", "Qwen/Qwen3-32B"),
        ("unsloth/Qwen3-4B-Instruct-2507-GGUF", "Qwen/Qwen3-4B"),
        ("unsloth/gemma-3-27b-it-qat-bnb-4bit", "google/gemma-3-27b-it"),
        ("qwen2.5vl:7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B"),
        ("somebody/Llama-3.2-3B-Instruct-Q4_K_M-GGUF", "meta-llama/Llama-3.2-3B"),
    ],
)
def test_a_quantized_copy_or_a_short_name_is_refused_with_the_known_model(name: str, known: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        config_path(name)
    assert f"did you mean `{known}`" in refused.value.hint
    assert ("--load-in-4bit" in refused.value.hint) == bool(re.search("awq|gguf|qat|4bit", name.lower()))


OTHERS = ["Qwen3-0.7B", "Qwen/Qwen1.5-5B", "OpenGVLab/InternVL2-8B", "Qwen/Qwen4-VL-8B-Instruct", "Qwen3-9B"]


@pytest.mark.parametrize("name", [*OTHERS, "Qwen/Qwen9-VL-7B-AWQ", "gemma-3-8b-GGUF"])
def test_another_size_or_generation_is_neither_a_typing_error_nor_a_guess(name: str) -> None:
    with pytest.raises(ToolkitError) as refused:
        config_path(name)
    assert not re.search("did you mean|maybe", str(refused.value.hint))


def test_a_typing_error_and_the_base_of_a_fine_tune_are_named() -> None:
    hints = {
        "Qwen/Qwn3-8B": "did you mean `Qwen/Qwen3-8B`?",
        "somebody/Llama-3.1-8B-abliterated": "if it is a fine-tune, plan its base, maybe `meta-llama/Llama-3.1-8B`?",
        "somebody/Qwen3-14B-news-AWQ": "maybe `Qwen/Qwen3-14B` with `--lora-r 16 --load-in-4bit`?",
    }
    for name, hint in hints.items():
        with pytest.raises(ToolkitError) as refused:
            config_path(name)
        assert hint in str(refused.value.hint)


def test_a_model_of_code_on_the_hub_is_refused_with_the_plan_of_its_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformers and without it, whether its language model's sizes are at the top or in a part."""
    sizes = {name: read_json_object(known_models()["Qwen/Qwen2.5-7B"])[name] for name in reading.SIZES}
    for fields in (sizes, {"llm_config": sizes}):
        for types in (model_types(), ()):
            monkeypatch.setattr(reading, "model_types", lambda types=types: types)
            with pytest.raises(ToolkitError, match="'minicpmv' needs code from the hub") as refused:
                read_model(written(tmp_path, "minicpmv", **fields))
            assert "has the sizes of Qwen/Qwen2-7B" in str(refused.value.hint)
    with pytest.raises(ToolkitError, match="'kimi_vl' needs code") as refused:
        read_model(written(tmp_path, "kimi_vl", **sizes | {"hidden_size": 3000}))
    assert refused.value.hint == "plan a model of the same shape that transformers has"


def test_types_of_the_hub_are_none_of_transformers_and_text_parts_are_known() -> None:
    """A type that transformers has by now is planned, and must leave the list."""
    assert set(reading.MODEL_TYPES["needs_code_of_the_hub"]["types"].split()) & set(model_types()) == set()
    assert set(reading.MODEL_TYPES["text_parts"].values()) <= set(known_models())
    with pytest.raises(ToolkitError, match="MiniCPM-V-4_5 needs code from the hub") as refused:
        config_path("openbmb/MiniCPM-V-4_5")
    assert "Qwen/Qwen3-8B" in str(refused.value.hint)

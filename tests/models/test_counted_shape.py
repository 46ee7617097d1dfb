"""Models that transformers has to count: one child process per configuration, then the cache."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from model_configs import TINY, built, config_file

from toolkit.models import counted_shape
from toolkit.models.counted_shape import cached_count, count_shape
from toolkit.models.read_model import read_model

VALUES = {"model_type": "cohere", "hidden_size": 8}
SAVED = {"layers": [0, 64, 2.0], "largest_layer": [0, 32, 1.0], "backward": [0, 8, 0.0], "outer": [0, 16, 0.0]}
ANSWER: dict[str, Any] = {
    **{"model_type": "cohere", "num_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2},
    **{"num_kv_heads": 2, "head_dim": 4, "vocab_size": 10, "gated_mlp": True, "tied_embeddings": True},
    **{"num_experts": None, "experts_per_token": None, "attention": "sdpa", "activation": "silu"},
    **{"sliding_window": None, "layers_of_kind": [[["mlp.weight", [16, 8], True]]], "kind_of_layer": [0, 0]},
    **{"outer": [["embed_tokens.weight", [10, 8], False]], "counted_rank": 8, "why_not_counted": None},
    **{"adapters_of_layer": [[["mlp", 16, 8, 1]], [["mlp", 16, 8, 1]]], "outer_adapters": [], "renamed_targets": {}},
    "activations": [
        {"autocast": False, "lora": False, "mask": "none", "per_rank": False, "logit_bytes": 0, **SAVED},
    ],
}


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty cache, and the commands of the child processes, which all give `ANSWER`."""
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(ANSWER) + "\n", "")

    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(counted_shape.subprocess, "run", run)
    return started


def test_the_second_call_starts_no_child(children: list[list[str]]) -> None:
    first, second = (count_shape(Path("config.json"), VALUES) for _ in range(2))
    assert len(children) == 1
    assert children[0][1:] == ["-m", "toolkit.models.count_from_transformers", "config.json"]
    for shape in (first, second):
        assert (shape.counted_on, shape.activations_from, shape.num_params) == ("meta device", "saved tensors", 336)
        assert shape.counted_activations is not None
        assert shape.counted_activations.at(autocast=False, lora_r=None, mask="none").layers.token_bytes(3) == 70


def test_another_configuration_is_counted_for_itself(children: list[list[str]]) -> None:
    count_shape(Path("config.json"), VALUES)
    count_shape(Path("config.json"), VALUES | {"hidden_size": 16})
    assert len(children) == 2


@pytest.mark.parametrize("library", ["transformers", "torch", "peft"])
def test_an_upgraded_library_counts_again(
    library: str, children: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_shape(Path("config.json"), VALUES)
    real = counted_shape.installed_version
    monkeypatch.setattr(counted_shape, "installed_version", lambda name: "99" if name == library else real(name))
    count_shape(Path("config.json"), VALUES)
    assert len(children) == 2


def test_changed_counting_code_counts_again(children: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    count_shape(Path("config.json"), VALUES)
    monkeypatch.setattr(counted_shape, "COUNTING_MODULES", (*counted_shape.COUNTING_MODULES, "shape"))
    count_shape(Path("config.json"), VALUES)
    assert len(children) == 2


@pytest.mark.parametrize("damaged", ["", '{"model_type": "coh', "[]", '{"model_type": "cohere"}', "null"])
def test_a_damaged_entry_is_counted_again_and_replaced(damaged: str, children: list[list[str]]) -> None:
    path = cached_count(VALUES)
    path.parent.mkdir(parents=True)
    path.write_text(damaged)
    assert count_shape(Path("config.json"), VALUES).num_layers == 2
    assert len(children) == 1
    assert json.loads(path.read_text()) == ANSWER
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_a_cache_that_cannot_be_written_is_no_error(
    children: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    assert count_shape(Path("config.json"), VALUES).num_layers == 2
    assert len(children) == 1


def test_a_real_child_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    path = config_file(tmp_path, "cohere", TINY)
    counted = read_model(str(path))  # arithmetic does not know this architecture
    assert counted.num_params == sum(p.numel() for p in built(path).parameters())
    assert (counted.num_layers, counted.num_kv_heads, counted.gated_mlp) == (3, 2, True)
    assert len(set(counted.layers)) == 1
    assert (counted.counted_on, counted.activations_from) == ("meta device", "saved tensors"), counted.why_not_counted
    monkeypatch.setattr(counted_shape.subprocess, "run", None)  # a second child would fail
    assert read_model(str(path)).num_params == counted.num_params

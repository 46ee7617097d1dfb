"""Stages of a decoder, one after the other in one process, compute what the whole model computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from split_runs import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.parallel.pipeline_schedule import PIPELINED_TYPES, divide_layers
from toolkit.train.engine.pipeline_model import Stage, weights_reader
from toolkit.train.engine.pipeline_trainer import in_one_shape

LAYERS = 5


def whole_model(model_type: str, folder: Path, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SIZES, "num_hidden_layers": LAYERS, **fields, "model_type": model_type})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def stages_of(folder: Path, number: int) -> list[Stage]:
    config, layers = AutoConfig.from_pretrained(folder), divide_layers(LAYERS, number)
    stages = [Stage(config, part, number=index, stages=number, attention=None) for index, part in enumerate(layers)]
    for stage in stages:
        stage.load(weights_reader(str(folder), "main"), torch.device("cpu"))
    return [stage.eval() for stage in stages]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", PIPELINED_TYPES)
def test_stages_compute_the_logits_of_the_whole_model(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = whole_model(model_type, tmp_path, tie_word_embeddings=tied)
    tokens = torch.randint(3, 288, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    with torch.no_grad():
        hidden = tokens
        for stage in stages_of(tmp_path, 3):
            hidden = stage.compute(hidden, attention_mask=mask)
        expected = model(input_ids=tokens, attention_mask=mask).logits
    assert torch.equal(hidden[mask.bool()], expected[mask.bool()])


def test_a_stage_looks_layer_types_up_by_their_place_in_the_whole_model(tmp_path: Path) -> None:
    """Qwen2 slides over a window in its last layers only."""
    kinds = ["full_attention"] * 3 + ["sliding_attention"] * 2
    model = whole_model("qwen2", tmp_path, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    tokens = torch.randint(3, 288, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = tokens
        for stage in stages_of(tmp_path, 3):
            hidden = stage.compute(hidden)
        assert torch.equal(hidden, model(input_ids=tokens).logits)


def test_a_stage_has_its_own_layers_only(tmp_path: Path) -> None:
    whole_model("llama", tmp_path, tie_word_embeddings=True)
    first, middle, last = stages_of(tmp_path, 3)
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 64 * 32 + 2 * 32  # queries and output; keys and values; MLP; two norms
    held = [sum(parameter.numel() for parameter in stage.parameters()) for stage in (first, middle, last)]
    assert held == [288 * 32 + 2 * layer, 2 * layer, layer + 32 + 288 * 32]
    assert torch.equal(last.tied_copy, first.decoder.model.embed_tokens.weight)


def test_micro_batches_of_a_step_get_one_shape_without_another_label() -> None:
    long = {"input_ids": torch.tensor([[1, 2, 3]] * 2), "attention_mask": torch.ones(2, 3), "labels": torch.ones(2, 3)}
    short = {"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 2), "labels": torch.ones(1, 2)}
    shaped = in_one_shape([long, short], count=4)
    assert [batch["input_ids"].shape for batch in shaped] == [(2, 3)] * 4
    assert [int((batch["labels"] != -100).sum()) for batch in shaped] == [6, 2, 0, 0]
    assert shaped[1]["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]

"""Isolation of packed documents, measured on a live model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.errors import AttestationFailed
from toolkit.train.attest.document_isolation import check_isolated, read_packing
from toolkit.train.data.collation import PackCollator


def live(model: Any, collator: Any) -> Any:
    """The parts of a Trainer that the test reads: one process, no engine."""
    from contextlib import nullcontext

    accelerator = SimpleNamespace(unwrap_model=lambda model, **_: model)
    prepare = lambda inputs: inputs  # noqa: E731
    return SimpleNamespace(
        model_wrapped=model,
        data_collator=collator,
        accelerator=accelerator,
        _prepare_inputs=prepare,
        compute_loss_context_manager=nullcontext,
        args=SimpleNamespace(torch_compile=False),
    )


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=request.param, dtype=torch.float32)
    model.config.use_cache = False  # as load_model does; with a cache transformers looks for no documents
    return model


def test_documents_of_a_pack_are_isolated_in_the_live_model(model: Any, tokenizer: Any) -> None:
    reading = read_packing(live(model, PackCollator(tokenizer)), compute_dtype="float32")
    assert reading["packing"] == "isolated"
    assert reading["packing_loss_difference"] < 1e-5
    assert reading["packing_neighbour_difference"] == 0
    check_isolated(reading, "sdpa")


def test_a_model_that_keeps_a_cache_leaks(model: Any, tokenizer: Any) -> None:
    model.config.use_cache = True
    reading = read_packing(live(model, PackCollator(tokenizer)), compute_dtype="float32")
    assert reading["packing"] == "leaks"


def test_documents_that_attend_to_each_other_end_the_run(model: Any, tokenizer: Any) -> None:
    class Leaky(PackCollator):
        def __call__(self, packs: Any) -> Any:
            batch = super().__call__(packs)
            return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}

    reading = read_packing(live(model, Leaky(tokenizer)), compute_dtype="float32")
    assert reading["packing"] == "leaks"
    with pytest.raises(AttestationFailed, match="packed rows are not isolated") as caught:
        check_isolated(reading, "sdpa")
    assert "group_by_length" in str(caught.value)

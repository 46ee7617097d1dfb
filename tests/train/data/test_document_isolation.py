"""Isolation of packed documents, measured on a live model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.errors import AttestationFailed
from toolkit.job.job import Job
from toolkit.observe.attest.differences import differences
from toolkit.train.data.collation import PackCollator
from toolkit.train.data.document_isolation import check_isolated, read_packing
from toolkit.train.data.packing import packs_into_one_row
from toolkit.train.expected_readings import expected_methods
from toolkit.train.model.varlen_attention import register

register()


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
    )


@pytest.fixture(params=["sdpa", "eager", "sdpa_varlen"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=request.param, dtype=torch.float32)
    model.config.use_cache = False  # as load_model does; with a cache transformers looks for no documents
    return model


def collator(model: Any, tokenizer: Any, kind: type[PackCollator] = PackCollator) -> PackCollator:
    return kind(tokenizer, one_row=packs_into_one_row(model))


def test_documents_of_a_pack_are_isolated_in_the_live_model(model: Any, tokenizer: Any) -> None:
    reading = read_packing(live(model, collator(model, tokenizer)), compute_dtype="float32")
    assert reading["packing"] == "isolated"
    assert reading["packing_loss_difference"] < 1e-5
    assert reading["packing_neighbour_difference"] == 0
    check_isolated(reading, "sdpa")


def test_the_masks_of_the_test_documents_are_counted(model: Any, tokenizer: Any) -> None:
    reading = read_packing(live(model, collator(model, tokenizer)), compute_dtype="float32")
    # two rows of 45 tokens: a byte, or 4, per pair of positions
    bytes_of = {"sdpa": 2 * 45**2, "eager": 4 * 2 * 45**2, "sdpa_varlen": 0}
    assert reading["packing_mask_bytes"] == bytes_of[model.config._attn_implementation]


@pytest.mark.parametrize("model", ["sdpa"], indirect=True)
def test_a_mask_in_place_of_document_lengths_is_a_difference(model: Any, tokenizer: Any) -> None:
    """transformers can fall back to another function than the one that was asked for."""
    parsed = SimpleNamespace(
        job=Job(attn_implementation="sdpa_varlen", packing=True),
        training=SimpleNamespace(neftune_noise_alpha=None),
        pipeline=None,
    )
    reading = read_packing(live(model, collator(model, tokenizer)), compute_dtype="float32")
    rank: Any = {**reading, "rank": 0, "attn_implementation": model.config._attn_implementation}
    names = ("packing_mask_bytes", "attn_implementation")
    expected = {name: value for name, value in expected_methods(parsed).items() if name in names}
    assert sorted(map(str, differences(expected, [rank]))) == [
        "attn_implementation on rank 0 is sdpa, expected sdpa_varlen",
        "packing_mask_bytes on rank 0 is 4050, expected 0",
    ]


# A cache makes transformers ignore the documents; lengths are not ignored.
@pytest.mark.parametrize("model", ["sdpa", "eager"], indirect=True)
def test_a_model_that_keeps_a_cache_leaks(model: Any, tokenizer: Any) -> None:
    model.config.use_cache = True
    reading = read_packing(live(model, collator(model, tokenizer)), compute_dtype="float32")
    assert reading["packing"] == "leaks"


def test_documents_that_attend_to_each_other_end_the_run(model: Any, tokenizer: Any) -> None:
    class Leaky(PackCollator):
        def __call__(self, packs: Any) -> Any:
            batch = super().__call__(packs)
            batch = {name: value for name, value in batch.items() if not name.startswith(("cu_seq", "max_length"))}
            return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}

    reading = read_packing(live(model, collator(model, tokenizer, Leaky)), compute_dtype="float32")
    assert reading["packing"] == "leaks"
    with pytest.raises(AttestationFailed, match="packed rows are not isolated") as caught:
        check_isolated(reading, "sdpa")
    assert "group_by_length" in str(caught.value)

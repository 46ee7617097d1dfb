"""Batches of rows and of packs: padding, labels, position ids, and the recorded contents."""

from __future__ import annotations

import copy
import hashlib
import logging
from typing import Any

import pytest
import torch

from toolkit.observe.batches import BATCH_FACTS, IGNORED, BatchFacts, ObservedCollator
from toolkit.train.data.collation import Collator, PackCollator, batch_facts
from toolkit.train.data.packing import joined


def row(number: int, length: int) -> dict[str, Any]:
    """A row with tokens of its own."""
    tokens = [100 * (number + 1) + place for place in range(length)]
    return {"input_ids": tokens, "labels": tokens, "length": length, "row": number}


PACKED_ROWS = [row(0, 3), row(1, 5), row(2, 2), row(3, 4)]


def observed(collator: Collator) -> ObservedCollator:
    return ObservedCollator(collator, batch_facts)


def test_position_ids_restart_with_each_document_and_with_padding(tokenizer: Any) -> None:
    batch = PackCollator(tokenizer)([joined([PACKED_ROWS[0], PACKED_ROWS[2]]), joined([PACKED_ROWS[2]])])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch


def test_the_first_token_of_a_document_is_not_a_target(tokenizer: Any) -> None:
    batch = observed(PackCollator(tokenizer))([joined([PACKED_ROWS[0], PACKED_ROWS[2]]), joined([PACKED_ROWS[2]])])
    assert batch["labels"].tolist() == [
        [IGNORED, 101, 102, IGNORED, 301],
        [IGNORED, 301, IGNORED, IGNORED, IGNORED],
    ]
    facts = batch[BATCH_FACTS]
    assert (facts.tokens, facts.non_padding_tokens, facts.supervised_tokens) == (10, 7, 4)
    assert facts.rows == (0, 2, 2)


def test_flash_attention_gets_all_packs_in_one_row(tokenizer: Any) -> None:
    batch = PackCollator(tokenizer, one_row=True)([joined([PACKED_ROWS[0], PACKED_ROWS[2]]), joined([PACKED_ROWS[2]])])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 101, 102, IGNORED, 301, IGNORED, 301]]


# -- rows that are not packed

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "row": 4},
    {"input_ids": [8, 9], "labels": [8, 9], "row": 2},
]


def test_a_batch_is_padded_on_the_right_and_its_contents_are_recorded(tokenizer: Any) -> None:
    before = copy.deepcopy(tokenizer.init_kwargs), tokenizer.padding_side, tokenizer.pad_token
    pad = tokenizer.pad_token_id
    batch = observed(Collator(tokenizer))(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, pad]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    content = torch.tensor([[5, 6, 7, 8, 9, pad], [IGNORED, 6, 7, 8, 9, IGNORED]]).numpy().tobytes()
    assert batch[BATCH_FACTS] == BatchFacts(
        tokens=6,
        non_padding_tokens=5,
        supervised_tokens=3,  # 6, 7 and 9: nothing predicts the first token of a row
        sha256=hashlib.sha256(content).hexdigest(),
        rows=(4, 2),
    )
    assert before == (tokenizer.init_kwargs, tokenizer.padding_side, tokenizer.pad_token)


def test_a_tokenizer_without_a_pad_token_pads_with_the_eos_token(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    assert Collator(bare)(ROWS)["input_ids"][1, 2] == tokenizer.eos_token_id
    assert bare.pad_token is None


def test_the_recorded_contents_pass_through_accelerate(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = torch.utils.data.DataLoader(ROWS * 2, batch_size=2, collate_fn=observed(Collator(tokenizer)))
    with caplog.at_level(logging.WARNING):
        batches = list(accelerate.Accelerator(cpu=True).prepare(loader))
    assert [batch[BATCH_FACTS].non_padding_tokens for batch in batches] == [5, 5]
    assert batches[0][BATCH_FACTS] == batches[1][BATCH_FACTS]
